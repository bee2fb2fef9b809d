"""``python -m fsdp_c bench``: a step of fsdp_c, FSDP1, FSDP2 and DDP on this machine.

Each trains the same transformer, on all GPUs or on the CPU, in processes of its own.
The rounds are interleaved: neither other programs nor the order favours one.
See docs/guide/bench.md.
"""
