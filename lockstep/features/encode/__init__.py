"""Turns columns into the arrays that a model is fed."""
