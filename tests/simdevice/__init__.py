"""A simulated accelerator: host memory, and streams that are threads."""
