"""Training on N ranks: plan, read, exchange, step, checkpoint, restart."""
