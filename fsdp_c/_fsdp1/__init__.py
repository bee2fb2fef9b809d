"""The class FullyShardedDataParallel, and FSDP1's attributes on it."""
