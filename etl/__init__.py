"""Raw input to rows, splits and shards, on Spark; knows nothing of training."""

VERSION = "0.1.0"
