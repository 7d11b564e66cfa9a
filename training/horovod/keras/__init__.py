"""`import training.horovod.keras as hvd`, for scripts that keep Horovod's module path; the same names."""

from training.horovod import *  # noqa: F403 - the same names, whatever they are
from training.horovod import __getattr__ as __getattr__
