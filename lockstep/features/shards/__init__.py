"""Ranges and blocks of shards to columns."""
