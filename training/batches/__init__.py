"""Makes the batches of a step from checked rows."""
