"""Splits: which row belongs to which split, sampling and weights, and the check for leakage between splits."""
