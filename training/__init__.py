"""Training on N ranks: plan, read, exchange, step, checkpoint, restart. `config` has the flags of lockstep train."""
