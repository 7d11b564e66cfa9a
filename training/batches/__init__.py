"""From checked rows to the batches of a step."""
