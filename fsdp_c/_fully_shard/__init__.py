"""The second API, PyTorch's ``fully_shard`` (FSDP2), over the same engine."""
