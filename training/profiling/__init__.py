"""What bounds a run."""
