"""What bounds a run: the same compiled step on synthetic, cached and cold data, on the ranks that will train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.features.encode.encoder import Encoder
from lockstep.storage.errors import ConfigError
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.urls import absolute
from training.comm.options import UNAUTHENTICATED, CommOptions
from training.config import TrainConfig
from training.control.task import Limits, RankTask
from training.driver.preflight import open_dataset, plan_for
from training.driver.train import limits_of
from training.launch.session import ended_in_order
from training.profiling.verdict import (
    CACHED,
    COLD,
    PARTS,
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
from training.rank import runtime

if TYPE_CHECKING:
    from training.control.context import RankContext
    from training.launch.session import Launch

ENTRY = "training.profiling.profile:main"
ROUNDS = 5
NO_RUN = "/dev/null/no-run"
"""The run of a configuration that is only measured: nothing can be written there."""
WIDE_COLUMNS = 32  # floats of one feature from which one-hot columns are worth a word


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured and what follows."""

    setting: Setting
    measured: Measured
    verdict: Verdict
    advice: tuple[str, ...]
    """What to change, the first first."""
    steps: int
    """Measured in each round and of each kind, after `settling` ones that are not."""
    settling: int
    chunk_steps: int
    """So many batches are encoded in one call: the input of fewer steps than two of these is not seen as it is."""
    rounds: int
    """Without the first, which is dropped."""
    state_bytes: int
    """Of weights and optimizer."""
    copy_s: float
    """A step waits about so long for its part of a checkpoint to be copied (docs/guarantees.md)."""
    repeats: bool
    """Whether the split is smaller than what was read: cold data were then read before, if not by this host."""

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
    """Start the ranks of `config` and measure; `on_round(rounds done, all)` is called as they come. `config.run` and
    what only matters to a run are not looked at. `steps` of each kind and round; None: by how many batches are encoded
    at once, 16 to 512.

    Raises ConfigError where the call cannot be right, DataError for a dataset whose bytes are wrong, NonFiniteError for
    a model that diverges, CommunicationError for a lost rank.
    """
    for name, value, least in (("steps", steps, 2), ("rounds", rounds, 1)):
        if value is not None and value < least:
            raise ConfigError(
                f"a profile's `{name}` cannot be right",
                got=f"{name} = {value}",
                allowed=f"an integer from {least} up",
                next_step=f"Correct --{name}.",
            )
    config = replace(config, datasets=tuple(map(absolute, config.datasets)), run=NO_RUN)
    manifest, encoder = open_dataset(config)
    plan = plan_for(manifest, config)
    plan.steps(config.epochs)
    options = CommOptions(
        backend=config.backend, algorithm=config.algorithm, trust_network=config.trust_network, plans=()
    )
    payload = {
        "config": config.to_json(),
        "plan": plan.identity(),
        "comm": {"options": options.to_json(), "freeze": False},
        "steps": steps,
        "rounds": rounds,
    }

    def handle(rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        if kind == "round":
            on_round(int(fields["done"]), int(fields["total"]))
        return {}

    ready = getattr(launch, "ready", None)
    if ready is not None:
        ready(config.num_ranks, config.start_limit_s)
    task = RankTask(ENTRY, payload, hadoop=hadoop_settings(), tls=config.tls == "on")
    with ended_in_order():
        ranks = launch(task, config.num_ranks, limits=limits_of(config, Limits()), handler=handle)
    return _profile(config, encoder, ranks)


def main(context: RankContext) -> dict[str, Any]:
    """A rank's part: the payload is {config, plan, comm, steps, rounds}."""
    config = TrainConfig.from_json(context.payload["config"])
    runtime.configure(context.world, precision=config.precision, seed=config.seed, canonical=config.canonical)
    if config.backend in UNAUTHENTICATED:
        context.communicator()  # TensorFlow's server must be there before its first tensor
    from training.profiling.profile_rank import ProfileRank  # TensorFlow is imported now that its settings are made

    with ended_in_order(), ProfileRank(context, config) as rank:  # else SIGTERM would leave its folder behind
        return rank.run()


def _profile(config: TrainConfig, encoder: Encoder, ranks: list[dict[str, Any]]) -> Profile:
    measured = put_together(ranks)
    verdict = judge(measured)
    wide = [name for name, spec in encoder.signature.features.items() if _is_wide(spec.shape, spec.dtype)]
    setting = Setting(
        num_ranks=config.num_ranks,
        global_batch=config.global_batch,
        cores=min(int(rank["cores"]) // int(rank["ranks_of_host"]) or 1 for rank in ranks),
        local=all(rank["local"] for rank in ranks),
        cache=config.cache is not None,
        read_ahead_bytes=config.read_ahead_bytes,
        micro_batches=config.micro_batches,
        precision=config.precision,
        algorithm=config.algorithm,
        batchnorm=config.batchnorm,
        canonical=config.canonical,
        augment=config.augment,
        decodes=any((field.encoding or {}).get("kind") == "image" for field in encoder.schema.features),
        wide=tuple(wide),
    )
    first = ranks[0]
    return Profile(
        setting=setting,
        measured=measured,
        verdict=verdict,
        advice=tuple(advice(verdict, measured, setting)),
        steps=int(first["steps"]),
        settling=int(first["settling"]),
        chunk_steps=int(first["chunk_steps"]),
        rounds=len(first["rounds"]),
        state_bytes=int(first["state_bytes"]),
        copy_s=max(float(rank["copy_s"]) for rank in ranks),
        repeats=bool(first["repeats"]),
    )


def _is_wide(shape: tuple[int, ...], dtype: str) -> bool:
    return len(shape) == 1 and shape[0] >= WIDE_COLUMNS and np.dtype(dtype).kind == "f"


_WHAT = {
    SYNTHETIC: "one batch again and again",
    CACHED: "blocks from memory or cache",
    COLD: "blocks not read before",
}


def table(profile: Profile) -> str:
    """Steps by kind of data, the input alone, shares, the verdict and what to change."""
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
    lines.append(f"input alone, a batch of the slowest rank: {alone}; {measured.input_cpu_s * 1e3:.1f} ms of CPU")
    copy = f"a checkpoint ({profile.state_bytes / 1e6:.1f} MB of state) holds a step up for about"
    lines.append(f"{copy} {profile.copy_s * 1e3:.1f} ms{_too_slow(profile.copy_s)}")
    if profile.repeats:
        lines.append("note: the split is smaller than what was read, so the storage may have had cold data in memory")
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
    return f"{WORDS[verdict.bound_by]}; {without} at most {verdict.gain_at_most:.2f} times as fast"


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.2f} ({spread.low * 1e3:.2f} to {spread.high * 1e3:.2f})"


def _too_slow(copy_s: float) -> str:
    return ": --checkpoint-every auto chooses how often by that" if copy_s > SLOW_COPY_S else ""
