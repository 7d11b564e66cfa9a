"""Finds what bounds a run: measures one compiled step on synthetic, cached and cold data, on the ranks that train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.features.encode.encoder import Encoder
from lockstep.process.signals import ended_in_order
from lockstep.storage.errors import require
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.urls import absolute
from lockstep.training.comm.options import UNAUTHENTICATED, CommOptions
from lockstep.training.config import TrainConfig
from lockstep.training.control.protocol import Message
from lockstep.training.control.server import Handler
from lockstep.training.control.task import CommOrder, Limits, RankTask
from lockstep.training.driver.preflight import open_and_plan
from lockstep.training.driver.train import limits_of
from lockstep.training.launch.session import SessionLauncher
from lockstep.training.profiling.verdict import (
    CACHED,
    COLD,
    PARTS,
    ROUNDS,
    SLOW_COPY_S,
    SYNTHETIC,
    WORDS,
    Measured,
    Setting,
    Spread,
    Verdict,
    advice,
    judge,
    put_together,
)
from lockstep.training.rank import runtime
from lockstep.training.reading.selecting import selection_of
from lockstep.training.ways import Federated, OfTensorflow

if TYPE_CHECKING:
    from lockstep.training.control.context import RankContext
    from lockstep.training.launch.session import Launch

ENTRY = "lockstep.training.profiling.profile:main"
NO_RUN = "/dev/null/no-run"
"""The run of a configuration that is only measured; nothing can be written there."""
WIDE_COLUMNS = 32  # from this many floats in one feature, advise against one-hot columns
_WHAT = {
    SYNTHETIC: "one batch, repeated",
    CACHED: "blocks from memory or cache",
    COLD: "blocks not read before",
}


@dataclass(frozen=True, kw_only=True)
class ProfileOrder(Message):
    """What ranks are asked to measure."""

    config: TrainConfig
    plan: Mapping[str, Any]
    """The plan's identity."""
    comm: CommOrder
    steps: int | None
    """The steps to measure of each kind in a round; None: the ranks choose."""
    rounds: int


@dataclass(frozen=True, kw_only=True)
class RoundDone(Message):
    """Rank 0's notice of a finished round."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class RankProfile(Message):
    """What a rank has measured; all but `rounds`, `cores`, `ranks_of_host`, `local`, `copy_s` and `fetched_bytes` is
    the same on all.
    """

    rounds: list[dict[str, dict[str, float]]]
    """What each kind of data took in each round but the first: {seconds, steps, cpu_s, ...}."""
    steps: int
    settling: int
    chunk_steps: int
    local: bool
    """Whether all shards are on the rank's disk."""
    repeats: bool
    cores: int
    """The host's cores that the process may use."""
    ranks_of_host: int
    state_bytes: int
    copy_s: float
    fetched_bytes: int
    """Bytes that were fetched for cold data, over all rounds."""
    pass_bytes: int
    """Bytes that one pass over the split fetches."""
    split_bytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """The measurements, the verdict and the advice."""

    setting: Setting
    measured: Measured
    verdict: Verdict
    advice: tuple[str, ...]
    """What to change, most important first."""
    steps: int
    """Steps measured in each round for each kind of data, after `settling` steps that are not."""
    settling: int
    chunk_steps: int
    """Batches encoded in one call; with less than twice as many steps the input looks too cheap."""
    rounds: int
    """How many rounds were measured, without the first, which is dropped."""
    state_bytes: int
    """Bytes of weights and optimizer state."""
    copy_s: float
    """About how long a checkpoint stops a step, while the rank's part is copied."""
    repeats: bool
    """Whether the split is smaller than what was read, so that cold data had been read before."""
    fetched_bytes: tuple[int, ...]
    """Bytes that each rank fetched for cold data, over all rounds and the first."""
    pass_bytes: int
    """Bytes that one pass over the split fetches: in Parquet those of the columns that are fed."""
    split_bytes: int
    """Bytes of the split's shards."""

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return asdict(self)


def profile(
    config: TrainConfig,
    launch: Launch,
    *,
    steps: int | None = None,
    rounds: int = ROUNDS,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Start the ranks of `config` and measure; calls `on_round(rounds done, all rounds)`. Ignores `config.run` and
    other fields that do not change a step. `steps` is for each kind and round; None chooses 16 to 512 by the number of
    batches that are encoded in one call.

    Raises ConfigError for invalid arguments, DataError for a damaged dataset, NonFiniteError for a model that diverges,
    CommunicationError for a lost rank.
    """
    for name, value, least in (("steps", steps, 2), ("rounds", rounds, 1)):
        right, allowed = value is None or value >= least, f"an integer from {least} up"
        require(right, f"a profile's `{name}`", f"{name} = {value}", allowed, f"Correct --{name}.")
    of_lanes = "sync or async: a profile measures steps of a global batch that ranks of ours add"
    right = not isinstance(config.way, Federated | OfTensorflow)
    require(right, "a profile's `strategy`", config.step.strategy, of_lanes, "Correct --strategy.")
    config = config.but(datasets=tuple(map(absolute, config.data.datasets)), run=NO_RUN)
    _, encoder, plan = open_and_plan(config, selection_of(config))
    plan.steps(config.data.epochs)
    options = CommOptions(backend=config.ranks.backend, trust_network=config.ranks.trust_network)
    order = ProfileOrder(
        config=config, plan=plan.identity(), comm=CommOrder(options=options), steps=steps, rounds=rounds
    )

    def handle(rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        if kind == "round":
            done = RoundDone.from_json(fields)
            on_round(done.done, done.total)
        return {}

    if isinstance(launch, SessionLauncher):
        launch.ready(config.ranks.num_ranks, config.limits.start_limit_s)
    task = RankTask(ENTRY, order.to_json(), hadoop=hadoop_settings(), tls=config.ranks.tls == "on")
    with ended_in_order():
        ranks = launch(task, config.ranks.num_ranks, limits=limits_of(config, Limits()), handler=Handler(handle))
    return _profile(config, encoder, list(map(RankProfile.from_json, ranks)))


def main(context: RankContext) -> dict[str, Any]:
    """A rank's part of a ProfileOrder; returns a RankProfile as JSON."""
    order = ProfileOrder.from_json(context.payload)
    config = order.config
    runtime.configure(
        context.world, precision=config.step.precision, seed=config.data.seed, canonical=config.exactness.canonical
    )
    if config.ranks.backend in UNAUTHENTICATED:
        context.communicator()  # TensorFlow's server must start before the first tensor
    from lockstep.training.profiling.profile_rank import (
        ProfileRank,
    )  # here, since it imports TensorFlow, which is set up now

    with ended_in_order(), ProfileRank(context, order) as rank:  # removes its folder on SIGTERM too
        return rank.run()


def _profile(config: TrainConfig, encoder: Encoder, ranks: Sequence[RankProfile]) -> Profile:
    measured = put_together([rank.rounds for rank in ranks])
    verdict = judge(measured)
    wide = [name for name, spec in encoder.signature.features.items() if _is_wide(spec.shape, spec.dtype)]
    setting = Setting(
        num_ranks=config.ranks.num_ranks,
        global_batch=config.data.global_batch,
        cores=min(rank.cores // rank.ranks_of_host or 1 for rank in ranks),
        local=all(rank.local for rank in ranks),
        cache=config.reading.cache is not None,
        read_ahead_bytes=config.reading.read_ahead_bytes,
        micro_batches=config.step.micro_batches,
        precision=config.step.precision,
        batchnorm=config.step.batchnorm,
        canonical=config.exactness.canonical,
        augment=config.reading.augment,
        decodes=any((field.encoding or {}).get("kind") == "image" for field in encoder.schema.features),
        wide=tuple(wide),
    )
    first = ranks[0]
    return Profile(
        setting=setting,
        measured=measured,
        verdict=verdict,
        advice=tuple(advice(verdict, measured, setting)),
        steps=first.steps,
        settling=first.settling,
        chunk_steps=first.chunk_steps,
        rounds=len(first.rounds),
        state_bytes=first.state_bytes,
        copy_s=max(rank.copy_s for rank in ranks),
        repeats=first.repeats,
        fetched_bytes=tuple(rank.fetched_bytes for rank in ranks),
        pass_bytes=first.pass_bytes,
        split_bytes=first.split_bytes,
    )


def _is_wide(shape: tuple[int, ...], dtype: str) -> bool:
    return len(shape) == 1 and shape[0] >= WIDE_COLUMNS and np.dtype(dtype).kind == "f"


def table(profile: Profile) -> str:
    """Steps by kind of data, the input without steps, shares, the verdict and what to change."""
    measured, setting, verdict = profile.measured, profile.setting, profile.verdict
    ranks = f"{setting.num_ranks} rank{'s' if setting.num_ranks > 1 else ''}"
    head = f"{profile.steps} steps of {setting.global_batch} samples on {ranks}, each kind in"
    lines = [
        f"{head} {profile.rounds} rounds, in turns; medians, quartiles in brackets",
        f"{'data':<11}{'':<29}{'ms a step':<31}{'samples/s':>11}{'waits for data':>17}",
    ]
    kinds = {SYNTHETIC: measured.synthetic, CACHED: measured.cached, COLD: measured.cold}
    for kind, spread in kinds.items():
        rate = f"{setting.global_batch / spread.median:>11.0f}"
        lines.append(f"{kind:<11}{_WHAT[kind]:<29}{_milliseconds(spread):<31}{rate}{measured.waiting[kind]:>17.1%}")
    alone = f"{_milliseconds(measured.cached_alone)} ms cached, {_milliseconds(measured.cold_alone)} ms cold"
    lines.append(f"input only, a batch of the slowest rank: {alone}; {measured.input_cpu_s * 1e3:.1f} ms of CPU")
    fetched = ", ".join(f"{size / 1e6:.1f} MB by rank {rank}" for rank, size in enumerate(profile.fetched_bytes))
    share = f"{profile.pass_bytes / profile.split_bytes:.1%} of the {profile.split_bytes / 1e6:.1f} MB of the split"
    lines.append(f"fetched for cold data: {fetched}; an epoch reads {share}")
    copy = f"a checkpoint ({profile.state_bytes / 1e6:.1f} MB of state) stops a step for about"
    lines.append(f"{copy} {profile.copy_s * 1e3:.1f} ms{_too_slow(profile.copy_s)}")
    if profile.repeats:
        lines.append("note: the split is smaller than what was read, so the storage may have cached the cold data")
    if profile.steps < 2 * profile.chunk_steps:
        chunk = f"{profile.chunk_steps} batches are encoded at a time"
        lines.append(f"note: {chunk}; with fewer than {2 * profile.chunk_steps} --steps the input may look too cheap")
    lines.append("a step on cold data:")
    lines += [f"  {verdict.shares[part]:>6.1%}  {WORDS[part]}" for part in PARTS]
    lines.append(f"bound by: {_bound(profile)}")
    if not verdict.steady:
        lines.append(f"note: the rounds are unsteady: quartiles {measured.cold.width:.0%} of the median apart")
    lines += [f"  - {one}" for one in profile.advice]
    return "\n".join(lines)


def _bound(profile: Profile) -> str:
    verdict = profile.verdict
    if verdict.bound_by == "nothing clear":
        return "nothing clear"
    without = "with twice the ranks" if verdict.bound_by == "computing" else "without that"
    text = f"{WORDS[verdict.bound_by]}; {without} at most {verdict.gain_at_most:.2f} times as fast"
    for part, gain in verdict.costs.items():
        text += f"; {part} costs {verdict.shares[part]:.0%}, without it at most {gain:.2f} times as fast"
    return text


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.2f} ({spread.low * 1e3:.2f} to {spread.high * 1e3:.2f})"


def _too_slow(copy_s: float) -> str:
    return ": --checkpoint-every auto chooses how often by that" if copy_s > SLOW_COPY_S else ""
