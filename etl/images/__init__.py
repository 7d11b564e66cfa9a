"""Image sets: folders, tar archives, IDX, CIFAR and Parquet become records of pixels or encoded images."""
