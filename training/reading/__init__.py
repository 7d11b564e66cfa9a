"""Reads shards into checked rows."""
