"""Scores of a split: exact metrics with intervals, over all ranks, and baselines on the same rows."""
