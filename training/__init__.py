"""Shards to batches, steps, checkpoints and a model; knows nothing of ETL."""
