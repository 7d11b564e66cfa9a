"""Statistics of the training split: vocabularies, moments, class counts; and baked rows, which they are applied to."""
