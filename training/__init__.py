"""Training on N ranks: plan, read, exchange, step, checkpoint, restart. The fields of `config` are jobs.train's flags."""
