"""Puts this rank's GPU where Horovod's scripts look for it: at `gpus[hvd.local_rank()]`.

A rank sees only its own GPU (lockstep.training.devices), which TensorFlow lists as its first. Horovod's scripts choose
among the GPUs of all ranks of the host. So TensorFlow, which reads CUDA_VISIBLE_DEVICES once, gets all of them in order
of local rank, and is set at once to use this rank's: a script that chooses by local rank chooses the same, and one that
does not choose has its own. Then the variable is restored: child processes see only the rank's GPU.
Tested with simulated GPUs; never run on a host with several.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass

from lockstep.storage.errors import ConfigError
from lockstep.training import devices
from lockstep.training.world import World


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's host and its GPU there, which all ranks exchange."""

    host: str
    rank_of_node: int
    gpu: str = ""
    """UUID of the rank's own GPU; empty without one, with several, or if its UUID cannot be found (MIG slices)."""
    listed: tuple[str, ...] = ()
    """UUIDs of the GPUs that this rank's process can reach: an executor may have no access to those of others."""

    @classmethod
    def of(cls, host: str, world: World, environment: MutableMapping[str, str]) -> Seat:
        """This process's seat; asks the GPU driver for UUIDs only if a rank with a GPU shares its host with others."""
        given = devices.listed(environment) or ()
        if len(given) != 1 or world.ranks_per_node == 1:
            return cls(host, world.rank_of_node)
        try:
            found = devices.host_gpus()
        except ConfigError as error:
            print(f"this rank's GPU stays gpus[0] of TensorFlow's list: {error.what} ({error.got})")
            return cls(host, world.rank_of_node)
        own = next((gpu.uuid for gpu in found if given[0] in (gpu.index, gpu.uuid)), "")
        return cls(host, world.rank_of_node, own, tuple(gpu.uuid for gpu in found))

    def to_bytes(self) -> bytes:
        """The fields as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Seat:
        """The inverse of `to_bytes`."""
        fields = json.loads(data)
        return cls(**{**fields, "listed": tuple(fields["listed"])})


def in_local_order(seats: Sequence[Seat], mine: Seat) -> tuple[str, ...]:
    """UUIDs of the GPUs of the host's ranks in order of local rank.

    Empty if scripts cannot choose among them: a rank is the only one of its host, does not have exactly one GPU, shares
    it (CUDA takes no device twice), or this process cannot reach the others'.
    """
    mates = sorted((seat for seat in seats if seat.host == mine.host), key=lambda seat: seat.rank_of_node)
    gpus = tuple(seat.gpu for seat in mates)
    complete = [seat.rank_of_node for seat in mates] == list(range(len(mates)))
    distinct = len({*gpus}) == len(gpus) > 1
    return gpus if complete and distinct and "" not in gpus and {*gpus} <= {*mine.listed} else ()


def line_up(seats: Sequence[Seat], mine: Seat, environment: MutableMapping[str, str]) -> None:
    """Make TensorFlow list the GPUs of this host's ranks in local order and use this rank's; see the module.

    If TensorFlow has already listed its devices, its list stays, and a line prints the index of the rank's GPU. Raises
    ConfigError if TensorFlow lists other GPUs than those in the variable: this rank's could not be identified.
    """
    gpus = in_local_order(seats, mine)
    if not gpus:
        return
    import tensorflow as tf
    from tensorflow.python.eager import context

    if context.context()._physical_devices is not None:
        if mine.rank_of_node > 0:
            print(
                "TensorFlow listed its devices before hvd.init(), so this rank's GPU is gpus[0]; in a script that uses "
                "gpus[hvd.local_rank()], call hvd.init() first"
            )
        return
    own = environment[devices.VISIBLE]
    environment[devices.VISIBLE] = ",".join(gpus)
    try:
        found = tf.config.list_physical_devices("GPU")
    finally:
        environment[devices.VISIBLE] = own
    if not found:
        print(f"TensorFlow sees none of this host's {len(gpus)} GPUs: install requirements-gpu.txt, CUDA's libraries")
    elif len(found) != len(gpus):
        raise ConfigError(
            "TensorFlow lists other GPUs than those of this host's ranks",
            got=f"{len(found)} GPUs, where {devices.VISIBLE} was {','.join(gpus)}",
            allowed=f"{len(gpus)}: one per rank, in order of local rank",
            next_step="Call tf.config.list_physical_devices('GPU') before hvd.init(): then each rank sees only its own "
            "GPU, as gpus[0].",
        )
    else:
        tf.config.set_visible_devices(found[mine.rank_of_node], "GPU")
