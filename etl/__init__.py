"""Spark jobs from raw input to rows, splits and shards; imports nothing of training."""
