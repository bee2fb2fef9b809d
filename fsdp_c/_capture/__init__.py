"""A whole training step in one graph of the device, of models of either API."""
