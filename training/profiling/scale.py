"""How a run scales: the same step measured at several numbers of ranks, and where the rest of the time went."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.storage.errors import require
from lockstep.training.config import TrainConfig
from lockstep.training.launch.local import OnHost
from lockstep.training.profiling.profile import ROUNDS, Profile, profile
from lockstep.training.profiling.verdict import PARTS, WORDS, Part

if TYPE_CHECKING:
    from lockstep.training.launch.session import Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One number of ranks. Shares are of its step on cold data."""

    num_ranks: int
    global_batch: int
    step_s: float
    samples_per_s: float
    speed_up: float
    """Times the samples a second of the fewest ranks."""
    efficiency: float
    """The speed-up by the ranks added: 1 if twice the ranks are twice as fast."""
    lost: dict[Part, float]
    """What a step needs beyond the ideal one, by part; with `efficiency` the parts add up to 1."""
    of_ceiling: float
    """The share of the rate that the same ranks would reach without an exchange and without waiting for data."""
    steady: bool


def scale(
    config: TrainConfig,
    launch: Launch,
    numbers: Sequence[int],
    *,
    weak: bool = False,
    steps: int | None = None,
    rounds: int = ROUNDS,
    on_point: Callable[[int], None] = lambda done: None,
) -> list[Point]:
    """Measure steps of `config` at each number of ranks; calls `on_point(points done)`.

    Strong scaling keeps the global batch, `weak` the rows of a rank: `config.data.global_batch` is then that of the
    fewest ranks. On one host each rank has the same number of cores at each number of ranks. Raises what `profile`
    raises, and ConfigError for numbers that are not different positive ones.
    """
    numbers = sorted(numbers)
    right = len(set(numbers)) == len(numbers) > 1 and numbers[0] > 0
    require(right, "--num-ranks of a scaling", f"{numbers}", "two or more different numbers", "Use --num-ranks 1 2 4.")
    profiles = []
    for number in numbers:
        batch = config.data.global_batch * number // numbers[0] if weak else config.data.global_batch
        measured = config.but(num_ranks=number, global_batch=batch)
        with cores_of(number / numbers[-1]) if isinstance(launch, OnHost) else cores_of(1.0):
            profiles.append(profile(measured, launch, steps=steps, rounds=rounds))
        on_point(len(profiles))
    return points(profiles)


@contextmanager
def cores_of(share: float) -> Iterator[None]:
    """Meanwhile this process, and the ranks that it starts, have only a share of its cores, at least one."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: max(1, round(len(cores) * share))])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def points(profiles: Sequence[Profile]) -> list[Point]:
    """The scaling of measured profiles, the first of which has the fewest ranks."""
    first = profiles[0]
    before = _parts(first)
    rate_before = first.setting.global_batch / first.measured.cold.median
    found = []
    for each in profiles:
        ranks, batch, step_s = each.setting.num_ranks, each.setting.global_batch, each.measured.cold.median
        # The ideal step has the first one's time for as many rows a rank.
        shrinks = (batch / ranks) / (first.setting.global_batch / first.setting.num_ranks)
        parts = _parts(each)
        lost = {part: (parts[part] - before[part] * shrinks) / step_s for part in PARTS}
        found.append(
            Point(
                num_ranks=ranks,
                global_batch=batch,
                step_s=step_s,
                samples_per_s=batch / step_s,
                speed_up=batch / step_s / rate_before,
                efficiency=sum(before.values()) * shrinks / step_s,
                lost=lost,
                of_ceiling=parts["computing"] / step_s,
                steady=each.verdict.steady,
            )
        )
    return found


def _parts(of: Profile) -> dict[Part, float]:
    """Seconds of a step on cold data by part; they add up to the step."""
    return {part: share * of.measured.cold.median for part, share in of.verdict.shares.items()}


def table(found: Sequence[Point], *, weak: bool) -> str:
    """The points as text."""
    kind = "weak scaling: the rows of a rank stay" if weak else "strong scaling: the global batch stays"
    lines = [
        f"{kind}; medians of steps on data that was not read before",
        "ranks  batch     samples/s  speed-up  efficiency  of ceiling  lost to "
        + "  ".join(f"{part:>9}" for part in PARTS),
    ]
    for point in found:
        lost = "  ".join(f"{point.lost[part]:>9.1%}" for part in PARTS)
        unsteady = "" if point.steady else "  unsteady rounds"
        lines.append(
            f"{point.num_ranks:5}  {point.global_batch:5}  {point.samples_per_s:12,.0f}  {point.speed_up:8.2f}  "
            f"{point.efficiency:10.1%}  {point.of_ceiling:10.1%}          {lost}{unsteady}"
        )
    lines.append("efficiency and losses add up to 100 %; a negative loss is time saved; the ceiling: the same ranks")
    lines.append(f"without {WORDS['exchange']}, {WORDS['storage']} and {WORDS['input'].split(',')[0]}")
    return "\n".join(lines)


def to_json(found: Sequence[Point]) -> list[dict[str, Any]]:
    """The points as JSON objects."""
    return [asdict(point) for point in found]
