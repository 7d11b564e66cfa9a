"""An initialised rank: its number among the ranks and hosts, and the communicator of Horovod's calls."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from lockstep.horovod.gpus import Seat, line_up
from lockstep.storage.errors import CommunicationError, ConfigError, TrainingFailedError, require
from lockstep.training.comm.base import Communicator, SoloCommunicator
from lockstep.training.comm.options import UNAUTHENTICATED, CommOptions
from lockstep.training.control import context as current
from lockstep.training.control.protocol import HOROVOD, SCRIPT
from lockstep.training.world import World

if TYPE_CHECKING:
    from lockstep.training.control.context import RankContext

HINTS = {
    "device_dense": str,
    "device_sparse": str,
    "device": str,
    "use_locking": bool,
    "num_groups": int,
    "groups": int | list,
}
"""Arguments for where and how many at a time Horovod sends tensors, which do not change the sums: name -> type."""


GRADIENTS = "the gradients of DistributedOptimizer"
"""How the text of a call begins that stands for the exchange of an optimizer's step, on a communicator of its own."""


def agree(communicator: Communicator, number: int, text: str, extra: int = 0) -> list[int]:
    """Compare call `number` of this rank with the others'; returns every rank's `extra`.

    Raises TrainingFailedError on every rank alike, naming rank 0's call and the first that differs.
    """
    communicator = communicator.on_host
    if communicator.num_ranks == 1:
        return [extra]
    digest = int.from_bytes(blake2b(f"{number} {text}".encode(), digest_size=8).digest(), "big", signed=True)
    try:
        rows = communicator.all_gather(np.array([digest, extra], np.int64))
    except CommunicationError as error:
        if error.left is None:
            error.what += f", in call {number}: {text}"
            raise
        raise _left(communicator.rank, error.left, f"{text} (call {number})") from error
    if (rows[:, 0] != rows[0, 0]).any():
        calls = [part.decode() for part in communicator.all_gather_bytes(f"{text} (call {number})".encode())]
        other = next(rank for rank in range(len(calls)) if calls[rank] != calls[0])
        raise TrainingFailedError(
            f"ranks 0 and {other} make different calls",
            got=f"rank 0: {calls[0]}; rank {other}: {calls[other]}",
            allowed="the same calls in the same order on all ranks, with equal shapes and dtypes",
            next_step=_why_different(dict(enumerate(calls)), 0, other),
        )
    return [int(row) for row in rows[:, 1]]


def _left(me: int, left: int, mine: str) -> CommunicationError:
    """The error of a call that waits for a rank whose script has ended, perhaps by an error of its own."""
    return CommunicationError(
        f"ranks {me} and {left} make different calls",
        got=f"rank {me}: {mine}; rank {left}: none: its script has ended, or called hvd.shutdown()",
        allowed="the same calls in the same order on all ranks",
        next_step=f"If rank {left} has failed, mend that. {_why_different({me: mine, left: ''}, me, left)}",
    )


def _why_different(calls: Mapping[int, str], first: int, second: int) -> str:
    """What to look for when two ranks make these different calls: the rank that steps has batches left."""
    steps = [calls[rank].startswith(GRADIENTS) for rank in (first, second)]
    if steps[0] == steps[1]:
        return "Look for a call under `if rank() == 0`, or for ranks with different numbers of batches."
    return (
        f"Rank {second if steps[0] else first} may have fewer batches: give each rank as many, by dataset.take(n) "
        "or steps_per_epoch=n. Else look for a call under `if rank() == 0`."
    )


def check(call: str, **given: Any) -> None:
    """Accept hints, and the set of all ranks as `process_set`; refuse any other argument that is not at its default.

    None, "", False, 0 and empty lists are defaults. Raises ConfigError for an unsupported argument, and for a hint of
    the wrong type, which was meant for another argument.
    """
    for name, value in given.items():
        if value is None or (name == "process_set" and getattr(value, "process_set_id", None) == 0):
            continue
        if name not in HINTS:
            if value not in ("", False, 0, []):
                absent(f"{call}({name}=...)", repr(value))
        else:
            allowed = f"{getattr(HINTS[name], '__name__', HINTS[name])}, which changes nothing here"
            next_step = "Pass arguments by keyword: Horovod's modules have them in different orders."
            right = isinstance(value, HINTS[name])
            require(right, f"the argument `{name}` of hvd.{call}", repr(value), allowed, next_step)


def absent(what: str, got: str = "", instead: str = "") -> NoReturn:
    """Raise ConfigError for a part of Horovod that is not supported."""
    raise ConfigError(
        f"lockstep.horovod has no {what}",
        got=got or what,
        allowed="what docs/models.md lists",
        next_step=instead or "Leave it out, or look for an alternative in docs/models.md.",
    )


ShowGpus = Callable[[Sequence[Seat], Seat, MutableMapping[str, str]], None]


class Runtime:
    """An initialised rank: its world, its hosts and the communicator that Horovod's calls share."""

    def __init__(self, context: RankContext | None, show_gpus: ShowGpus | None) -> None:
        self.context, self.process = context, os.getpid()
        self.world = World.local(0, 1) if context is None else context.world
        # First: joining a backend of TensorFlow starts TensorFlow, and then GPUs cannot be chosen any more.
        seats = self._gather_seats(show_gpus)
        self.whole: Communicator = SoloCommunicator() if context is None else context.communicator()
        self.communicator = self.new_group()
        self.lock = threading.Lock()
        self.calls = 0
        self.error: BaseException | None = None
        self.exchanges: list[Any] = []
        self.buffers: dict[Any, Any] = {}
        self.queue = ThreadPoolExecutor(1, "horovod")
        """Makes PyTorch's calls one after another, in the order in which the script makes them."""
        self.last_call: Future[Any] | None = None
        """The newest of these calls."""
        hosts = list(dict.fromkeys(seat.host for seat in seats))  # in order of their first rank
        self.counts = [sum(seat.host == host for seat in seats) for host in hosts]
        # The hosts that have a rank of this one's local number, in order.
        peers = {seat.host for seat in seats if seat.rank_of_node == self.world.rank_of_node}
        self.cross = [host for host in hosts if host in peers]
        self.cross_rank = self.cross.index(seats[self.world.rank].host)

    def _gather_seats(self, show_gpus: ShowGpus | None) -> list[Seat]:
        """Every rank's seat; `show_gpus` puts this rank's GPU at the index where scripts look for it. A collective."""
        context = self.context
        if context is None:
            return [Seat(socket.gethostname(), 0)]
        mine = Seat.of(context.host, self.world, os.environ)
        apart = context.comm.options.backend in UNAUTHENTICATED
        first = (
            context.join(CommOptions(backend="tcp", algorithm="ring")).communicator if apart else context.communicator()
        )
        try:
            seats = [Seat.from_bytes(data) for data in first.all_gather_bytes(mine.to_bytes())]
        finally:
            if apart:
                first.close()
        if show_gpus is not None and not _has_begun:  # TensorFlow lists its devices once, also if this begins again
            show_gpus(seats, mine, os.environ)
        return seats

    def new_group(self) -> Communicator:
        """A communicator of all ranks for another thread. A collective."""
        return self.whole.group(range(self.world.num_ranks))

    def group_of_optimizer(self) -> Communicator:
        """`new_group`, for an optimizer. Raises TrainingFailedError if other ranks make another call."""
        return cast(Communicator, call("DistributedOptimizer(...)", 0, lambda communicator, extras: self.new_group()))

    def add_exchange(self, exchange: Any) -> Callable[[], None]:
        """Keep an optimizer's exchange, to end it with the others; returns the check that each of its steps makes, that
        all ranks exchange gradients of this optimizer now.
        """
        self.exchanges.append(exchange)
        text = f"{GRADIENTS} {len(self.exchanges)}"
        return lambda: call(text, 0, lambda communicator, extras: None)

    def beat(self, phase: str) -> None:
        """Report this rank's progress to the driver."""
        if self.context is not None:
            self.context.control.beat(self.calls, phase)


_runtime: Runtime | None = None
_has_begun = False  # in this process, whether or not it has left since


def init(*args: Any, **kwargs: Any) -> None:
    """Join the other ranks of this launch; without lockstep launch this process is the only rank.

    A second call does nothing. Horovod's `comm` and `process_sets` are refused: all ranks always take part.
    """
    check("init", **{f"argument {i + 1}": value for i, value in enumerate(args)}, **kwargs)
    begin(line_up)


def begin(show_gpus: ShowGpus | None) -> None:
    """Do what `init` does for one framework, whose list of GPUs `show_gpus` puts in order."""
    global _runtime, _has_begun
    if _runtime is None:
        _runtime = Runtime(current.context(), show_gpus)
        _runtime.beat(HOROVOD)
        if not _has_begun:
            current.report_faults_of(_fault)
            _has_begun = True


def shutdown() -> None:
    """Leave the other ranks; later calls need `init` again. Does nothing before `init`."""
    global _runtime
    if _runtime is not None:
        _runtime.queue.shutdown()
        for exchange in _runtime.exchanges:
            exchange.close()
        _runtime.communicator.close()
        _runtime.beat(SCRIPT)
        _runtime = None


def is_initialized() -> bool:
    """Whether `init` has been called."""
    return _runtime is not None


def runtime() -> Runtime:
    """The runtime of this rank; raises ConfigError before `init`."""
    if _runtime is None:
        raise ConfigError(
            "Horovod's calls need an initialised rank",
            got="a call before hvd.init() or after hvd.shutdown()",
            allowed="hvd.init() first",
            next_step="Call hvd.init() at the start of the script.",
        )
    return _runtime


def own_runtime() -> Runtime:
    """Return `runtime()`; raises ConfigError in a process that the rank has forked."""
    here = runtime()
    if os.getpid() != here.process:
        raise ConfigError(
            "a forked process has called other ranks",
            got=f"process {os.getpid()}, a child of the rank's process {here.process}",
            allowed="calls from the process that called hvd.init()",
            next_step="Data workers should only read; call other ranks from the script itself.",
        )
    return here


def rank() -> int:
    """This rank's number, from 0."""
    return runtime().world.rank


def size() -> int:
    """The number of ranks."""
    return runtime().world.num_ranks


def local_rank() -> int:
    """This rank's number among the ranks of its host."""
    return runtime().world.rank_of_node


def local_size() -> int:
    """The number of ranks on this host."""
    return runtime().world.ranks_per_node


def cross_rank() -> int:
    """The number of this host among the hosts that have a rank of this local number."""
    return runtime().cross_rank


def cross_size() -> int:
    """How many hosts have a rank of this local number."""
    return len(runtime().cross)


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return len(set(runtime().counts)) == 1


def not_built(verbose: bool = False) -> bool:
    """Whether one of Horovod's libraries (MPI, Gloo, NCCL, ...) is available: always False."""
    return False


def call(text: str, extra: int, function: Callable[[Communicator, list[int]], Any]) -> Any:
    """Call `function(communicator, every rank's extra)` after a check that all ranks make the same call.

    `text` must be equal on all ranks. If it differs, raises TrainingFailedError on every rank, naming two of them.
    """
    here = own_runtime()
    with here.lock:
        here.calls += 1
        try:
            return function(here.communicator, agree(here.communicator, here.calls, text, extra))
        except BaseException as error:
            here.error = error
            raise
        finally:
            here.beat(HOROVOD)


def _fault() -> BaseException | None:
    if _runtime is None:
        return None
    errors = [_runtime.error, *(exchange.fault() for exchange in _runtime.exchanges)]
    return next((error for error in errors if error is not None), None)


class AllRanks:
    """The only process set that Horovod's `process_set` arguments accept."""

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
