"""Measures what bounds a run."""
