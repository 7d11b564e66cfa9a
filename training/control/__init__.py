"""The control channel between the driver and its ranks."""
