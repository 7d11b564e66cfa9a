"""`import lockstep.horovod.tensorflow.keras as hvd`, for scripts that keep Horovod's module path; the same
names.
"""

from typing import TYPE_CHECKING

from lockstep.horovod import *  # noqa: F403 - the same names, whatever they are

if not TYPE_CHECKING:  # a type checker would assume that every name exists
    from lockstep.horovod import __getattr__ as __getattr__
