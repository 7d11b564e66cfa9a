"""Pixels: decode, resize, augment."""
