"""Petastorm 0.13.1 on today's pyarrow, numpy and Python, which dropped names that it imports.

    from lockstep.petastorm import enable
    enable()
    from petastorm import make_batch_reader

`enable()` adds those names for Petastorm's own modules while they are imported; all other modules see pyarrow and numpy
unchanged. docs/decisions/066-petastorm.md describes how, docs/reading-elsewhere.md what works. Importing this package
loads neither Petastorm nor Spark nor TensorFlow.
"""
