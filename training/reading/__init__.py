"""Shards to checked rows."""
