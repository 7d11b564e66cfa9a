"""What a driver checks before it starts ranks: the dataset, the plan and the run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from lockstep.features.encode.encoder import Encoder
from lockstep.process.own_code import imported_here
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import ConfigError, require
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import absolute, split_url
from lockstep.training.batches.augmenting import augmentation_of, check_mixup
from lockstep.training.batches.clients import check_client_field
from lockstep.training.config import TrainConfig
from lockstep.training.launch.local import slots_in
from lockstep.training.models import check_name, check_tasks, scales_learning_rate
from lockstep.training.models.ready import ready_model
from lockstep.training.plan.client_plan import ClientPlan, RunPlan
from lockstep.training.plan.datasets import (
    MixedManifest,
    held_out,
    open_data,
    open_mixture,
    open_parts,
    split_of,
    tasks_of,
)
from lockstep.training.plan.lane_count import check_canonical, check_lanes, largest_divisor
from lockstep.training.plan.make_plan import make_plan
from lockstep.training.plan.mixture import Plan, steps_asked
from lockstep.training.plan.privacy import check_accountant
from lockstep.training.plan.selection import Selection
from lockstep.training.reading.open import load_encoder
from lockstep.training.reading.selecting import selection_of
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult, find_result
from lockstep.training.run.run_json import check_run
from lockstep.training.run.weights_source import check_fisher, check_weights
from lockstep.training.ways import Federated


def plan_for(manifest: DatasetManifest, config: TrainConfig) -> Plan:
    """The plan of `config` over the dataset. Raises ConfigError if lanes, groups and ranks do not fit together."""
    _check_learning_rate(config)
    groups = config.step.lane_groups
    plan = make_plan(
        manifest,
        config.data.split,
        config.data.mix,
        seed=config.data.seed,
        global_batch=config.data.global_batch,
        lanes=config.data.lanes,
        groups=groups,
        window_bytes=config.data.window_bytes,
        cache_groups=config.data.cache_groups,
        interleave=config.data.interleave,
    )
    check_ranks(plan, config)
    units = groups or plan.lanes
    free = not config.ranks.balance or 1 < config.ranks.num_ranks < units
    got = f"--num-ranks {config.ranks.num_ranks} for {units} {'lane groups' if groups else 'lanes'}"
    step = "Leave it out, or use more --lanes, with --batchnorm sync in place of lane groups."
    require(free, "--balance, which has nothing to move,", got, "two ranks or more, and fewer than these", step)
    check_mixup(config.reading.augment, plan.global_batch // plan.lanes)
    return plan


def check_ranks(plan: Plan, config: TrainConfig) -> None:
    """Raise ConfigError if `config.ranks.num_ranks` ranks cannot divide the plan's lanes among them."""
    groups = config.step.lane_groups
    check_lanes(plan.global_batch, plan.lanes, groups, config.way.grid(config.ranks.num_ranks).data)
    _check_micro_batches(plan, config, groups)
    check_canonical(config, plan.lanes, groups)


def numbers_of_ranks(config: TrainConfig, plan: Plan) -> dict[int, str | None]:
    """Each number from --min-ranks to --max-ranks: None if the run can train on so many ranks, else why it cannot.

    Raises ConfigError if it can train on no other number than --num-ranks.
    """
    found: dict[int, str | None] = {}
    for number in config.ranks.possible:
        try:
            check_ranks(plan, config.but(num_ranks=number))
            found[number] = None
        except ConfigError as error:
            found[number] = error.got
    usable = [number for number, why in found.items() if why is None]
    if config.ranks.elastic and len(usable) < 2:
        first = next((f"{number} ranks: {why}" for number, why in found.items() if why is not None), "none other")
        least, most = config.ranks.possible[0], config.ranks.possible[-1]
        raise ConfigError(
            f"between {least} and {most} ranks, this run can only train on {usable}",
            got=f"--min-ranks {least} --max-ranks {most}; {first}",
            allowed="two numbers of ranks or more at which lanes, micro-batches and --canonical fit",
            next_step="Widen --min-ranks to --max-ranks, or leave both out.",
        )
    return found


def _check_learning_rate(config: TrainConfig) -> None:
    if not scales_learning_rate(config.model.model):
        return
    scaled = config.step.learning_rate_scaling != "none" and config.step.learning_rate is None
    if scaled or config.step.warm_up_epochs:
        raise ConfigError(
            f"the model {config.model.model} has its own learning-rate scaling and warm-up",
            got="--warm-up-epochs" if config.step.warm_up_epochs else "--learning-rate-scaling without --learning-rate",
            allowed="none of these flags, or --learning-rate with --learning-rate-scaling",
            next_step="Leave these flags out, or give --learning-rate.",
        )


def _check_micro_batches(plan: Plan, config: TrainConfig, groups: int | None) -> None:
    """Raise ConfigError unless a rank's rows form equal micro-batches: a mean of unequal means would be wrong."""
    data = config.way.grid(config.ranks.num_ranks).data
    rows = [plan.rows(rank, data, groups) for rank in range(data)]
    if any(count % config.step.micro_batches for count in rows):
        common = math.gcd(*rows)
        raise ConfigError(
            f"a rank's rows do not divide into {config.step.micro_batches} equal micro-batches",
            got=f"--micro-batches {config.step.micro_batches}, ranks of {min(rows)} to {max(rows)} rows",
            allowed=f"divisors of {common}",
            next_step=f"Use --micro-batches {largest_divisor(common, config.step.micro_batches)} or another "
            "--global-batch.",
        )


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run that may be started, and what was opened and planned to check it."""

    config: TrainConfig
    """The configuration with absolute URLs."""
    manifest: DatasetManifest
    selection: Selection | None
    """The samples that meet --where."""
    plan: RunPlan
    finished: RunResult | None
    """The result of a run that has ended already."""
    numbers: dict[int, str | None]
    """Each number of ranks that the run may have, and why it cannot have it, as `numbers_of_ranks` returns them."""


def preflight(config: TrainConfig) -> CheckedRun:
    """Check a run before anything is started or written.

    Raises ConfigError for a configuration that does not fit the dataset, the model or the run; DataError for a dataset
    or run whose bytes are wrong.
    """
    config = config.but(
        datasets=tuple(map(absolute, config.data.datasets)),
        run=absolute(config.run),
        init_from=None if config.model.init_from is None else absolute(config.model.init_from),
    )
    selection = selection_of(config)
    plan: RunPlan
    numbers: dict[int, str | None] = {config.ranks.num_ranks: None}
    if isinstance(config.way, Federated):
        manifest, encoder = open_dataset(config)
        check_client_field(encoder.schema, str(config.way.clients))
        check_accountant(config)
        _check_learning_rate(config)
        plan = ClientPlan.for_dataset(manifest, config)
    else:
        manifest, _, plan = open_and_plan(config, selection)
        numbers = numbers_of_ranks(config, plan)
    plan.steps(config.data.epochs)
    if config.validation.validate is not None:
        check_validation(config, config.validation.validate)
    fs, paths = filesystem(config.run), RunPaths(config.run)
    finished = finished_result(fs, paths, config, plan) if check_run(fs, paths, config, plan) else None
    if config.model.init_from is not None and not fs.exists(paths.run_json):
        check_weights(config.model.init_from)
        if config.model.ewc:
            check_fisher(config.model.init_from)
    if config.model.lora_rank and config.model.init_from is None and ready_model(config.model.model) is not None:
        raise ConfigError(
            "--lora-rank trains next to weights that a model has learned before",
            got=f"--lora-rank {config.model.lora_rank} without --init-from, and the ready model {config.model.model}",
            allowed="--init-from with a run, a checkpoint, an exported model or a Keras file",
            next_step="Give --init-from, or leave out --lora-rank.",
        )
    if config.ranks.slots_file is not None:
        slots_in(config.ranks.slots_file)
    return CheckedRun(config, manifest, selection, plan, finished, numbers)


def preflight_before_spark(config: TrainConfig) -> CheckedRun | None:
    """Do what `preflight` does where all URLs are local; else return None, since other file systems may need Spark's
    settings.

    The model's name and settings are checked in both cases.
    """
    check_name(config.model.model, config.model.extra, here=imported_here(config.ranks.launcher))
    return preflight(config) if all_local(config) else None


def all_local(config: TrainConfig) -> bool:
    """Whether all URLs of a run are on the local disk, so that it can be checked without Spark's settings."""
    urls = (*config.data.datasets, config.run, config.model.init_from or config.run)
    return all(split_url(url)[0] == "file" for url in urls)


class PlannedData(NamedTuple):
    """The training data, opened and planned."""

    manifest: DatasetManifest
    encoder: Encoder
    plan: Plan


def open_and_plan(config: TrainConfig, selection: Selection | None) -> PlannedData:
    """Call `open_dataset` and `plan_for`, which the augmentation is checked against too."""
    manifest, encoder = open_dataset(config, selection)
    plan = plan_for(manifest, config)
    if config.reading.augment:
        augmentation_of(config, plan, encoder.signature)
    return PlannedData(manifest, encoder, plan)


def open_dataset(config: TrainConfig, selection: Selection | None = None) -> tuple[DatasetManifest, Encoder]:
    """Manifest and encoder of the training data.

    Raises ConfigError for what its ranks would refuse: one fold of three, or images to skip where there are none.
    """
    tasks = config.data.tasks is not None
    if tasks:
        check_tasks(config.model.model)
    parts, manifest = open_data(config.data.datasets, config.data.split, config.data.mix, selection, tasks=tasks)
    task = tasks_of(manifest.mixed)[0] if isinstance(manifest, MixedManifest) and tasks else None
    first = parts[0]
    split_of(manifest, config.data.split)
    own = replace(first.manifest, schema=manifest.schema)  # whose splits do not have the name of several
    encoder = load_encoder(first.url, own, held_out(own, config.data.split, training=True))
    if task is not None:
        encoder = encoder.of_task(task)
    if config.reading.bad_images == "skip":
        encoder.skipping_bad_images()
    if config.exactness.on_bad_record == "skip":
        encoder.skipping_bad_records(())
    return manifest, encoder


def check_validation(config: TrainConfig, split: str, flag: str = "--validate") -> None:
    """Raise ConfigError unless the run's datasets have rows in `split`, the value of `flag`, and fit together there."""
    for url in config.data.datasets:
        splits = load_dataset(url).splits
        if split not in splits or not splits[split].records:
            raise ConfigError(
                f"{url} has nothing to {'validate' if flag == '--validate' else 'evaluate'} on",
                got=f"{flag} {split}, {'a split without records' if split in splits else 'no such split'}",
                allowed=", ".join(sorted(set(splits) - set(config.data.split.split(","))))
                or "a dataset with another split",
                next_step=f"Correct {flag}, or build the dataset with that split.",
            )
    if config.data.tasks is None:
        open_parts(config.data.datasets, split)
    else:
        open_mixture(config.data.datasets, split, tasks=True)


def finished_result(fs: FileSystem, paths: RunPaths, config: TrainConfig, plan: RunPlan) -> RunResult | None:
    """The result that counts, if it was asked for as many epochs and steps as the configuration asks for."""
    done = find_result(fs, paths)
    if (
        done is None
        or int(done["epochs_asked"]) < config.data.epochs
        or done["keep_best"] != config.checkpoints.keep_best
    ):
        return None  # with another --keep-best, the model has other weights
    stopped_by = done["stopped_by"] or ""
    if stopped_by.startswith("--early-stop ") and not stopped_by.startswith(
        f"--early-stop {config.validation.early_stop}:"
    ):
        return None
    if steps_asked(plan, int(done["epochs_asked"]), done["max_steps"]) < steps_asked(
        plan, config.data.epochs, config.validation.max_steps
    ):
        return None
    return RunResult(**{name: done[name] for name in RunResult.__dataclass_fields__})
