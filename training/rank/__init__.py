"""One rank's process."""
