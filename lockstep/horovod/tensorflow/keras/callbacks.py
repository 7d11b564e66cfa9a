"""`lockstep.horovod.tensorflow.keras.callbacks`, for scripts that keep Horovod's module path."""

from lockstep.horovod.callbacks import *  # noqa: F403 - the same names
