"""Which row belongs to which split, and what leaks between splits."""
