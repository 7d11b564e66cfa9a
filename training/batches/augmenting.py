"""Applies --augment to the batches of a rank: changes images and, under mixup, labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.features.images.augment import Mixup, parse
from lockstep.features.images.mixing import SHARES, draw_partners, draw_shares, mix_images, mix_labels, one_hot
from lockstep.features.images.random_numbers import Draws
from lockstep.features.schema.signature import Signature, TensorSpec
from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.batches.feed import Batch
from lockstep.training.config import TrainConfig
from lockstep.training.plan.mixture import Plan


class Augmentation:
    """Augments a Batch: a pure function of the batch, `seed` and the operations.

    It changes the one feature that is an image, (n, H, W, C) uint8 with C up to 4; shape and dtype stay. Mixup mixes a
    row with another of its lane's `lane_rows` rows (G / L). Class labels become (n, classes) float32, yes-or-no labels
    and numbers (n,) float32. Labels and weights are mixed in the same proportion as images; a row is not mixed if its
    weight or its partner's is 0. `signature` is what the model is fed.
    Raises ConfigError for operations that do not fit the dataset's signature or the plan's lanes.
    """

    def __init__(self, words: Sequence[str], seed: int, signature: Signature, lane_rows: int) -> None:
        operations = parse(words)
        self._operations, self._mixup = operations.single, operations.mixup
        self._seed, self._lane_rows = seed, lane_rows
        check_mixup(" ".join(words), lane_rows)
        self._name = _image_of(signature)
        spec = signature.features[self._name]
        height, width, channels = spec.shape
        for operation in self._operations:
            operation.check((height, width, channels))
        self._classes = signature.num_classes
        self.signature = signature if self._mixup is None else _mixed(signature)

    def __call__(self, batch: Batch) -> Batch:
        """The augmented batch; the arrays of `batch` are not changed."""
        draws = Draws.of(self._seed, batch.epochs, batch.sample_ids)
        images = np.ascontiguousarray(batch.x[self._name])
        for slot, operation in enumerate(self._operations):
            images = operation.apply(images, draws.at(slot))
        if self._mixup is None:
            return replace(batch, x={**batch.x, self._name: images})
        return self._mix(batch, images, draws.at(len(self._operations)), self._mixup)

    def _mix(self, batch: Batch, images: npt.NDArray[np.uint8], draws: Draws, mixup: Mixup) -> Batch:
        if len(images) % self._lane_rows:
            raise DataError(
                "images cannot be mixed: the rank's rows are not whole lanes",
                got=f"{len(images)} rows",
                allowed=f"a multiple of {self._lane_rows}",
                next_step="Pass the batches of the plan unchanged.",
            )
        partners, shares = draw_partners(draws, self._lane_rows), draw_shares(draws, mixup.alpha)
        weight = batch.weight
        if weight is not None:
            shares[(weight == 0) | (weight[partners] == 0)] = SHARES
        assert batch.y is not None, "mixup without a label is refused"
        soft = one_hot(batch.y, self._classes) if self._classes is not None else batch.y.astype(np.float32)
        y, weight = mix_labels(soft, weight, partners, shares)
        return replace(batch, x={**batch.x, self._name: mix_images(images, partners, shares)}, y=y, weight=weight)


def augmentation_of(config: TrainConfig, plan: Plan, signature: Signature) -> Augmentation | None:
    """The augmentation of a run's batches; None without --augment. Raises as Augmentation does."""
    if not config.reading.augment:
        return None
    return Augmentation(config.reading.augment.split(), config.data.seed, signature, plan.global_batch // plan.lanes)


def labels_of(config: TrainConfig, signature: Signature) -> Signature:
    """A dataset's signature with the labels that the loss of a run of `config` takes: soft ones under mixup."""
    return soft_signature(signature) if parse(config.reading.augment.split()).mixup is not None else signature


def check_mixup(augment: str, lane_rows: int) -> None:
    """Raise ConfigError if --augment has mixup and a lane gives less than two rows to a global batch."""
    if parse(augment.split()).mixup is not None and lane_rows < 2:
        raise ConfigError(
            "--augment mixup has no rows to mix",
            got=f"lanes of {lane_rows} row of each global batch",
            allowed="2 rows or more of each lane: samples are mixed within a lane, whatever the number of ranks",
            next_step="Use fewer --lanes (half the global batch or less), or leave mixup out.",
        )


def soft_signature(signature: Signature) -> Signature:
    """The signature with class labels of (classes,) float32 a row, as mixup makes them."""
    if signature.num_classes is None or signature.label is None:
        return signature
    label = TensorSpec(shape=(signature.num_classes,), dtype="float32")
    return replace(signature, label=label)


def soft_labels(labels: npt.NDArray[Any] | None, signature: Signature) -> npt.NDArray[Any] | None:
    """Labels of the dataset, (n,), in the form of `signature`'s label: one-hot if it has classes."""
    if labels is None or signature.label is None or not signature.label.shape:
        return labels
    assert signature.num_classes is not None
    return one_hot(labels.astype(np.int64), signature.num_classes)


def _image_of(signature: Signature) -> str:
    images = [name for name, spec in signature.features.items() if spec.dtype == "uint8" and len(spec.shape) == 3]
    if len(images) != 1 or signature.features[images[0]].shape[2] > 4:
        found = ", ".join(f"{name} {spec.dtype} {spec.shape}" for name, spec in signature.features.items())
        raise ConfigError(
            "--augment found no image in this dataset",
            got=found or "no feature",
            allowed="one feature (height, width, channels) of uint8 with 1 to 4 channels, not normalised by its schema",
            next_step="Leave --augment out, or build the dataset with lockstep etl_images.",
        )
    return images[0]


def _mixed(signature: Signature) -> Signature:
    """The signature under mixup; ConfigError for a dataset that mixup cannot be applied to."""
    if len(signature.features) > 1 or signature.label is None:
        raise ConfigError(
            "--augment mixup does not fit this dataset",
            got=f"features {', '.join(signature.features)}, label {signature.label and signature.label.dtype}",
            allowed="one image and a label, which are mixed alike",
            next_step="Leave mixup out.",
        )
    number = signature.num_classes is None and signature.label.dtype != "float32"
    if number or math.prod(signature.label.shape) != 1:
        raise ConfigError(
            "--augment mixup cannot mix these labels",
            got=f"{signature.label.dtype}, shape {signature.label.shape}, without a number of classes",
            allowed="classes (--num-classes), yes or no, or a float32",
            next_step="Build the dataset with the number of classes, or leave mixup out.",
        )
    return soft_signature(signature)
