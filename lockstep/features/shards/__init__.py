"""Turns ranges and blocks of shards into columns."""
