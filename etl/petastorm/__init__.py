"""Petastorm 0.13.1 on today's pyarrow, numpy and Python, which have dropped names that it asks for.

    from etl.petastorm import enable
    enable()
    from petastorm import make_batch_reader

`enable()` gives those names to Petastorm's own modules while they are imported; every other module goes on seeing
pyarrow and numpy as they are. docs/decisions/066-petastorm.md says how, docs/reading-elsewhere.md what works. Importing
this package loads no Petastorm, Spark or TensorFlow.
"""

from etl.petastorm.imports import enable

__all__ = ["enable"]
