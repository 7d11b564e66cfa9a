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
from lockstep.training.config import TrainConfig, lane_groups
from lockstep.training.launch.local import slots_in
from lockstep.training.models import check_name, scales_learning_rate
from lockstep.training.plan.client_plan import ClientPlan, RunPlan
from lockstep.training.plan.datasets import held_out, open_mixture, open_parts, split_of
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
from lockstep.training.run.weights_source import check_weights


def plan_for(manifest: DatasetManifest, config: TrainConfig) -> Plan:
    """The plan of `config` over the dataset. Raises ConfigError if lanes, groups and ranks do not fit together."""
    _check_learning_rate(config)
    groups = lane_groups(config)
    plan = make_plan(
        manifest,
        config.split,
        config.mix,
        seed=config.seed,
        global_batch=config.global_batch,
        lanes=config.lanes,
        groups=groups,
        window_bytes=config.window_bytes,
        cache_groups=config.cache_groups,
        interleave=config.interleave,
    )
    check_ranks(plan, config)
    units = groups or plan.lanes
    free = not config.balance or 1 < config.num_ranks < units
    got = f"--num-ranks {config.num_ranks} for {units} {'lane groups' if groups else 'lanes'}"
    step = "Leave it out, or use more --lanes, with --batchnorm sync in place of lane groups."
    require(free, "--balance, which has nothing to move,", got, "two ranks or more, and fewer than these", step)
    check_mixup(config.augment, plan.global_batch // plan.lanes)
    return plan


def check_ranks(plan: Plan, config: TrainConfig) -> None:
    """Raise ConfigError if `config.num_ranks` ranks cannot divide the plan's lanes among them."""
    groups = lane_groups(config)
    check_lanes(plan.global_batch, plan.lanes, groups, config.num_ranks)
    _check_micro_batches(plan, config, groups)
    check_canonical(config, plan.lanes, groups)


def numbers_of_ranks(config: TrainConfig, plan: Plan) -> dict[int, str | None]:
    """Each number from --min-ranks to --max-ranks: None if the run can train on so many ranks, else why it cannot.

    Raises ConfigError if it can train on no other number than --num-ranks.
    """
    found: dict[int, str | None] = {}
    for number in config.ranks:
        try:
            check_ranks(plan, replace(config, num_ranks=number))
            found[number] = None
        except ConfigError as error:
            found[number] = error.got
    usable = [number for number, why in found.items() if why is None]
    if config.elastic and len(usable) < 2:
        first = next((f"{number} ranks: {why}" for number, why in found.items() if why is not None), "none other")
        raise ConfigError(
            f"between {config.ranks[0]} and {config.ranks[-1]} ranks, this run can only train on {usable}",
            got=f"--min-ranks {config.ranks[0]} --max-ranks {config.ranks[-1]}; {first}",
            allowed="two numbers of ranks or more at which lanes, micro-batches and --canonical fit",
            next_step="Widen --min-ranks to --max-ranks, or leave both out.",
        )
    return found


def _check_learning_rate(config: TrainConfig) -> None:
    if not scales_learning_rate(config.model):
        return
    scaled = config.learning_rate_scaling != "none" and config.learning_rate is None
    if scaled or config.warm_up_epochs:
        raise ConfigError(
            f"the model {config.model} has its own learning-rate scaling and warm-up",
            got="--warm-up-epochs" if config.warm_up_epochs else "--learning-rate-scaling without --learning-rate",
            allowed="none of these flags, or --learning-rate with --learning-rate-scaling",
            next_step="Leave these flags out, or give --learning-rate.",
        )


def _check_micro_batches(plan: Plan, config: TrainConfig, groups: int | None) -> None:
    """Raise ConfigError unless a rank's rows form equal micro-batches: a mean of unequal means would be wrong."""
    rows = [plan.rows(rank, config.num_ranks, groups) for rank in range(config.num_ranks)]
    if any(count % config.micro_batches for count in rows):
        common = math.gcd(*rows)
        raise ConfigError(
            f"a rank's rows do not divide into {config.micro_batches} equal micro-batches",
            got=f"--micro-batches {config.micro_batches}, ranks of {min(rows)} to {max(rows)} rows",
            allowed=f"divisors of {common}",
            next_step=f"Use --micro-batches {largest_divisor(common, config.micro_batches)} or another --global-batch.",
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
    config = replace(
        config,
        datasets=tuple(map(absolute, config.datasets)),
        run=absolute(config.run),
        init_from=None if config.init_from is None else absolute(config.init_from),
    )
    selection = selection_of(config)
    plan: RunPlan
    numbers: dict[int, str | None] = {config.num_ranks: None}
    if config.is_federated:
        manifest, encoder = open_dataset(config)
        check_client_field(encoder.schema, str(config.clients))
        check_accountant(config)
        _check_learning_rate(config)
        plan = ClientPlan.for_dataset(manifest, config)
    else:
        manifest, _, plan = open_and_plan(config, selection)
        numbers = numbers_of_ranks(config, plan)
    plan.steps(config.epochs)
    if config.validate is not None:
        check_validation(config, config.validate)
    fs, paths = filesystem(config.run), RunPaths(config.run)
    finished = finished_result(fs, paths, config, plan) if check_run(fs, paths, config, plan) else None
    if config.init_from is not None and not fs.exists(paths.run_json):
        check_weights(config.init_from)
    if config.slots_file is not None:
        slots_in(config.slots_file)
    return CheckedRun(config, manifest, selection, plan, finished, numbers)


def preflight_before_spark(config: TrainConfig) -> CheckedRun | None:
    """Do what `preflight` does where all URLs are local; else return None, since other file systems may need Spark's
    settings.

    The model's name and settings are checked in both cases.
    """
    check_name(config.model, config.extra, here=imported_here(config.launcher))
    return preflight(config) if all_local(config) else None


def all_local(config: TrainConfig) -> bool:
    """Whether all URLs of a run are on the local disk, so that it can be checked without Spark's settings."""
    urls = (*config.datasets, config.run, config.init_from or config.run)
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
    if config.augment:
        augmentation_of(config, plan, encoder.signature)
    return PlannedData(manifest, encoder, plan)


def open_dataset(config: TrainConfig, selection: Selection | None = None) -> tuple[DatasetManifest, Encoder]:
    """Manifest and encoder of the training data.

    Raises ConfigError for what its ranks would refuse: one fold of three, or images to skip where there are none.
    """
    open_them = open_parts if config.mix is None else open_mixture
    parts, manifest = open_them(config.datasets, config.split, selection)
    first = parts[0]
    split_of(manifest, config.split)
    encoder = load_encoder(first.url, first.manifest, held_out(first.manifest, config.split, training=True))
    if config.bad_images == "skip":
        encoder.skipping_bad_images()
    if config.on_bad_record == "skip":
        encoder.skipping_bad_records(())
    return manifest, encoder


def check_validation(config: TrainConfig, split: str, flag: str = "--validate") -> None:
    """Raise ConfigError unless the run's datasets have rows in `split`, the value of `flag`, and fit together there."""
    for url in config.datasets:
        splits = load_dataset(url).splits
        if split not in splits or not splits[split].records:
            raise ConfigError(
                f"{url} has nothing to {'validate' if flag == '--validate' else 'evaluate'} on",
                got=f"{flag} {split}, {'a split without records' if split in splits else 'no such split'}",
                allowed=", ".join(sorted(set(splits) - set(config.split.split(",")))) or "a dataset with another split",
                next_step=f"Correct {flag}, or build the dataset with that split.",
            )
    open_parts(config.datasets, split)


def finished_result(fs: FileSystem, paths: RunPaths, config: TrainConfig, plan: RunPlan) -> RunResult | None:
    """The result that counts, if it was asked for as many epochs and steps as the configuration asks for."""
    done = find_result(fs, paths)
    if done is None or int(done["epochs_asked"]) < config.epochs or done["keep_best"] != config.keep_best:
        return None  # with another --keep-best, the model has other weights
    stopped_by = done["stopped_by"] or ""
    if stopped_by.startswith("--early-stop ") and not stopped_by.startswith(f"--early-stop {config.early_stop}:"):
        return None
    if steps_asked(plan, int(done["epochs_asked"]), done["max_steps"]) < steps_asked(
        plan, config.epochs, config.max_steps
    ):
        return None
    return RunResult(**{name: done[name] for name in RunResult.__dataclass_fields__})
