"""Horovod's verbs for PyTorch over Lockstep's ranks: `import lockstep.horovod.torch as hvd`.

A script for Horovod with PyTorch runs after this change of its import; under lockstep launch on N ranks, by itself on
one. docs/pytorch.md lists the supported names and the differences; a missing name is refused with an alternative. No
TensorFlow is loaded. docs/decisions/071-pytorch.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.storage.errors import ConfigError

try:
    import torch  # noqa: F401 - only to name it if it is missing
except ModuleNotFoundError as error:
    raise ConfigError(
        "lockstep.horovod.torch needs PyTorch",
        got=str(error),
        allowed="a Python environment with PyTorch 2.1 or later",
        next_step="Install PyTorch where the ranks run (docs/pytorch.md).",
    ) from error

from lockstep.horovod import ABSENT as OF_TENSORFLOW
from lockstep.horovod import refuse
from lockstep.horovod.arrays import Adasum, Average, Max, Min, Sum
from lockstep.horovod.runtime import (
    begin,
    check,
    cross_rank,
    cross_size,
    global_process_set,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    not_built,
    rank,
    shutdown,
    size,
)
from lockstep.horovod.torch.collectives import (
    Compression,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    poll,
    synchronize,
)
from lockstep.horovod.torch.optimizer import DistributedOptimizer
from lockstep.horovod.torch.states import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

# Scripts call these before they choose one of Horovod's backends.
mpi_threads_supported = mpi_enabled = mpi_built = gloo_enabled = gloo_built = not_built
nccl_built = ccl_built = ddl_built = cuda_built = rocm_built = not_built
_SHARED = (
    *("elastic", "reducescatter", "grouped_allgather", "grouped_reducescatter", "run"),
    *("ProcessSet", "add_process_set", "remove_process_set"),
)
# Known to Horovod for PyTorch, not here: name -> what to do instead.
ABSENT = {
    **{name: OF_TENSORFLOW[name] for name in _SHARED},
    "join": "Give all ranks the same number of batches: lockstep.data.PlannedBatches does.",
    "Product": "Use hvd.allgather(tensor[None]).prod(0).",
    "SyncBatchNorm": "Use torch.nn.GroupNorm, or PyTorch's DistributedDataParallel under lockstep launch.",
    "TorchEstimator": "Write the dataset by lockstep.write_dataset, and start a script with lockstep launch.",
    **dict.fromkeys(("start_timeline", "stop_timeline"), "Use torch.profiler."),
    **dict.fromkeys(
        ("alltoall_async", "sparse_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async"),
        "Use the call without _async or the last underscore.",
    ),
}


def init(*args: Any, **kwargs: Any) -> None:
    """Join the other ranks of this launch; without lockstep launch this process is the only rank.

    A second call does nothing. Horovod's `comm` and `process_sets` are refused: all ranks always take part.
    """
    check("init", **{f"argument {i + 1}": value for i, value in enumerate(args)}, **kwargs)
    begin(None)


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
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
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]

if not TYPE_CHECKING:  # a type checker would assume that every name exists

    def __getattr__(name: str) -> NoReturn:
        refuse(__name__, name, __all__, ABSENT)
