"""Horovod's verbs under their known names, over Lockstep's ranks: `import lockstep.horovod as hvd`.

For PyTorch it is `import lockstep.horovod.torch as hvd`; so this loads TensorFlow only with a name that needs
it.

A script for Horovod with TensorFlow 2 or Keras runs after this change of its import; under lockstep launch on N ranks,
by itself on one. docs/models.md lists the supported names, docs/moving.md the differences; a missing name is refused
with an alternative. docs/decisions/048-any-script.md.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.horovod.arrays import Adasum, Average, Max, Min, Sum
from lockstep.horovod.objects import allgather_object, barrier, broadcast_object
from lockstep.horovod.runtime import (
    absent,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    not_built,
    rank,
    shutdown,
    size,
)

if TYPE_CHECKING:
    from lockstep.horovod import callbacks
    from lockstep.horovod.collectives import (
        Compression,
        allgather,
        allreduce,
        alltoall,
        broadcast,
        broadcast_variables,
        grouped_allreduce,
    )
    from lockstep.horovod.optimizer import DistributedGradientTape, DistributedOptimizer, load_model

_CALLS = (
    *("Compression", "allgather", "allreduce", "alltoall", "broadcast", "broadcast_variables"),
    "grouped_allreduce",
)
_WITH_TENSORFLOW = {
    **dict.fromkeys(_CALLS, "lockstep.horovod.collectives"),
    **dict.fromkeys(("DistributedGradientTape", "DistributedOptimizer", "load_model"), "lockstep.horovod.optimizer"),
}

# Scripts call these before they choose one of Horovod's backends.
mpi_threads_supported = mpi_enabled = mpi_built = gloo_enabled = gloo_built = not_built
nccl_built = ccl_built = ddl_built = cuda_built = rocm_built = not_built

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]

# Known to Horovod, not here: name -> what to do instead.
ABSENT = {
    "elastic": "Start with lockstep launch --max-restarts N and resume from the script's own checkpoint.",
    "join": "Give all ranks the same number of batches, such as dataset.take(smallest).",
    "reducescatter": "Use hvd.allreduce and take this rank's part.",
    "grouped_allgather": "Call hvd.allgather for each tensor.",
    "grouped_reducescatter": "Use hvd.grouped_allreduce and take this rank's part of each.",
    "Product": "Use tf.reduce_prod(hvd.allgather(tensor[tf.newaxis]), axis=0).",
    "SyncBatchNormalization": "Use lockstep.on_ranks.rank_step(model, communicator, batchnorm='sync').",
    "BroadcastGlobalVariablesHook": "Sessions of TensorFlow 1 are not served; use hvd.broadcast_variables.",
    "broadcast_": "Use hvd.broadcast_variables(variables, root_rank).",
    "broadcast_global_variables": "Use hvd.broadcast_variables(model.variables, root_rank=0).",
    "broadcast_object_fn": "Use hvd.broadcast_object(obj, root_rank).",
    "DistributedAdasumOptimizer": "Use hvd.DistributedOptimizer.",
    "PartialDistributedGradientTape": "Use hvd.DistributedGradientTape for what ranks share, tf.GradientTape else.",
    "PartialDistributedOptimizer": "Use hvd.DistributedOptimizer for what ranks share, a plain optimizer else.",
    "run": "Start ranks with lockstep launch.",
    **dict.fromkeys(("start_timeline", "stop_timeline"), "Use tf.profiler, or lockstep train's report."),
    **dict.fromkeys(
        ("ProcessSet", "add_process_set", "remove_process_set", "process_set_included_op"),
        "All ranks take part in every call: hvd.global_process_set is the only set.",
    ),
    **dict.fromkeys(
        ("rank_op", "local_rank_op", "size_op", "local_size_op"),
        "Use hvd.rank(), hvd.size() and the like: they stay the same while a script runs.",
    ),
    **dict.fromkeys(
        (
            *("broadcast_parameters", "broadcast_optimizer_state", "synchronize", "poll"),
            *("allreduce_", "allreduce_async", "allreduce_async_", "allgather_async", "broadcast_async"),
        ),
        "That is Horovod for PyTorch: import lockstep.horovod.torch as hvd.",
    ),
}


def refuse(module: str, name: str, names: list[str], missing: dict[str, str]) -> NoReturn:
    """Raise ConfigError for a name of Horovod that is `missing` here, AttributeError naming a close one for others."""
    if name in missing:
        absent(f"`{name}`", f"hvd.{name}", missing[name])
    near = get_close_matches(name, [*names, *missing], 1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise AttributeError(f"module {module!r} has no attribute {name!r}; {meant}docs/models.md lists what is there")


if not TYPE_CHECKING:  # a type checker would assume that every name exists

    def __getattr__(name: str) -> Any:
        if name == "callbacks":
            return importlib.import_module("lockstep.horovod.callbacks")
        if name in _WITH_TENSORFLOW:
            return getattr(importlib.import_module(_WITH_TENSORFLOW[name]), name)
        refuse(__name__, name, __all__, ABSENT)
