"""Decides which samples are in which batch."""
