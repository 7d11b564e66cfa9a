"""Mixup of a batch: which rows are mixed, by which shares, and the mixed images and labels.

Decision record: docs/decisions/074-batches.md.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from lockstep.features.images.decode_many import aligned_empty
from lockstep.features.images.random_numbers import Draws

SHARES = 256
_BITS = 24  # of the table's steps: few enough that rounding hides differences between math libraries
_TERMS = 64


def draw_partners(draws: Draws, rows: int) -> NDArray[np.int64]:
    """Draw the row that each row is mixed with, another one of the `rows` of its lane: (n,) int64."""
    at = np.arange(len(draws.states), dtype=np.int64)
    within = at % rows
    return at - within + (within + 1 + draws.below(rows - 1, 0)) % rows


def draw_shares(draws: Draws, alpha: float) -> NDArray[np.int64]:
    """Draw the share that a row keeps of itself from Beta(alpha, alpha), in 1/256: (n,) int64 from 0 to 256."""
    drawn = draws.bits(1) >> np.uint64(64 - _BITS)
    return np.searchsorted(_steps(alpha), drawn.astype(np.int64), side="right").astype(np.int64)


def mix_images(images: NDArray[np.uint8], partners: NDArray[np.int64], shares: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Mix images of rows with those of their partners, by shares in 1/256, rounded half up: (n, H, W, C) uint8."""
    from lockstep.features.images.kernels import mix

    out = aligned_empty(images.shape)
    flat = len(images), images[:1].size
    mix(images.reshape(flat), partners, shares, out.reshape(flat))
    return out


def mix_labels(
    labels: NDArray[np.float32],
    weights: NDArray[np.float32] | None,
    partners: NDArray[np.int64],
    shares: NDArray[np.int64],
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Mix labels (n,) or one-hot (n, classes) float32, and weights (n,) float32, of rows and their partners.

    Labels of 0 and 1 are mixed exactly. For weights w1 and w2 and an own share l the mixed weight is
    W = l w1 + (1 - l) w2 and the label (l w1 y1 + (1 - l) w2 y2) / W, so that mixing keeps the weight of each class.
    """
    own = (shares / np.float32(SHARES)).astype(np.float32)
    if weights is None:
        return _mixed(labels, partners, own), None
    weight = _mixed(weights, partners, own)
    own_of_label = np.divide(own * weights, weight, out=own.copy(), where=weight > 0)
    return _mixed(labels, partners, own_of_label), weight


def one_hot(labels: NDArray[np.int64], classes: int) -> NDArray[np.float32]:
    """Turn (n,) int64 in 0..classes-1 into (n, classes) float32."""
    out = np.zeros((len(labels), classes), dtype=np.float32)
    out[np.arange(len(labels)), labels] = 1.0
    return out


def _mixed(values: NDArray[np.float32], partners: NDArray[np.int64], own: NDArray[np.float32]) -> NDArray[np.float32]:
    own = own.reshape(-1, *[1] * (values.ndim - 1))  # (n,) -> (n, 1) next to one-hot labels
    return own * values + (np.float32(1) - own) * values[partners]


@cache
def _steps(alpha: float) -> NDArray[np.int64]:
    """Return (256,) int64: a draw of 24 bits that is at least steps[k] has a share of more than k / 256.

    steps[k] is the probability of a share below (k + 1/2) / 256. Below 1/2 the incomplete beta function is the series
    x^a * sum of (1-a)(2-a)...(k-a) / k! * x^k / (a+k) (DLMF 8.17.7); above it the distribution is mirrored.
    """
    places = (np.arange(SHARES // 2) + 0.5) / SHARES
    coefficient, series, half = 1.0, np.zeros_like(places), 0.0
    for k in range(_TERMS):
        series += coefficient / (alpha + k) * places**k
        half += coefficient / (alpha + k) * 0.5**k
        coefficient *= (k + 1 - alpha) / (k + 1)
    chance = 0.5 * places**alpha * series / (0.5**alpha * half)
    low = np.round(chance * (1 << _BITS)).astype(np.int64)
    return np.concatenate([low, (1 << _BITS) - low[::-1]])
