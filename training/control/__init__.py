"""The line between the driver and its ranks."""
