"""The layout of a dataset and its manifest."""
