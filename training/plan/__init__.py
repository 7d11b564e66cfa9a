"""Which samples are in which batch."""
