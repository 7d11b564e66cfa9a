"""What the ranks measured in all rounds, put together: seconds of a step and of a batch, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

SYNTHETIC, CACHED, COLD = "synthetic", "cached", "cold"
KINDS = (SYNTHETIC, CACHED, COLD)
CACHED_ALONE, COLD_ALONE = "cached_alone", "cold_alone"
ALONE = (CACHED_ALONE, COLD_ALONE)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more; quartiles as `statistics.quantiles` has them with the ends included."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def width(self) -> float:
        """The quartiles' distance as a share of the median; 0 where that is 0."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds; a step is as slow as its slowest rank, and differences are taken within each round."""

    synthetic: Spread
    """A step on one batch that is fed again and again."""
    cached: Spread
    """A step on batches whose blocks come from memory or the node's cache."""
    cold: Spread
    """A step on batches whose blocks were not read before."""
    handing_over: Spread
    """`cached` less `synthetic`: decoding, encoding, augmenting and handing over, as far as steps wait for it."""
    fetching: Spread
    """`cold` less `cached`: reading, as far as steps wait for it."""
    by_data: Spread
    """`cold` less `synthetic`: both."""
    exchange_s: float
    """That a step on one batch stands still for the sums, on the rank that stands still least: the others wait for it
    too, which is not the exchange's fault."""
    cached_alone: Spread
    """A batch of the slowest rank without a step, from memory or cache."""
    cold_alone: Spread
    """The same from storage."""
    input_cpu_s: float
    """CPU time of a batch of `cached_alone`, all threads."""
    waiting: dict[str, float]
    """By kind: the share of a step that the rank that waits most stood still for its batch
    (training.rank.metrics).
    """


def put_together(ranks: Sequence[Mapping[str, Any]]) -> Measured:
    """Of what each rank returned (training.profiling.profile_rank): {rounds: [{kind: {seconds, steps, ...}}]}, as many
    rounds on each.
    """
    rounds = list(zip(*(rank["rounds"] for rank in ranks), strict=True))  # of each round, all ranks

    def each(kind: str, over: Callable[..., float] = max, part: str = "seconds") -> list[float]:
        return [over(rank[kind][part] / rank[kind]["steps"] for rank in found) for found in rounds]

    def less(kind: str, other: str) -> Spread:
        return Spread.of([a - b for a, b in zip(each(kind), each(other), strict=True)])

    return Measured(
        synthetic=Spread.of(each(SYNTHETIC)),
        cached=Spread.of(each(CACHED)),
        cold=Spread.of(each(COLD)),
        handing_over=less(CACHED, SYNTHETIC),
        fetching=less(COLD, CACHED),
        by_data=less(COLD, SYNTHETIC),
        exchange_s=statistics.median(each(SYNTHETIC, min, "exchange_s")),
        cached_alone=Spread.of(each(CACHED_ALONE)),
        cold_alone=Spread.of(each(COLD_ALONE)),
        input_cpu_s=statistics.median(each(CACHED_ALONE, max, "cpu_s")),
        waiting={
            kind: statistics.median(max(rank[kind]["data_s"] / rank[kind]["seconds"] for rank in r) for r in rounds)
            for kind in KINDS
        },
    )


Part = Literal["storage", "input", "exchange", "computing"]
Bound = Literal["storage", "input", "exchange", "computing", "nothing clear"]
PARTS: tuple[Part, ...] = get_args(Part)
WORDS: dict[Part, str] = {
    "storage": "reading from storage",
    "input": "decoding, encoding, augmenting and handing over batches",
    "exchange": "waiting for the ranks' sums",
    "computing": "computing",
}
# MLPerf Storage asks that steps wait for less than a tenth of their time, be it for reading or for what follows it.
STORAGE_SHARE = 0.10
INPUT_SHARE = 0.10
# Below it an exchange that cost nothing would make the run at most a quarter faster, and it never costs nothing.
EXCHANGE_SHARE = 0.20
# From here on all else together, were it free, would make the run at most a third faster.
COMPUTING_SHARE = 0.75
# Rounds whose quartiles are further apart do not tell a share that is smaller than this distance.
UNSTEADY = 0.25
# Beside steps data shares cores and caches with them, and batches are copied once more than without them. What steps
# lose beyond so many times what the data takes alone is not its doing, but another program's.
TIMES_ALONE = 3.0
LEAST_REST = 0.01  # of a step that is left when its bound is gone: a hundred times as fast is as good as any number
_LIMITS: dict[Part, float] = {"storage": STORAGE_SHARE, "input": INPUT_SHARE, "exchange": EXCHANGE_SHARE}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a run on data that were not read before."""

    bound_by: Bound
    shares: dict[Part, float]
    """Of a step on cold data; they add up to 1."""
    gain_at_most: float
    """How many times as fast the run were without what bounds it; where that is computing, with twice the ranks; 1
    where nothing is clear.
    """
    steady: bool
    """Whether the rounds agree well enough."""


def judge(measured: Measured) -> Verdict:
    """The rules.

    1. Storage costs what cold steps take longer than cached ones, the input what cached ones take longer than
       synthetic ones: only where three rounds of four say so (the lower quartile of the differences is above 0), not
       more than TIMES_ALONE what they take without steps, and both together not more than cold steps take longer
       than synthetic ones.
    2. The exchange costs what a synthetic step stands still for it; computing is the rest.
    3. The largest share that reaches its threshold is the bound; else computing, if it reaches its own; else nothing.
    4. Where rounds are unsteady, a share that is not above their spread is no bound.
    """
    shares = _shares(measured)
    width = measured.cold.width
    steady = width <= UNSTEADY
    reached = {part: shares[part] for part, limit in _LIMITS.items() if shares[part] >= limit}
    if not reached and shares["computing"] >= COMPUTING_SHARE:
        reached = {"computing": shares["computing"]}
    bound: Bound = "nothing clear"
    gain = 1.0
    if reached:
        part = max(reached, key=lambda part: reached[part])
        if steady or reached[part] > width:
            bound, lost = part, reached[part] / 2 if part == "computing" else reached[part]
            gain = 1 / max(1 - lost, LEAST_REST)
    return Verdict(bound, shares, gain, steady)


def _cost(difference: Spread, at_most: float) -> float:
    return min(max(0.0, difference.median), at_most) if difference.low > 0 else 0.0


def _shares(measured: Measured) -> dict[Part, float]:
    whole = measured.cold.median
    rest = max(0.0, measured.by_data.median)
    storage = _cost(measured.fetching, min(rest, TIMES_ALONE * measured.cold_alone.median))
    given = _cost(measured.handing_over, min(rest - storage, TIMES_ALONE * measured.cached_alone.median))
    costs = [storage, given, max(0.0, measured.exchange_s)]
    # Medians of differences need not fit the median of the whole: they never make up more than all of it.
    scale = 1 / max(whole, sum(costs)) if whole > 0 else 0.0
    storage, given, exchange = (cost * scale for cost in costs)
    return {
        "storage": storage,
        "input": given,
        "exchange": exchange,
        "computing": max(0.0, 1.0 - storage - given - exchange),
    }


# Input that takes more of a rank's cores than this while steps compute makes both slower.
BUSY_CORES = 0.5
# Input alone that needs less of a step than this is fast enough: then the way to a batch is uneven, or cores are few.
FAST_ENOUGH = 0.8
SLOW_COPY_S = 0.15  # of a checkpoint: what a step should wait for it at most, whatever its size


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the run is, as far as advice depends on it."""

    num_ranks: int
    global_batch: int
    cores: int
    """Of a rank: its share of its host's, at least 1."""
    local: bool
    """Whether the dataset lies on the ranks' own disk."""
    cache: bool
    """Whether --cache is given."""
    read_ahead_bytes: int
    micro_batches: int
    precision: str
    algorithm: str
    batchnorm: str
    canonical: bool
    augment: str
    decodes: bool
    """Whether images are decoded when read."""
    wide: tuple[str, ...]
    """Features that are long vectors of floats, as one-hot columns are."""


def advice(verdict: Verdict, measured: Measured, setting: Setting) -> list[str]:
    """Sentences for a reader; at least one."""
    ways = {"storage": _storage, "input": _input, "exchange": _exchange, "computing": _computing}
    way = ways.get(verdict.bound_by, _nothing_clear)
    return list(way(measured, setting))


def _storage(measured: Measured, setting: Setting) -> Iterator[str]:
    fast = measured.cold_alone.median < FAST_ENOUGH * measured.cached.median
    if fast and not setting.local:
        yield (
            f"--read-ahead-bytes {4 * setting.read_ahead_bytes}: read alone, cold batches come faster than steps take "
            "them, so what comes unevenly can be fetched earlier."
        )
    if not setting.cache:
        yield (
            "--cache DIR on a fast disk of each host: from the second epoch on blocks come from there"
            + (" (with --cache-groups NODES each host keeps its own part)." if not setting.local else ".")
        )
    if not fast:
        yield (
            "The storage gives fewer bytes than the steps need, and no reading ahead makes more of them: store fewer "
            "bytes a sample (--compression gzip, --bake, smaller images when the dataset is made), or bring the data "
            "to a faster disk."
        )
    if not setting.local:
        yield "Run ranks on hosts that hold the blocks, on more hosts, or look at the DataNodes (jobs.doctor)."


def _input(measured: Measured, setting: Setting) -> Iterator[str]:
    cores = measured.input_cpu_s / measured.synthetic.median
    fast = measured.cached_alone.median < FAST_ENOUGH * measured.synthetic.median
    if cores > BUSY_CORES * setting.cores or fast:
        yield (
            f"More cores a rank (fewer ranks a host): a batch takes {measured.input_cpu_s * 1e3:.1f} ms of CPU, "
            f"{cores:.2f} cores while steps compute, of the {setting.cores} that a rank has; its threads for decoding "
            "and for arithmetic follow the cores by themselves."
        )
    if setting.decodes:
        yield "Store images decoded and in the model's size (jobs.etl_images --store pixels), or smaller."
    if setting.augment:
        yield f"Fewer or cheaper operations than --augment {setting.augment}."
    if setting.wide:
        yield (
            f"Fewer one-hot columns ({', '.join(setting.wide[:3])}): ids with an Embedding layer are a few bytes a "
            "sample; --bake does the rest of the encoding once, when the dataset is made."
        )
    elif not setting.decodes:
        yield "--bake when the dataset is made: encodings are then applied once, not in each epoch."
    yield "More ranks on other hosts: each decodes its own part alone."


def _exchange(measured: Measured, setting: Setting) -> Iterator[str]:
    if setting.batchnorm == "sync":
        yield "--batchnorm ghost: sync sends a message for each normalising layer."
    if setting.canonical:
        yield "Without --canonical, where the same bits at any number of ranks are not needed: it sends more."
    yield (
        f"A larger --global-batch than {setting.global_batch} (docs/models.md): the sums are as large for any "
        "batch; with --micro-batches it needs no more memory."
    )
    if setting.algorithm != "auto":
        yield f"--algorithm auto instead of {setting.algorithm}."
    yield (
        f"python -m jobs.bench_comm --num-ranks {setting.num_ranks}: whether the network gives what it should; "
        "fewer hosts with more ranks each send less."
    )


def _computing(measured: Measured, setting: Setting) -> Iterator[str]:
    yield "More ranks on other cores or hosts (--num-ranks): input and storage keep up."
    if setting.micro_batches > 1:
        yield f"Fewer --micro-batches than {setting.micro_batches}, as memory allows: larger parts compute faster."
    if setting.canonical:
        yield "Without --canonical, which computes unit by unit, where the same bits at any world size are not needed."
    if setting.precision == "float64":
        yield "--precision float32: half the bytes of float64."
    elif setting.precision == "float32":
        yield "--precision mixed_bfloat16 or mixed_float16 on hardware that is fast in them (on most CPUs it is not)."
    yield "A smaller model, or faster layers: nothing around it is in the way."


def _nothing_clear(measured: Measured, setting: Setting) -> Iterator[str]:
    yield "Measure with more --steps or --rounds, and with nothing else on the hosts."
    yield "If it stays so, the parts are balanced: only a change that helps all of them makes the run much faster."
