"""`lockstep train --dry-run`: what a run would do and need, from the same checks and the same model, without a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.storage.shown import counted
from lockstep.training.config import TrainConfig, Value
from lockstep.training.control.messages import ModelSize, SizeOrder
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.driver.memory_plan import Size, Transformer, smaller
from lockstep.training.driver.preflight import open_and_plan, preflight
from lockstep.training.driver.train import host_bytes, limits_of, room_for
from lockstep.training.launch.executors import ExecutorMemory
from lockstep.training.launch.local import run_local
from lockstep.training.launch.session import Launch, SessionLauncher
from lockstep.training.models import check_name
from lockstep.training.models.ready import settings_of
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.mixture import MixedPlan, Plan, steps_asked
from lockstep.training.rules import CheckpointEvery
from lockstep.training.run.lineage import find_tip
from lockstep.training.run.paths import RunPaths
from lockstep.training.ways import EveryStep

ENTRY = "lockstep.training.rank.model_size:main"
MIB = 1 << 20


def dry_run(config: TrainConfig, launch: Launch) -> str:
    """The lines that `lockstep train --dry-run` prints; writes nothing.

    Raises what `preflight` raises, ConfigError for a model that its ranks would refuse, and for slots or memory that a
    cluster does not have.
    """
    checked = preflight(config)
    config, plan = checked.config, checked.plan
    if checked.finished is not None:
        return f"run         {config.run} is complete: {checked.finished.steps} steps"
    if not isinstance(plan, EpochPlan | MixedPlan):
        raise ConfigError(
            "a federated run has no dry run",
            got="--strategy federated",
            allowed="runs by an epoch plan",
            next_step="Leave --dry-run out and use --max-steps 1.",
        )
    room = room_for(config, launch)
    data = config.way.grid(config.ranks.num_ranks).data
    shares = [plan.rows(rank, data, config.step.lane_groups) for rank in range(data)]
    model = model_size(config, plan, max(shares))
    lines = [
        ("run", _run(config)),
        *(("dataset", _dataset(url, config)) for url in config.data.datasets),
        ("plan", _plan(config, plan)),
        ("ranks", _ranks(config, launch, shares)),
        ("model", _size(config, model)),
        ("memory", _memory(config, model, room)),
        ("exchange", f"{_size_words(model.gradient_bytes)} of gradients a step and rank"),
        ("checkpoints", _checkpoints(config, plan, model.checkpoint_bytes)),
    ]
    return "\n".join(f"{name:<12}{text}" for name, text in lines)


def model_size(config: TrainConfig, plan: Plan, rows: int, *, timed: bool = False) -> ModelSize:
    """Build the model in another process, since this one must not load TensorFlow; `timed`: also measure its steps."""
    order = SizeOrder(config=config, plan=plan.identity(), rows=rows, timed=timed)
    (found,) = run_local(RankTask(ENTRY, order.to_json()), 1, limits=limits_of(config, Limits()))
    return ModelSize.from_json(found)


def _run(config: TrainConfig) -> str:
    fs, paths = filesystem(config.run), RunPaths(config.run)
    if not fs.exists(paths.run_json):
        return f"{config.run} would be new"
    tip = find_tip(fs, paths)
    return f"{config.run} would resume from {tip.ref if tip else 'the start'}"


def _dataset(url: str, config: TrainConfig) -> str:
    manifest = load_dataset(url)
    splits = [manifest.splits[name] for name in config.data.split.split(",") if name in manifest.splits]
    shards = [shard for split in splits for shard in split.shards]
    blocks = sum(len(shard.block_offsets) for shard in shards)
    size = sum(shard.bytes for shard in shards)
    return (
        f"{url}: {config.data.split} has {sum(shard.records for shard in shards):,} samples in {len(shards)} shards "
        f"and {blocks} blocks, {_size_words(size)}, digest {manifest.digest[:12]}"
    )


def _plan(config: TrainConfig, plan: Plan) -> str:
    steps = steps_asked(plan, config.data.epochs, config.validation.max_steps)
    each = plan.total / plan.global_batch
    window = f", each shuffled in windows of {plan.window_records:,}" if isinstance(plan, EpochPlan) else ""
    return (
        f"{steps:,} steps of {plan.global_batch} samples ({counted(config.data.epochs, 'epoch')} of {each:,.1f} steps)"
        f"; blocks in a new order each epoch, {plan.lanes} lanes{window}"
    )


def _ranks(config: TrainConfig, launch: Launch, shares: list[int]) -> str:
    rows = f"{min(shares)}" if min(shares) == max(shares) else f"{min(shares)} to {max(shares)}"
    where = (
        f"{launch.slots()} task slots now"
        if isinstance(launch, SessionLauncher) and launch != run_local
        else "processes of this host"
    )
    servers = f" and {config.num_servers} servers" if config.num_servers else ""
    spares = f", {config.ranks.spare_executors} spare executors" if config.ranks.spare_executors else ""
    ahead = _size_words(config.reading.read_ahead_bytes)
    return f"{config.ranks.num_ranks} of {rows} samples a step{servers}{spares}; {where}; {ahead} read ahead"


def _size(config: TrainConfig, model: ModelSize) -> str:
    return (
        f"{config.model.model}: {model.parameters:,} parameters, {_size_words(model.weights_bytes)}; "
        f"metrics {', '.join(model.metrics)}"
    )


def _memory(config: TrainConfig, model: ModelSize, room: ExecutorMemory | None) -> str:
    keeps = "what layers keep" if model.kept_bytes is None else f"{model.kept_bytes // MIB:,} MiB that layers keep"
    text = f"about {model.rank_bytes // MIB:,} MiB a rank, and {keeps} for the backward pass"
    number, needed = config.ranks.num_ranks, model.rank_bytes + (model.kept_bytes or 0)
    limit = None if room is None else room.rank_limit_mib() << 20
    if config.ranks.launcher == "local":
        limit = host_bytes(number)
    if limit is None or needed <= limit or not isinstance(config.way, EveryStep):
        return text
    better = smaller(size_of(model), number, needed, limit) or "more memory, or a smaller model"
    return f"{text}, of {limit // MIB:,} MiB: does not fit: {better}"


def size_of(model: ModelSize, transformer: Transformer | None = None) -> Size:
    """The size that a model was measured to have."""
    return Size(
        weights=model.weights_bytes,
        gradients=model.gradient_bytes,
        state=model.checkpoint_bytes - model.weights_bytes,
        kept=model.kept_bytes or 0.0,
        transformer=transformer,
        step_s=model.step_s,
    )


def measured_size(
    dataset: str,
    model: str,
    extra: Mapping[str, Value],
    rows: int,
    *,
    lora_rank: int = 0,
    step_s: float | None = None,
) -> Size:
    """The size of a model that is built for `rows` rows of `dataset`, and the seconds of its step, unless given.

    Raises what `dry_run` raises for a model and a dataset that do not fit together.
    """
    check_name(model, extra)
    config = TrainConfig(
        datasets=dataset, run="unused", model=model, num_ranks=1, global_batch=rows, epochs=rows, extra=extra,
        lora_rank=lora_rank, batchnorm="local",
    )  # fmt: skip
    _, encoder, plan = open_and_plan(config, None)
    shape = None
    if model == "transformer":
        chosen = settings_of(model, extra)
        lengths = [one.shape[0] for one in encoder.signature.features.values() if one.dtype == "int64"]
        shape = Transformer(
            layers=chosen["layers"], hidden=chosen["width"], heads=chosen["heads"], sequence=max(lengths), rows=rows
        )
    found = size_of(model_size(config, plan, rows, timed=step_s is None), shape)
    return found if step_s is None else replace(found, step_s=step_s)


def _checkpoints(config: TrainConfig, plan: Plan, size: int) -> str:
    every = CheckpointEvery.parse(config.checkpoints.checkpoint_every)
    steps = steps_asked(plan, config.data.epochs, config.validation.max_steps)
    number = f"every {every.steps} steps, {max(1, -(-steps // every.steps))} in all" if every.steps else "by time"
    return f"{_size_words(size)} each, {number}; the newest {config.checkpoints.keep.last} are kept"


def _size_words(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
