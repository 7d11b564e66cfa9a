"""One sum of gradients a step, in NumPy."""
