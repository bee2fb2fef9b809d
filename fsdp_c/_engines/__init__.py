"""Engines over units, and what acts on units between steps."""
