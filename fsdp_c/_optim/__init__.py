"""Optimizer state dicts: saved, loaded, rekeyed and moved between ranks."""
