"""Where this process stands among the ranks, and the communicator of Horovod's calls."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import tensorflow as tf

from lockstep.storage.errors import ConfigError, TrainingFailedError
from training.comm.base import Communicator, SoloCommunicator
from training.comm.options import UNAUTHENTICATED, CommOptions
from training.control import context as current
from training.control.protocol import HOROVOD, SCRIPT
from training.horovod.gpus import Seat, line_up
from training.world import World

if TYPE_CHECKING:
    from training.control.context import RankContext


def agree(communicator: Communicator, number: int, text: str, extra: int = 0) -> list[int]:
    """Compare call `number` of this rank with the others'; returns every rank's `extra`.

    Raises TrainingFailedError on every rank alike, naming rank 0's call and the first that differs.
    """
    if communicator.num_ranks == 1:
        return [extra]
    digest = int.from_bytes(blake2b(f"{number} {text}".encode(), digest_size=8).digest(), "big", signed=True)
    rows = communicator.all_gather(np.array([digest, extra], np.int64))
    if (rows[:, 0] != rows[0, 0]).any():
        told = [part.decode() for part in communicator.all_gather_bytes(f"{text} (call {number})".encode())]
        other = next(rank for rank in range(len(told)) if told[rank] != told[0])
        raise TrainingFailedError(
            f"ranks 0 and {other} make different calls",
            got=f"rank 0: {told[0]}; rank {other}: {told[other]}",
            allowed="the same calls in the same order on all ranks, with equal shapes and dtypes",
            next_step="Look for a call under `if rank() == 0`, or for ranks with different numbers of batches.",
        )
    return [int(row) for row in rows[:, 1]]


HINTS = {
    "device_dense": str,
    "device_sparse": str,
    "device": str,
    "use_locking": bool,
    "num_groups": int,
    "groups": int | list,
}
"""Where, and how many at a time, Horovod sends tensors; what is summed is the same without. Their types."""


def check(call: str, **given: Any) -> None:
    """Take hints, and the set of all ranks as `process_set`; refuse any other argument that is not at its default.

    None, "", False, 0 and empty lists are defaults. Raises ConfigError for an argument that has no meaning here, and
    for a hint that cannot be one: a value that was meant for another argument.
    """
    for name, value in given.items():
        if value is None or (name == "process_set" and getattr(value, "process_set_id", None) == 0):
            continue
        if name not in HINTS:
            if value not in ("", False, 0, []):
                absent(f"{call}({name}=...)", repr(value))
        elif not isinstance(value, HINTS[name]):
            raise ConfigError(
                f"hvd.{call} got a `{name}` that cannot be right",
                got=repr(value),
                allowed=f"{getattr(HINTS[name], '__name__', HINTS[name])}, which changes nothing here",
                next_step="Pass arguments by keyword: Horovod's modules have them in different orders.",
            )


def absent(what: str, got: str = "", instead: str = "") -> NoReturn:
    """Raise ConfigError for a part of Horovod that is not here."""
    raise ConfigError(
        f"training.horovod has no {what}",
        got=got or what,
        allowed="what docs/models.md lists",
        next_step=instead or "Leave it out, or see docs/models.md for what stands in its place.",
    )


class Place:
    """An initialised rank: its world, its hosts and the communicator that Horovod's calls share."""

    def __init__(self, context: RankContext | None) -> None:
        self.context, self.process = context, os.getpid()
        self.world = World.local(0, 1) if context is None else context.world
        # Before a backend of TensorFlow's is joined, which starts TensorFlow: GPUs are chosen until then.
        seats = self._tell_seats()
        self.whole: Communicator = SoloCommunicator() if context is None else context.communicator()
        self.communicator = self.new_group()
        self.lock = threading.Lock()
        self.calls = 0
        self.error: BaseException | None = None
        self.exchanges: list[Any] = []
        self.buffers: dict[Any, Any] = {}
        places = [(seat.host, seat.rank_of_node) for seat in seats]
        self.hosts = list(dict.fromkeys(host for host, _ in places))  # in order of their first rank
        self.counts = [sum(other == host for other, _ in places) for host in self.hosts]
        mine = places[self.world.rank][0]
        # The hosts that have a rank of this one's local number, in order.
        self.cross = [host for host in self.hosts if (host, self.world.rank_of_node) in places]
        self.cross_rank = self.cross.index(mine)

    def _tell_seats(self) -> list[Seat]:
        """Every rank's seat, once this rank's GPU stands where scripts look for it. A collective."""
        context = self.context
        if context is None:
            return [Seat(socket.gethostname(), 0)]
        mine = Seat.of(context.host, self.world, os.environ)
        options = CommOptions.from_json(context.payload.get("comm", {}).get("options", {}))
        apart = options.backend in UNAUTHENTICATED
        first = (
            context.join(CommOptions(backend="tcp", algorithm="ring")).communicator if apart else context.communicator()
        )
        try:
            seats = [Seat.from_bytes(told) for told in first.all_gather_bytes(mine.to_bytes())]
        finally:
            if apart:
                first.close()
        if not _has_begun:  # TensorFlow takes its devices once; after hvd.shutdown() they are as they were
            line_up(seats, mine, os.environ)
        return seats

    def new_group(self) -> Communicator:
        """All ranks again, for another thread. A collective."""
        return self.whole.group(range(self.world.num_ranks))

    def said(self, phase: str) -> None:
        """Tell the driver that this rank goes on."""
        if self.context is not None:
            self.context.control.beat(self.calls, phase)


_place: Place | None = None
_has_begun = False  # in this process, whether or not it has left since


def init(*args: Any, **kwargs: Any) -> None:
    """Join the other ranks of this launch; without jobs.launch this process is the only rank.

    A second call does nothing.
    All ranks are always in: Horovod's `comm` and `process_sets` are refused.
    """
    global _place, _has_begun
    check("init", **{f"argument {i + 1}": value for i, value in enumerate(args)}, **kwargs)
    if _place is None:
        _place = Place(current.context())
        _place.said(HOROVOD)
        if not _has_begun:
            current.report_faults_of(_fault)
            _has_begun = True


def shutdown() -> None:
    """Leave: later calls need `init` again. Does nothing before `init`."""
    global _place
    if _place is not None:
        for exchange in _place.exchanges:
            exchange.close()
        _place.communicator.close()
        _place.said(SCRIPT)
        _place = None


def is_initialized() -> bool:
    """Whether `init` has been called."""
    return _place is not None


def here() -> Place:
    """The place of this rank; raises ConfigError before `init`."""
    if _place is None:
        raise ConfigError(
            "Horovod's calls need an initialised rank",
            got="a call before hvd.init() or after hvd.shutdown()",
            allowed="hvd.init() first",
            next_step="Call hvd.init() at the start of the script.",
        )
    return _place


def rank() -> int:
    """This rank's number, from 0."""
    return here().world.rank


def size() -> int:
    """The number of ranks."""
    return here().world.num_ranks


def local_rank() -> int:
    """This rank's number among the ranks of its host."""
    return here().world.rank_of_node


def local_size() -> int:
    """The number of ranks on this host."""
    return here().world.ranks_per_node


def cross_rank() -> int:
    """The number of this host among the hosts that have a rank of this local number."""
    return here().cross_rank


def cross_size() -> int:
    """How many hosts have a rank of this local number."""
    return len(here().cross)


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return len(set(here().counts)) == 1


def not_built(verbose: bool = False) -> bool:
    """Whether one of the libraries under Horovod is there (MPI, Gloo, NCCL ...): none of them is."""
    return False


def call(text: str, extra: int, function: Callable[[Communicator, list[int]], Any]) -> Any:
    """`function(communicator, every rank's extra)`, after all ranks have said that they make the same call.

    `text` is what must be equal on all ranks. Raises TrainingFailedError on every rank where it differs, naming two.
    """
    place = here()
    if os.getpid() != place.process:
        raise ConfigError(
            "a forked process has called other ranks",
            got=f"process {os.getpid()}, a child of the rank's process {place.process}",
            allowed="calls from the process that called hvd.init()",
            next_step="Let data workers read only; call other ranks from the script itself.",
        )
    with place.lock:
        place.calls += 1
        try:
            return function(place.communicator, agree(place.communicator, place.calls, text, extra))
        except BaseException as error:
            place.error = error
            raise
        finally:
            place.said(HOROVOD)


def _fault() -> BaseException | None:
    if _place is None:
        return None
    errors = [_place.error, *(exchange.fault() for exchange in _place.exchanges)]
    return next((error for error in errors if error is not None), None)


class AllRanks:
    """What Horovod's `process_set` arguments may name."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """The ranks in it."""
        return list(range(size()))

    def included(self) -> bool:
        """Whether this rank is in it."""
        return True

    def size(self) -> int:
        """The number of ranks in it."""
        return size()

    def rank(self) -> int:
        """This rank's number in it."""
        return rank()


global_process_set = AllRanks()


_turns: list[tf.Variable] = []


def run(
    function: Callable[..., Sequence[Any]], tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """`function(*arrays)` -> arrays as `specs` say; runs at once in eager mode, else when the graph runs."""
    if tf.executing_eagerly():
        results = function(*map(np.asarray, tensors))  # views: nothing here writes to its arguments
        return [tf.convert_to_tensor(value, spec.dtype) for value, spec in zip(results, specs, strict=True)]

    def taken(turn: Any, *arrays: Any) -> list[Any]:
        return [turn + 1, *function(*arrays)]

    order = _turn()
    # Ranks wait here: nothing of it may be on a device whose kernels run in their own order.
    with tf.device("CPU:0"):
        turn, *results = tf.numpy_function(
            taken, [order.read_value(), *tensors], [tf.int64, *(spec.dtype for spec in specs)], name="horovod"
        )
        order.assign(turn)
    for result, spec in zip(results, specs, strict=True):
        result.set_shape(spec.shape)
    return results


def _turn() -> tf.Variable:
    if not _turns:
        with tf.init_scope(), tf.device("CPU:0"):
            _turns.append(tf.Variable(0, trainable=False, dtype=tf.int64, name="horovod_turn"))
    return _turns[0]
