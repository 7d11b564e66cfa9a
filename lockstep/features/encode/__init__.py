"""From columns to the arrays that a model is fed."""
