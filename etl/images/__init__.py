"""Image sets: folders, tar, IDX, CIFAR and Parquet to records of pixels."""
