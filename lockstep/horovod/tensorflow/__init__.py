"""`import lockstep.horovod.tensorflow as hvd`, for scripts that keep Horovod's module path; the same names."""

from lockstep.horovod import *  # noqa: F403 - the same names, whatever they are
from lockstep.horovod import __getattr__ as __getattr__
