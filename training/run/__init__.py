"""A run directory: its names, its formats (`checkpoint`: manifest and files), and which checkpoint counts."""
