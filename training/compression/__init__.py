"""Gradients in fewer bytes: methods, their codecs, and sums over ranks of what they send."""
