"""What to change, by what bounds a run: flags by name, the first one first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from training.profiling.profile_verdict import Verdict
from training.profiling.verdict import Measured

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
        f"A larger --global-batch than {setting.global_batch} (docs/learning-rate.md): the sums are as large for any "
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
