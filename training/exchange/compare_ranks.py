"""Comparisons between ranks: versions, data and tensors at the start, weights during the run."""

from __future__ import annotations

import hashlib
import logging
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from lockstep.storage.documents import canonical_bytes, parse_canonical
from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.training.comm.base import Communicator

_LAYER = re.compile(r"([\w.-]+?)(?:_([0-9]+))?(?=/)")  # a part of a path, with the number that Keras gave it
log = logging.getLogger(__name__)
PACKAGES = ("numpy", "keras", "tensorflow", "pyarrow")
COMPARE_EVERY = 100  # steps: less than 0.1 % of a step of ResNet-20
MAX_NAMED = 10


def everyones(communicator: Communicator, mine: Any) -> list[Any]:
    """Return `mine` (JSON) of every rank, in rank order. A collective: ranks send digests first, and the whole only
    where these differ.
    """
    data = canonical_bytes(mine)
    digests = communicator.all_gather_bytes(hashlib.sha256(data).digest())
    gathered = [data] * len(digests) if len(set(digests)) == 1 else communicator.all_gather_bytes(data)
    return [parse_canonical(one, file="a rank") for one in gathered]


def compare_tensors(communicator: Communicator, tensors: Sequence[str]) -> None:
    """Raise ConfigError on every rank unless all pass the same `tensors` (texts of name, shape and dtype).

    Keras numbers layers by those that the process has built before: if one rank's numbers are all higher, these are the
    same layers, which is logged. Names still count: ranks may have frozen different layers of one shape.
    """
    lists: list[list[str]] = everyones(communicator, list(tensors))
    first = lists[0]
    if all(theirs == first for theirs in lists):
        return
    counted = [counted_from_0(theirs) for theirs in lists]
    if all(theirs == counted[0] for theirs in counted):
        log.warning(
            "layers have other numbers on other ranks; ranks treat them as the same, in order; here %s",
            _words(list(tensors), len(tensors)),
        )
        return
    rank = next(rank for rank, theirs in enumerate(counted) if theirs != counted[0])
    theirs = lists[rank]
    only_theirs = [name for name in theirs if name not in first]
    only_first = [name for name in first if name not in theirs]
    if not only_theirs and not only_first:
        only_theirs, only_first = theirs, first  # only the order differs
    raise ConfigError(
        f"rank {rank} has gradients for other tensors than rank 0",
        got=f"on rank {rank}: {_words(only_theirs, len(theirs))}",
        allowed=f"the same on all ranks, as on rank 0: {_words(only_first, len(first))}",
        next_step="Build the same model on every rank: the same layers in the same order, the same ones frozen, every "
        "output in the loss of every rank.",
    )


def counted_from_0(names: Sequence[str]) -> list[str]:
    """The names, with the layers of each kind numbered from the lowest one: dense_4/ and dense_5/ become 0 and 1.

    A layer without a number is Keras' number 0.
    """
    lowest: dict[str, int] = {}
    for name in names:
        for kind, number in _LAYER.findall(name):
            lowest[kind] = min(int(number or 0), lowest.get(kind, int(number or 0)))
    return [_LAYER.sub(lambda part: f"{part[1]}_{int(part[2] or 0) - lowest[part[1]]}", name) for name in names]


def _words(names: list[str], count: int) -> str:
    shown = ", ".join(names[:20]) or "nothing that the other one lacks"
    return f"{shown}{', ...' if len(names) > 20 else ''} ({count} in all)"


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that every weight depends on."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def processor() -> str:
    """Return `GPU` or `CPU`: this rank's device. If one rank had no GPU, all others would wait for it in each step."""
    import tensorflow as tf

    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"


def compare_runs(communicator: Communicator, mine: Mapping[str, Any]) -> None:
    """Raise ConfigError on every rank, naming the first entry of JSON in which a rank differs from rank 0."""
    first, *others = everyones(communicator, dict(mine))
    for name, value in first.items():
        for rank, other in enumerate(others, 1):
            if other.get(name) != value:
                raise ConfigError(
                    f"rank {rank} differs from rank 0 in `{name}`",
                    got=f"{other.get(name)}",
                    allowed=f"{value}",
                    next_step="Install the same packages and files on every host.",
                )


def view_of(variable: Any) -> NDArray[Any]:
    """The values of a Keras variable (or an array), on a CPU under TensorFlow without a copy.

    Read it at once: while the view is held, TensorFlow copies the variable before its next change.
    """
    value = variable.value if hasattr(variable, "value") and not callable(variable.value) else variable
    # NumPy would copy TensorFlow's variable, but not the tensor read from it, which it cannot convert if it is a scalar
    # of bfloat16, nor a scalar of TensorFlow's strategies.
    read = getattr(value, "read_value" if len(value.shape) else "numpy", None)
    return np.asarray(value if read is None else read())


class DivergedError(LockstepError):
    """Ranks' weights are not equal bit for bit; a restart resumes from a checkpoint, whose weights were compared."""

    diverged_at: int | None = None
    """The step; it reaches the driver with the error."""


class WeightCheck:
    """Compares `variables` (Keras, in one order on all ranks) every COMPARE_EVERY steps and before each checkpoint.

    docs/decisions/079-comparing-ranks.md has the cost.
    """

    def __init__(self, communicator: Communicator, variables: Sequence[Any]) -> None:
        self._comm, self._variables = communicator.on_host, list(variables)
        self._compared: int | None = None  # the last step

    def after(self, step: int) -> None:
        """Compare if `step` is a multiple of COMPARE_EVERY. Raises as `compare`."""
        if step % COMPARE_EVERY == 0:
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare the weights after `step`, unless that is done: 4 bytes a variable from each rank, in one message.

        A collective. Raises DivergedError on every rank.
        """
        if self._comm.num_ranks == 1 or self._compared == step or not self._variables:
            return
        self._compared = step
        sums = checksums(self._variables)
        everyone = self._comm.all_gather(sums)
        if (everyone == everyone[0]).all():
            return
        raise _diverged(step, everyone, [variable.path for variable in self._variables])


def checksums(variables: Sequence[Any]) -> NDArray[np.int64]:
    """Compute (variables,) int64: CRC32C of the bytes of each, which detects every burst of up to 32 changed bits."""
    return np.array([google_crc32c.value(_bytes(variable)) for variable in variables], np.int64)


def _bytes(variable: Any) -> NDArray[np.uint8]:
    """The variable's memory, flat; on a CPU without a copy if TensorFlow allows it."""
    flat = np.ascontiguousarray(view_of(variable)).reshape(-1).view(np.uint8)
    flat.flags.writeable = False  # google_crc32c requires this, and takes no memoryview
    return flat


def _diverged(step: int, sums: NDArray[np.int64], paths: Sequence[str]) -> DivergedError:
    """Return the error that names the ranks whose weights differ, and the first variable; sums (ranks, variables)."""
    rows = [tuple(row) for row in sums.tolist()]
    (common, count), *_ = Counter(rows).most_common()
    if 2 * count > len(rows):
        odd = [rank for rank, row in enumerate(rows) if row != common]
        what = f"the weights of {_ranks(odd)} are not those of the other {count} ranks after step {step}"
        allowed = f"the same on all ranks, bit for bit; a majority, {count} of {len(rows)}, agrees"
    else:
        common, odd = rows[0], [rank for rank, row in enumerate(rows) if row != rows[0]]
        what = f"the weights of {_ranks(odd)} are not those of rank 0 after step {step}"
        allowed = "the same on all ranks, bit for bit; no majority agrees, so any of them may be wrong"
    # The first variable in which any of them differs: an error there may have spread since.
    first = next(i for i in range(len(paths)) if any(rows[rank][i] != common[i] for rank in odd))
    values = ", ".join(f"{rows[rank][first]:08x} on rank {rank}" for rank in odd[:MAX_NAMED])
    count = sum(any(rows[rank][i] != common[i] for rank in odd) for i in range(len(paths)))
    error = DivergedError(
        what,
        got=f"{paths[first]} and {count - 1} more of {len(paths)} variables; CRC32C of the first: {values}, "
        f"{common[first]:08x} elsewhere",
        allowed=allowed,
        next_step="A restart resumes from the last checkpoint. If it happens again on one host, test its memory; if at "
        "the same step, look for a layer or callback that changes weights by data that only one rank has.",
    )
    error.diverged_at = step
    return error


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
