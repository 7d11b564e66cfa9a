"""Combines what the ranks measured, judges what bounds the run, and gives advice. Decision 086."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

SYNTHETIC, CACHED, COLD = "synthetic", "cached", "cold"
KINDS = (SYNTHETIC, CACHED, COLD)
ROUNDS = 5  # if a caller asks for no other number
CACHED_ALONE, COLD_ALONE = "cached_alone", "cold_alone"
WORDS: dict[Part, str] = {
    "storage": "reading from storage",
    "input": "decoding, encoding, augmenting and handing over batches",
    "exchange": "waiting for the ranks' sums",
    "computing": "computing",
}
# MLPerf Storage requires that steps wait for input for less than a tenth of their time.
STORAGE_SHARE = 0.10
INPUT_SHARE = 0.10
# Below this share, even an exchange without cost would make the run at most a quarter faster.
EXCHANGE_SHARE = 0.20
# Above this share, making all other parts free would make the run at most a third faster.
COMPUTING_SHARE = 0.75
# If the quartiles of the rounds are further apart, a smaller share cannot be measured.
UNSTEADY = 0.25
# During steps the input shares cores and caches with them, and batches are copied once more. If steps lose more than
# this many times the input's own time, another program is the cause.
TIMES_ALONE = 3.0
LEAST_REST = 0.01  # the least rest of a step without its bound: reports at most a hundred times as fast
_LIMITS: dict[Part, float] = {
    "storage": STORAGE_SHARE,
    "input": INPUT_SHARE,
    "exchange": EXCHANGE_SHARE,
    "computing": COMPUTING_SHARE,
}
# Input that takes more of a rank's cores than this while steps compute slows down both.
BUSY_CORES = 0.5
# Input that needs less of a step than this is fast enough by itself: then batches come unevenly, or cores are few.
FAST_ENOUGH = 0.8
SLOW_COPY_S = 0.15  # the longest that a step should wait for the copy of a checkpoint of any size
INPUT_IS_FAST = "More ranks on other cores or hosts (--num-ranks): input and storage are fast enough."


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one or more values; quartiles as of `statistics.quantiles` with method `inclusive`."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def width(self) -> float:
        """The distance of the quartiles as a share of the median; 0 if the median is 0."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds; a step is as slow as its slowest rank, and differences are taken within each round."""

    synthetic: Spread
    """A step on one batch that is repeated."""
    cached: Spread
    """A step on batches whose blocks come from memory or the node's cache."""
    cold: Spread
    """A step on batches whose blocks had not been read before."""
    handing_over: Spread
    """`cached` less `synthetic`: decoding, encoding, augmenting and handing over, if steps wait for it."""
    fetching: Spread
    """`cold` less `cached`: reading, if steps wait for it."""
    by_data: Spread
    """`cold` less `synthetic`: the cost of fetching and handing over together."""
    exchange_s: float
    """How long a step on one batch waits for the sums, on the rank that waits least: the others also wait for that
    rank, which is not the cost of the exchange."""
    cached_alone: Spread
    """A batch of the slowest rank without a step, from memory or cache."""
    cold_alone: Spread
    """A batch of the slowest rank without a step, from storage."""
    input_cpu_s: float
    """CPU time of a batch of `cached_alone`, of all threads."""
    waiting: dict[str, float]
    """The share of a step for which the rank that waits most waited for its batch, by kind
    (lockstep.training.rank.metrics).
    """


def put_together(ranks: Sequence[Sequence[Mapping[str, Mapping[str, float]]]]) -> Measured:
    """Combine the rounds of all ranks, as RankProfile has them: the same number on each rank."""
    rounds = list(zip(*ranks, strict=True))  # of each round, all ranks

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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a run on data that had not been read before."""

    bound_by: Bound
    shares: dict[Part, float]
    """Shares of a step on cold data; they add up to 1."""
    gain_at_most: float
    """How many times as fast the run would be without its bound; if the bound is computing, with twice the ranks; 1 if
    nothing is clear.
    """
    steady: bool
    """Whether the rounds agree well enough."""
    costs: dict[Part, float] = field(default_factory=dict)
    """What else reaches its threshold: how many times as fast the run would be without it, at most."""


def judge(measured: Measured) -> Verdict:
    """The rules.

    1. The cost of storage is the time of cold steps less that of cached ones, the cost of the input that of cached
       steps less that of synthetic ones. Each counts only if three of four rounds show it (the lower quartile of the
       differences is above 0), is at most TIMES_ALONE times its time without steps, and both together are at most the
       time of cold steps less that of synthetic ones.
    2. The cost of the exchange is the time a synthetic step waits for it; computing is the rest.
    3. The bound is the largest share that reaches its threshold; the others that do are its `costs`.
    4. If the rounds are unsteady, a share below their spread does not count, nor does the rest, computing.
    """
    shares = _shares(measured)
    width = measured.cold.width
    steady = width <= UNSTEADY
    clear = {part: steady or (part != "computing" and shares[part] > width) for part in PARTS}
    reached = [part for part, limit in _LIMITS.items() if shares[part] >= limit and clear[part]]
    if not reached:
        return Verdict("nothing clear", shares, 1.0, steady)
    gains = {part: _gain(shares[part] / 2 if part == "computing" else shares[part]) for part in reached}
    bound = max(reached, key=lambda part: shares[part])
    costs = {part: gain for part, gain in gains.items() if part not in (bound, "computing")}
    return Verdict(bound, shares, gains[bound], steady, costs)


def _gain(lost: float) -> float:
    return 1 / max(1 - lost, LEAST_REST)


def _cost(difference: Spread, at_most: float) -> float:
    return min(max(0.0, difference.median), at_most) if difference.low > 0 else 0.0


def _shares(measured: Measured) -> dict[Part, float]:
    whole = measured.cold.median
    rest = max(0.0, measured.by_data.median)
    storage = _cost(measured.fetching, min(rest, TIMES_ALONE * measured.cold_alone.median))
    given = _cost(measured.handing_over, min(rest - storage, TIMES_ALONE * measured.cached_alone.median))
    costs = [storage, given, max(0.0, measured.exchange_s)]
    # Medians of differences need not add up to the median of the whole: scale them so that they do not exceed it.
    scale = 1 / max(whole, sum(costs)) if whole > 0 else 0.0
    storage, given, exchange = (cost * scale for cost in costs)
    return {
        "storage": storage,
        "input": given,
        "exchange": exchange,
        "computing": max(0.0, 1.0 - storage - given - exchange),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The properties of a run that advice depends on."""

    num_ranks: int
    global_batch: int
    cores: int
    """A rank's share of its host's cores, at least 1."""
    local: bool
    """Whether the dataset is on the ranks' own disks."""
    cache: bool
    """Whether --cache is set."""
    read_ahead_bytes: int
    micro_batches: int
    precision: str
    batchnorm: str
    canonical: bool
    augment: str
    decodes: bool
    """Whether images are decoded when read."""
    wide: tuple[str, ...]
    """Features that are long vectors of floats, as one-hot columns are."""


def advice(verdict: Verdict, measured: Measured, setting: Setting) -> list[str]:
    """Sentences for a reader, on the bound first and then on what else costs; at least one."""
    ways = {"storage": _storage, "input": _input, "exchange": _exchange, "computing": _computing}
    named = [ways.get(verdict.bound_by, _nothing_clear), *(ways[part] for part in verdict.costs)]
    found = [line for way in named for line in way(measured, setting)]
    if verdict.costs:
        found = [line for line in found if line != INPUT_IS_FAST]
    return list(dict.fromkeys(found))


def _storage(measured: Measured, setting: Setting) -> Iterator[str]:
    fast = measured.cold_alone.median < FAST_ENOUGH * measured.cached.median
    if fast and not setting.local:
        yield (
            f"--read-ahead-bytes {4 * setting.read_ahead_bytes}: without steps, cold batches are read faster than "
            "steps use them, so reading further ahead evens out slow reads."
        )
    if not setting.cache:
        yield (
            "--cache DIR on a fast disk of each host: from the second epoch on, blocks are read from there"
            + (" (with --cache-groups NODES each host keeps its own part)." if not setting.local else ".")
        )
    if not fast:
        yield (
            "The storage delivers fewer bytes than the steps need, and reading ahead does not help: store fewer bytes "
            "a sample (--compression gzip, --bake, smaller images when the dataset is made), or move the data to a "
            "faster disk."
        )
    if not setting.local:
        yield "Run ranks on hosts that hold the blocks, on more hosts, or look at the DataNodes (lockstep doctor)."


def _input(measured: Measured, setting: Setting) -> Iterator[str]:
    cores = measured.input_cpu_s / measured.synthetic.median
    fast = measured.cached_alone.median < FAST_ENOUGH * measured.synthetic.median
    if cores > BUSY_CORES * setting.cores or fast:
        yield (
            f"More cores a rank (fewer ranks a host): a batch takes {measured.input_cpu_s * 1e3:.1f} ms of CPU, "
            f"{cores:.2f} cores while steps compute, of the {setting.cores} that a rank has; its threads for decoding "
            "and arithmetic adapt to the cores."
        )
    if setting.decodes:
        yield "Store images decoded and as large as the model takes (lockstep etl_images --store pixels), or smaller."
    if setting.augment:
        yield f"Fewer or cheaper operations than --augment {setting.augment}."
    if setting.wide:
        yield (
            f"Fewer one-hot columns ({', '.join(setting.wide[:3])}): ids with an Embedding layer take a few bytes a "
            "sample; --bake does the other encodings once, when the dataset is made."
        )
    elif not setting.decodes:
        yield "--bake when the dataset is made: encodings are then applied once, not in each epoch."
    yield "More ranks on other hosts: each decodes only its own part."


def _exchange(measured: Measured, setting: Setting) -> Iterator[str]:
    if setting.batchnorm == "sync":
        yield "--batchnorm ghost: sync sends a message for each normalising layer."
    if setting.canonical:
        yield "No --canonical, unless you need the same bits at any number of ranks: it sends more."
    yield (
        f"A larger --global-batch than {setting.global_batch} (docs/models.md): the size of the sums does not "
        "depend on the batch; with --micro-batches it needs no more memory."
    )
    yield (
        f"lockstep bench_comm --num-ranks {setting.num_ranks}: checks the speed of the network; fewer hosts with "
        "more ranks each send less."
    )


def _computing(measured: Measured, setting: Setting) -> Iterator[str]:
    yield INPUT_IS_FAST
    if setting.micro_batches > 1:
        yield f"Fewer --micro-batches than {setting.micro_batches}, as memory allows: larger parts compute faster."
    if setting.canonical:
        yield "No --canonical, unless you need the same bits at any number of ranks: it computes unit by unit."
    if setting.precision == "float64":
        yield "--precision float32: half the bytes of float64."
    elif setting.precision == "float32":
        yield "--precision mixed_bfloat16 or mixed_float16 on hardware that is fast in them (most CPUs are not)."
    yield "A smaller model, or faster layers: nothing else slows the run down."


def _nothing_clear(measured: Measured, setting: Setting) -> Iterator[str]:
    yield "Measure with more --steps or --rounds, and with no other programs on the hosts."
    yield "If the result stays, the parts are balanced: only a change to all of them makes the run much faster."
