"""Sets up TensorFlow and Keras in a rank's process, before they are imported."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.features.images.decode_many import set_decode_threads
from lockstep.storage.kernels.jit import cache_folder
from lockstep.training.comm.options import UNAUTHENTICATED
from lockstep.training.control.messages import TrainOrder
from lockstep.training.control.task import MARK, SCRATCH_LOCK, scratch_folder
from lockstep.training.devices import listed
from lockstep.training.models import receive
from lockstep.training.rank.usage import Usage
from lockstep.training.strategies.server_process import Server
from lockstep.training.ways import ParameterServer
from lockstep.training.world import World

if TYPE_CHECKING:
    from lockstep.training.control.context import RankContext

# Set before the first import of TensorFlow, which reads them once. Level 3 logs only fatal errors; other errors reach
# Python as exceptions.
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "GRPC_VERBOSITY": "ERROR"}
_CHATTER = ("I0000 ", "W0000 ", "WARNING: All log messages before absl::InitializeLog()")
# One thread may block while it waits for the exchange; the other continues with the graph and the input.
INTER_OP_THREADS = 2


def configure(world: World, *, precision: str, seed: int, canonical: bool = False) -> None:
    """Import TensorFlow and Keras for a rank, and set its threads (its share of the host's cores), floatx, seed and
    determinism. Call it once in a process, before any other use of Keras.

    `canonical` ranks use one thread for arithmetic on any host: kernels that divide a sum among threads add it up in
    another order with another number of threads.
    """
    keep_temporary_files_apart()
    import_tensorflow()
    import keras
    import tensorflow as tf

    _take_gpus(len(listed(os.environ) or ()))
    # One thread a rank on two cores: more threads than cores only take turns, and ranks wait for the slowest.
    threads = 1 if canonical else threads_of(world, len(os.sched_getaffinity(0)))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(INTER_OP_THREADS)
    set_decode_threads(threads_of(world, len(os.sched_getaffinity(0))))
    set_precision(precision)
    # Keras' seed must fit 32 bits; the plan uses the whole seed.
    keras.utils.set_random_seed(seed % 2**32)
    tf.config.experimental.enable_op_determinism()


def keep_temporary_files_apart() -> None:
    """Put temporary files into a folder that the supervisor removes: AutoGraph removes its files in an exit hook, which
    a rank never runs, and a killed rank removes nothing."""
    if (mark := os.environ.get(MARK)) is None:  # no rank's process
        return
    cache_folder()  # of compiled kernels; it may be in the temporary folder that all processes share
    tempfile.tempdir = scratch_folder(mark)
    os.makedirs(tempfile.tempdir, mode=0o700, exist_ok=True)
    with suppress(OSError):  # a folder without locks: then no later run removes it
        name = os.path.join(tempfile.tempdir, SCRATCH_LOCK)
        lock = os.open(f"{name}.new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
        os.rename(f"{name}.new", name)  # locked from its first moment


def import_tensorflow() -> None:
    """Import TensorFlow and Keras without what they print meanwhile; makes none of their settings."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _quiet(), _no_search_for_garbage():
        import keras  # noqa: F401 - held back is what it prints
        import tensorflow  # noqa: F401 - likewise


@contextmanager
def _no_search_for_garbage() -> Iterator[None]:
    """Disable garbage collection during imports: it takes a fifth of TensorFlow's import and finds nothing.

    Afterwards the imported objects are frozen: each full collection would visit a million of them.
    """
    if "tensorflow" in sys.modules:  # ranks as threads: objects that exist by now may become garbage
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
    """Let GPU memory grow on demand: by default TensorFlow takes all of it, and ranks may share a GPU."""
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
        print(f"this rank was given {given} GPUs and computes only on the first: give it one, and start more ranks")


def set_precision(precision: str) -> None:
    """Set Keras' floatx; for mixed_float16 and mixed_bfloat16 the dtype policy, with floatx float32."""
    import keras

    mixed = precision.startswith("mixed_")
    keras.config.set_floatx("float32" if mixed else precision)
    keras.config.set_dtype_policy(precision)


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what TensorFlow's libraries print while they load: facts about the machine that no log level hides.

    Other output to standard error in that time is printed afterwards.
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
    """Train from the last checkpoint to the configured epochs' end; the payload is a TrainOrder.

    A process after the last rank is a parameter server.

    Returns a RankResult as JSON.
    Raises ConfigError and DataError for errors that a restart would repeat, CommunicationError for a lost rank.
    """
    order = TrainOrder.from_json(context.payload)
    config = order.config
    if order.model_function is not None:
        receive(config.model.model, order.model_function)
    if config.num_servers:
        whole = context.communicator()  # before a rank opens its data: servers wait in it
        if whole.rank >= config.ranks.num_ranks:
            assert isinstance(config.way, ParameterServer)
            return Server(whole, config.ranks.num_ranks, config.way.staleness or 0, context.control.beat).run()
        context.world = replace(context.world, num_ranks=config.ranks.num_ranks)
    configure(
        context.world, precision=config.step.precision, seed=config.data.seed, canonical=config.exactness.canonical
    )
    if config.ranks.backend in UNAUTHENTICATED:
        context.communicator()  # TensorFlow's server must start before the first tensor
    from lockstep.training.rank.fit import Fit  # which imports TensorFlow: it must be set up before

    with Usage(context.control, context.world.rank), Fit(context, config) as fit:
        return fit.run()
