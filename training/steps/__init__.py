"""One Keras step on N ranks."""
