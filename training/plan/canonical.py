"""`--canonical`: gradients of units are added in one fixed tree, so that weights are the same bits at any world size.

A unit is a lane group (with ghost BatchNorm) or a lane: so many neighbouring rows of each global batch, which one rank
computes by themselves. The sum over units is a binary tree over their numbers, cut in the middle at each node. A rank
that owns whole subtrees adds up its own, and what is left to add over ranks is the top of the same tree.
"""

from __future__ import annotations

from lockstep.storage.errors import ConfigError
from training.config import TrainConfig

NOTHING, KEEP, ADD = 0, 1, 2


def units_of(config: TrainConfig, lanes: int, groups: int | None) -> int:
    """How many units a global batch is made of."""
    return groups or lanes


def allowed_ranks(units: int) -> list[int]:
    """World sizes at which each rank owns one whole subtree: the powers of two that divide `units`."""
    return [1 << power for power in range(units.bit_length()) if units % (1 << power) == 0]


def check_canonical(config: TrainConfig, lanes: int, groups: int | None) -> None:
    """Raise ConfigError where ranks would own parts of subtrees, naming the numbers of ranks that would do."""
    units = units_of(config, lanes, groups)
    allowed = allowed_ranks(units)
    if config.canonical and config.num_ranks not in allowed:
        what = f"{units} {'lane groups' if groups else 'lanes'}"
        raise ConfigError(
            f"{config.num_ranks} ranks cannot add up {what} as one rank does",
            got=f"--canonical with --num-ranks {config.num_ranks}, {what}",
            allowed=f"powers of two that divide {units}: {', '.join(map(str, allowed))}",
            next_step="Use one of these; --batchnorm local and more --lanes allow more ranks.",
        )


def carries(units: int) -> list[list[int]]:
    """What becomes of each unit's value in the tree over `units`: row u has an entry for each depth, the root's first.

    A value comes from below: at its unit's own depth, then at each one above. KEEP: it is a left part and waits there;
    ADD: it is a right part, added to what waits, and the sum goes one up; NOTHING: the value does not get there, or the
    unit does not lie so deep. At most one value waits at each depth. The last one is kept at depth 0: the sum of all.
    """
    deepest = (units - 1).bit_length()
    table = [[NOTHING] * (deepest + 1) for _ in range(units)]

    def enter(first: int, stop: int, depth: int, is_right: bool) -> None:
        if depth:
            table[stop - 1][depth] = ADD if is_right else KEEP
        else:
            table[stop - 1][0] = KEEP
        if stop - first > 1:
            middle = first + (stop - first) // 2
            enter(first, middle, depth + 1, False)
            enter(middle, stop, depth + 1, True)

    enter(0, units, 0, False)
    return table
