"""Horovod's verbs under their known names, over Lockstep's ranks: `import training.horovod as hvd`.

A script of Horovod for TensorFlow 2 or Keras runs after this change of its import; by jobs.launch on N ranks, by itself
on one. docs/launch.md lists what is there and what differs; what is missing is refused by name.
"""

from __future__ import annotations

from typing import Any

from training.horovod import callbacks
from training.horovod.compression import Compression
from training.horovod.gather import allgather, broadcast, broadcast_variables
from training.horovod.objects import allgather_object, barrier, broadcast_object
from training.horovod.optimizer import DistributedOptimizer, load_model
from training.horovod.place import (
    absent,
    cross_rank,
    cross_size,
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
from training.horovod.reduce import Adasum, Average, Max, Min, Sum, allreduce, grouped_allreduce
from training.horovod.tape import DistributedGradientTape

# What scripts ask before they choose a way of Horovod's.
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
    "elastic": "Start with jobs.launch --max-restarts N and resume from the script's own checkpoint.",
    "join": "Give all ranks the same number of batches, such as dataset.take(smallest).",
    "alltoall": "Use hvd.allgather and take this rank's rows.",
    "reducescatter": "Use hvd.allreduce and take this rank's part.",
    "grouped_allgather": "Call hvd.allgather for each tensor.",
    "grouped_reducescatter": "Use hvd.grouped_allreduce.",
    "ProcessSet": "All ranks take part in every call.",
    "add_process_set": "All ranks take part in every call.",
    "remove_process_set": "All ranks take part in every call.",
    "global_process_set": "Leave process_set out: all ranks take part in every call.",
    "SyncBatchNormalization": "Use training.keras_ranks.rank_step(model, communicator, batchnorm='sync').",
    "BroadcastGlobalVariablesHook": "Sessions of TensorFlow 1 are not served; use hvd.broadcast_variables.",
    "broadcast_global_variables": "Use hvd.broadcast_variables(model.variables, root_rank=0).",
    "DistributedAdasumOptimizer": "Use hvd.DistributedOptimizer.",
    "PartialDistributedGradientTape": "Use hvd.DistributedGradientTape.",
    "PartialDistributedOptimizer": "Use hvd.DistributedOptimizer.",
    "start_timeline": "Use tf.profiler, or jobs.train's report.",
    "stop_timeline": "Use tf.profiler, or jobs.train's report.",
    "run": "Start ranks with jobs.launch.",
}


def __getattr__(name: str) -> Any:
    if name in ABSENT:
        absent(f"`{name}`", f"hvd.{name}", ABSENT[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
