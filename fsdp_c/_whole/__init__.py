"""Optimizers that need whole parameters, of models of either API."""
