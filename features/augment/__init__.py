"""Random changes of images as pure functions of (seed, epoch, sample id): docs/batches.md, decision 075."""
