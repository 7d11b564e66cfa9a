"""A variable's numbers as they lie in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def view_of(variable: Any) -> NDArray[Any]:
    """The numbers of a Keras variable (or an array), on a CPU under TensorFlow without a copy.

    For reading at once: while the view is held, TensorFlow copies the variable before its next change.
    """
    value = variable.value if hasattr(variable, "value") and not callable(variable.value) else variable
    read = getattr(value, "read_value", None)  # NumPy copies TensorFlow's variable, and not the tensor that it reads as
    return np.asarray(value if read is None else read())
