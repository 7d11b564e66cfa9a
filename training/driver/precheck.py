"""What a call of `train` is refused for, or answered with, before anything is started or written."""

from __future__ import annotations

from lockstep.features.encode.encoder import Encoder
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.urls import split_url
from training.batches.augmenting import augmentation_of
from training.config import TrainConfig
from training.models import check_name
from training.plan.datasets import held_out, open_mixture, open_parts, split_of
from training.plan.planning import plan_for
from training.reading.dataset_encoder import load_encoder
from training.run.chain import find_result
from training.run.paths import RunPaths
from training.run.result import RunResult
from training.run.run_json import check_run
from training.run.weights_source import weights_at


def check(config: TrainConfig) -> RunResult | None:
    """What `train` would refuse or return at once, as far as local paths tell it: before anything is started.

    Other file systems may need Spark's settings, so there `train` itself tells.
    """
    check_name(config.model, here=config.launcher == "local")
    if all(map(_is_local, config.datasets)):
        plan = plan_for(open_dataset(config)[0], config)
        plan.steps(config.epochs)
        if _is_local(config.run) and check_run(filesystem(config.run), RunPaths(config.run), config, plan):
            return finished_result(filesystem(config.run), RunPaths(config.run), config)
        if config.init_from is not None and _is_local(config.init_from) and _is_local(config.run):
            weights_at(config.init_from)
    return None


def open_dataset(config: TrainConfig) -> tuple[DatasetManifest, Encoder]:
    """Manifest and encoder of what is trained on; what its ranks would refuse in it is refused here: one fold of three,
    images to skip or to augment where there are none.
    """
    open_them = open_parts if config.mix is None else open_mixture
    parts, manifest = open_them(config.datasets, config.split)
    first = parts[0]
    split_of(manifest, config.split)
    encoder = load_encoder(first.url, first.manifest, held_out(first.manifest, config.split, training=True))
    if config.bad_images == "skip":
        encoder.skipping_bad_images()
    if config.augment:
        augmentation_of(config, plan_for(manifest, config), encoder.signature)
    return manifest, encoder


def finished_result(fs: FileSystem, paths: RunPaths, config: TrainConfig) -> RunResult | None:
    """The result that counts, where it is of as many epochs as are asked for."""
    done = find_result(fs, paths)
    if done is None or int(done["epochs"]) < config.epochs:
        return None
    return RunResult(**{name: done[name] for name in RunResult.__dataclass_fields__})


def _is_local(url: str) -> bool:
    return split_url(url)[0] == "file"
