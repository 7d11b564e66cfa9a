"""Raw input to rows, splits and shards by Spark; knows nothing of training."""
