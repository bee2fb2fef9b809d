"""Tools beside training: plan it, trace it, measure it, check the installation."""
