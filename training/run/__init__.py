"""A run directory: its names, its formats, and which checkpoint counts."""
