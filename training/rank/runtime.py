"""Settings of TensorFlow and Keras in a rank's process, made before they are imported."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.features.images.decode_many import set_decode_threads
from lockstep.storage.kernels.jit import cache_folder
from training.comm.options import UNAUTHENTICATED
from training.config import TrainConfig
from training.control.task import MARK, scratch_folder
from training.devices import listed
from training.world import World

if TYPE_CHECKING:
    from training.control.context import RankContext

# Set here, before the first import of TensorFlow: it reads them once. Level 3 keeps fatal errors alone; what matters
# reaches Python as an exception.
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "GRPC_VERBOSITY": "ERROR"}
_CHATTER = ("I0000 ", "W0000 ", "WARNING: All log messages before absl::InitializeLog()")
# The exchange's await blocks one of these while it waits; the other goes on with the graph and with the input.
INTER_OP_THREADS = 2


def configure(world: World, *, precision: str, seed: int, canonical: bool = False) -> None:
    """Import TensorFlow and Keras for a rank: threads by the cores of its share of the host, floatx, seed, determinism.

    `canonical` ranks have one thread for arithmetic, whatever the host: kernels that share out a sum to their threads
    add it up in another order with more of them. To be called once in a process, before anything else of Keras.
    """
    keep_temporary_files_apart()
    import_tensorflow()
    import keras
    import tensorflow as tf

    _take_gpus(len(listed(os.environ) or ()))
    # One thread a rank on two cores: more threads than cores only take turns, and each rank waits for the slowest.
    threads = 1 if canonical else threads_of(world, len(os.sched_getaffinity(0)))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(INTER_OP_THREADS)
    set_decode_threads(threads_of(world, len(os.sched_getaffinity(0))))
    set_precision(precision)
    # Keras' seed must fit 32 bits; the plan uses the whole one.
    keras.utils.set_random_seed(seed % 2**32)
    tf.config.experimental.enable_op_determinism()


def keep_temporary_files_apart() -> None:
    """Into a folder that the supervisor removes: AutoGraph leaves its files to an exit hook, which no rank's end calls,
    and a killed rank removes nothing."""
    if (mark := os.environ.get(MARK)) is None:  # no rank's process
        return
    cache_folder()  # of compiled kernels, which may lie in the temporary folder that all processes share
    tempfile.tempdir = scratch_folder(mark)
    os.makedirs(tempfile.tempdir, mode=0o700, exist_ok=True)


def import_tensorflow() -> None:
    """Import TensorFlow and Keras without what they print meanwhile; makes none of their settings."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _quiet(), _no_search_for_garbage():
        import keras  # noqa: F401 - held back is what it prints
        import tensorflow  # noqa: F401 - likewise


@contextmanager
def _no_search_for_garbage() -> Iterator[None]:
    """What is imported stays: Python's search for garbage, a fifth of TensorFlow's import, finds none of it.

    Afterwards it is left out for good: each full search would go through a million objects.
    """
    if "tensorflow" in sys.modules:  # ranks as threads: what else is there by now may become garbage
        yield
        return
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if searched:
            gc.enable()


def _take_gpus(given: int) -> None:
    """Let the GPUs' memory grow by need: by default TensorFlow takes all of it, and ranks may share a GPU."""
    import tensorflow as tf

    found = tf.config.list_physical_devices("GPU")
    for gpu in found:
        tf.config.experimental.set_memory_growth(gpu, True)
    if len(found) < given:
        print(
            f"TensorFlow sees {len(found)} of the {given} GPUs that this rank was given (CUDA_VISIBLE_DEVICES="
            f"{os.environ['CUDA_VISIBLE_DEVICES']}): install requirements-gpu.txt, which has CUDA's libraries"
        )
    elif given > 1:
        print(f"this rank was given {given} GPUs and computes on the first alone: give it one, and start more ranks")


def set_precision(precision: str) -> None:
    """Keras' floatx; for mixed_float16 and mixed_bfloat16 the dtype policy, with floatx float32."""
    import keras

    mixed = precision.startswith("mixed_")
    keras.config.set_floatx("float32" if mixed else precision)
    keras.config.set_dtype_policy(precision)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what TensorFlow's libraries print while they load: facts about the machine, no level hides them.

    Whatever else is printed to standard error in that time follows afterwards.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            lines = caught.read().decode(errors="replace").splitlines(keepends=True)
            sys.stderr.write("".join(line for line in lines if not line.startswith(_CHATTER)))


def threads_of(world: World, cores: int) -> int:
    """Threads for one rank's arithmetic: its share of `cores`, at least 1."""
    return max(1, cores // world.ranks_per_node)


def main(context: RankContext) -> dict[str, Any]:
    """Train from the chain's tip to the end of the configured epochs; the payload is {config, plan}.

    Returns {steps, epochs, metrics (last epoch's, over all ranks), samples, seconds, left_over (hex, rank 0 alone)}.
    Raises ConfigError and DataError for what a restart would meet again, CommunicationError for a lost rank.
    """
    config = TrainConfig.from_json(context.payload["config"])
    configure(context.world, precision=config.precision, seed=config.seed, canonical=config.canonical)
    if config.backend in UNAUTHENTICATED:
        context.communicator()  # TensorFlow's server must be there before its first tensor
    from training.rank.fit import Fit  # TensorFlow is imported now that its settings are made

    with Fit(context, config) as fit:
        return fit.run()
