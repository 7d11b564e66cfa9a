"""Thin command-line entries over the rooms; nothing happens at import."""
