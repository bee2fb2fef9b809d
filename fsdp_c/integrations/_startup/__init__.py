"""The folder that ``python -m fsdp_c launch`` puts first on PYTHONPATH."""
