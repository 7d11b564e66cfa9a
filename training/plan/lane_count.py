"""How many lanes a global batch may have. Errors name a global batch or a number of lanes that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.storage.errors import ConfigError
from lockstep.training.config import TrainConfig

MAX_DEFAULT_LANES = 64
MOST = 1 << 31  # samples of a global batch stay below it


def default_lanes(
    global_batch: int, groups: int | None = None, total: int = MAX_DEFAULT_LANES, cache_groups: int | None = None
) -> int:
    """The largest divisor of G that is at most 64 and at most `total` samples, and a multiple of `groups` and of
    `cache_groups` if given.

    Raises ConfigError if G is not a multiple of these, naming one that is.
    """
    check_lanes(global_batch, groups or 1, groups)
    multiple = math.lcm(groups or 1, cache_groups or 1)
    if global_batch % multiple:
        fitting = -(-global_batch // multiple) * multiple
        hint = f"--cache-groups {math.gcd(global_batch, multiple)} or --global-batch {fitting}"
        raise _refuse(f"{cache_groups} cache groups for a global batch of {global_batch}", hint)
    return multiple * largest_divisor(global_batch // multiple, max(1, min(MAX_DEFAULT_LANES, total) // multiple))


def check_lanes(global_batch: int, lanes: int, groups: int | None = None, num_ranks: int = 1) -> None:
    """Raise ConfigError if L does not divide G, is not a multiple of `groups`, or is smaller than num_ranks.

    With `groups` (ghost BatchNorm) ranks own whole lane groups, so num_ranks is at most `groups`.
    """
    if not (1 <= global_batch < MOST and 1 <= lanes < MOST):
        raise _refuse(f"{lanes} lanes, a global batch of {global_batch}", "numbers from 1 to 2^31 - 1")
    if global_batch % lanes:
        near = max(lanes, round(global_batch / lanes) * lanes)
        fewer = "" if groups else f"--lanes {largest_divisor(global_batch, lanes)} or "
        hint = f"{fewer}--global-batch {near}"
        raise _refuse(f"{lanes} lanes do not divide a global batch of {global_batch}", hint)
    if groups is not None and lanes % groups:
        more = -(-lanes // groups) * groups
        hint = f"--lanes {more} with a --global-batch that is a multiple of {more}"
        raise _refuse(f"{lanes} lanes are not {groups} groups of equal size", hint)
    if num_ranks > (groups or lanes):
        owned, enough = f"{groups} lane groups" if groups else f"{lanes} lanes", num_ranks <= global_batch
        more = global_batch // largest_divisor(global_batch, global_batch // num_ranks) if enough else num_ranks
        hint = f"--num-ranks {groups} or fewer, or --batchnorm sync or local" if groups else f"--lanes {more}"
        if not groups and global_batch % more:
            hint += f" with --global-batch {-(-global_batch // more) * more}"
        raise _refuse(f"{num_ranks} ranks are more than the {owned}", hint)


def check_shares(shares: Sequence[int], lanes: int, groups: int | None, num_ranks: int) -> None:
    """Raise ConfigError unless `shares`, the lanes of each rank, add up and, with `groups`, are whole lane groups."""
    width = lanes // (groups or lanes)
    whole = all(share >= 1 and share % width == 0 for share in shares)
    if len(shares) != num_ranks or sum(shares) != lanes or not whole:
        what = f"shares of {' '.join(map(str, shares))} lanes for {num_ranks} ranks and {lanes} lanes"
        raise _refuse(what, f"{num_ranks} multiples of {width} that add up to {lanes}")


def _refuse(what: str, hint: str) -> ConfigError:
    return ConfigError(
        "ranks, lanes and global batch do not fit together",
        got=what,
        allowed="G a multiple of L, L of the lane groups and cache groups, num_ranks at most L and the lane groups",
        next_step=f"Use {hint}.",
    )


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is at most `at_most` (both >= 1). Takes some ms for one of 31 bits."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return max(size for part in small for size in (part, number // part) if size <= at_most)


def units_of(config: TrainConfig, lanes: int, groups: int | None) -> int:
    """How many units a canonical step computes, each by itself: lane groups, else lanes."""
    return groups or lanes


def allowed_ranks(units: int) -> list[int]:
    """Numbers of ranks at which each rank owns one whole subtree: the powers of two that divide `units`."""
    return [1 << power for power in range(units.bit_length()) if units % (1 << power) == 0]


def check_canonical(config: TrainConfig, lanes: int, groups: int | None) -> None:
    """Raise ConfigError if ranks would own parts of subtrees, naming the numbers of ranks that fit."""
    units = units_of(config, lanes, groups)
    allowed = allowed_ranks(units)
    if config.exactness.canonical and config.ranks.num_ranks not in allowed:
        what = f"{units} {'lane groups' if groups else 'lanes'}"
        raise ConfigError(
            f"{config.ranks.num_ranks} ranks cannot add up {what} in the order of one rank",
            got=f"--canonical with --num-ranks {config.ranks.num_ranks}, {what}",
            allowed=f"powers of two that divide {units}: {', '.join(map(str, allowed))}",
            next_step="Use one of these; --batchnorm local and more --lanes allow more ranks.",
        )
