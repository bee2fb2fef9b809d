"""Module state dicts: full, sharded and local ones, saved and loaded."""
