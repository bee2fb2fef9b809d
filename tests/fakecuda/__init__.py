"""A CUDA without a GPU: torch's CUDA build over host memory and threads."""
