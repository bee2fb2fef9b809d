"""The class FullyShardedDataParallel, and what torch's users read off it."""
