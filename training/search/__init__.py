"""Many runs of one model: trials of a search, folds of a dataset."""
