"""Augmentation against slow loops over single pixels, and that it depends on nothing but seed, epoch and sample id."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.features.images import augment
from lockstep.features.images.augment import (
    ONE,
    Colour,
    Crop,
    Cutout,
    Flip,
    Operation,
    Rotate,
    Rotate90,
    Scale,
    canonical,
    forms,
    parse,
)
from lockstep.features.images.mixing import _steps, draw_partners, draw_shares, mix_images, mix_labels, one_hot
from lockstep.features.images.random_numbers import Draws
from lockstep.storage.errors import ConfigError

Pixels = np.ndarray[Any, Any]
WORDS = (
    "crop:3",
    "crop:2:edge",
    "crop:3:reflect",
    "flip",
    "flip:vertical",
    "flip:both",
    "rotate90",
    "rotate:30",
    "scale:0.7:1.4",
    "colour:0.4",
    "colour:0.3:0.5",
    "colour:0.3:0.5:0.9",
    "cutout:3",
    "cutout:4:128",
)


def single(word: str) -> Operation:
    return parse([word]).single[0]


def some(n: int, height: int, width: int, channels: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, channels), dtype=np.uint8)


def draws(n: int, seed: int = 1, epoch: int = 2) -> Draws:
    ids = np.random.default_rng(7).integers(-(2**63), 2**63, n)
    return Draws.of(seed, np.full(n, epoch), ids)


# The same again, slowly: one pixel at a time, in Python's whole numbers.


def slow_place(at: int, size: int, padding: str) -> int | None:
    if padding == "zero":
        return at if 0 <= at < size else None
    if padding == "edge":
        return min(max(at, 0), size - 1)
    return abs(at) if at < size else 2 * (size - 1) - at


def slow_crop(op: Crop, image: Pixels, of: Callable[[int, int, int], int]) -> Pixels:
    top, left = of(-op.pixels, op.pixels, 0), of(-op.pixels, op.pixels, 1)
    out = np.zeros_like(image)
    for y, x in np.ndindex(image.shape[:2]):
        row, column = (
            slow_place(at, size, op.padding) for at, size in zip((y + top, x + left), image.shape, strict=False)
        )
        if row is not None and column is not None:
            out[y, x] = image[row, column]
    return out


def slow_flip(op: Flip, image: Pixels, of: Callable[[int, int, int], int]) -> Pixels:
    if op.axis != "vertical" and of(0, 1, 0):
        image = image[:, ::-1]
    return image[::-1] if op.axis != "horizontal" and of(0, 1, 1) else image


def slow_rotate90(op: Rotate90, image: Pixels, of: Callable[[int, int, int], int]) -> Pixels:
    return np.rot90(image, -of(0, 3, 0))


def slow_affine(image: Pixels, matrix: tuple[tuple[int, int], tuple[int, int]]) -> Pixels:
    height, width, _ = image.shape
    out = np.zeros_like(image)
    for y, x, c in np.ndindex(image.shape):
        u, v = 2 * x - (width - 1), 2 * y - (height - 1)
        place = [
            (of_u * u + of_v * v + (size - 1) * ONE + 256) // 512
            for (of_u, of_v), size in zip(matrix, (width, height), strict=True)
        ]
        total = 0
        for dy in (0, 1):
            for dx in (0, 1):
                row, column = place[1] // 256 + dy, place[0] // 256 + dx
                share = (place[1] % 256 if dy else 256 - place[1] % 256) * (
                    place[0] % 256 if dx else 256 - place[0] % 256
                )
                if 0 <= row < height and 0 <= column < width:
                    total += share * int(image[row, column, c])
        out[y, x, c] = (total + 32768) // 65536
    return out


def slow_rotate(op: Rotate, image: Pixels, of: Callable[[int, int, int], int]) -> Pixels:
    most = round(op.degrees * 64)
    angle = math.radians(of(-most, most, 0) / 64)
    cos, sin = round(math.cos(angle) * ONE), round(math.sin(angle) * ONE)
    return slow_affine(image, ((cos, sin), (-sin, cos)))


def slow_scale(op: Scale, image: Pixels, of: Callable[[int, int, int], int]) -> Pixels:
    factor = of(round(op.low * ONE), round(op.high * ONE), 0)
    back = (2 * 2**32 + factor) // (2 * factor)
    return slow_affine(image, ((back, 0), (0, back)))


def slow_colour(op: Colour, image: Pixels, of: Callable[[int, int, int], int]) -> Pixels:
    def cut(value: int) -> int:
        return min(max(value, 0), 255)

    def luma(pixel: list[int]) -> int:
        return pixel[0] if len(pixel) == 1 else (19595 * pixel[0] + 38470 * pixel[1] + 7471 * pixel[2] + 32768) // ONE

    widths = [round(value * ONE) for value in (op.brightness, op.contrast, op.saturation)]
    bright, contrast, saturation = (of(ONE - width, ONE + width, i) for i, width in enumerate(widths))
    rows = [[[cut((int(v) * bright + 32768) // ONE) for v in pixel] for pixel in row] for row in image]
    lumas = [luma(pixel) for row in rows for pixel in row]
    mean = (2 * sum(lumas) + len(lumas)) // (2 * len(lumas))
    rows = [[[cut(mean + ((v - mean) * contrast + 32768) // ONE) for v in pixel] for pixel in row] for row in rows]
    if op.saturation:
        rows = [[[cut(luma(p) + ((v - luma(p)) * saturation + 32768) // ONE) for v in p] for p in row] for row in rows]
    return np.array(rows, dtype=np.uint8)


def slow_cutout(op: Cutout, image: Pixels, of: Callable[[int, int, int], int]) -> Pixels:
    height, width, _ = image.shape
    top, left = of(0, height - 1, 0) - op.side // 2, of(0, width - 1, 1) - op.side // 2
    out = image.copy()
    for y, x in np.ndindex(height, width):
        if 0 <= y - top < op.side and 0 <= x - left < op.side:
            out[y, x] = op.fill
    return out


SLOW: dict[type, Callable[..., Pixels]] = {
    Crop: slow_crop,
    Flip: slow_flip,
    Rotate90: slow_rotate90,
    Rotate: slow_rotate,
    Scale: slow_scale,
    Colour: slow_colour,
    Cutout: slow_cutout,
}


@settings(max_examples=40, deadline=None)  # the first call compiles
@given(
    word=st.sampled_from(WORDS),
    height=st.integers(4, 9),
    width=st.integers(4, 9),
    seed=st.integers(0, 2**32),
    slot=st.integers(0, 3),
)
def test_each_operation_is_what_a_loop_over_pixels_gives(
    word: str, height: int, width: int, seed: int, slot: int
) -> None:
    operation, images = single(word), some(3, height, width if word != "rotate90" else height, 3, seed)
    drawn = draws(3, seed).at(slot)
    found = operation.apply(images, drawn)
    assert found.dtype == np.uint8 and found.flags.c_contiguous and found is not images
    for row, image in enumerate(images):

        def of(low: int, high: int, number: int, row: int = row) -> int:
            return low + ((int(drawn.bits(number)[row]) >> 32) * (high - low + 1) >> 32)

        assert np.array_equal(found[row], SLOW[type(operation)](operation, image, of)), (word, row)


@pytest.mark.parametrize("word", WORDS)
def test_neither_the_batch_nor_its_order_matters(word: str) -> None:
    operation, images, drawn = single(word), some(40, 8, 8, 3), draws(40).at(2)
    whole = operation.apply(images, drawn)
    order = np.random.default_rng(3).permutation(40)
    apart = [operation.apply(images[row : row + 1].copy(), Draws(drawn.states[row : row + 1], 2))[0] for row in order]
    assert np.array_equal(whole[order], apart)
    assert np.array_equal(operation.apply(images[order], Draws(drawn.states[order], 2)), whole[order])


@pytest.mark.parametrize("word", WORDS)
def test_seed_epoch_and_sample_each_change_what_is_drawn(word: str) -> None:
    operation, images = single(word), np.repeat(some(1, 12, 12, 3), 64, axis=0)
    ids, epochs = np.arange(64), np.zeros(64, dtype=np.int64)
    first = operation.apply(images, Draws.of(1, epochs, ids))
    assert len(np.unique(first.reshape(64, -1), axis=0)) > 1  # samples differ
    for other in (Draws.of(2, epochs, ids), Draws.of(1, epochs + 1, ids), Draws.of(1, epochs, ids).at(1)):
        assert not np.array_equal(first, operation.apply(images, other))


@pytest.mark.parametrize(
    "word", ["crop:0", "crop:0:reflect", "rotate:0", "scale:1:1", "colour:0", "colour:0:0:0", "cutout:0"]
)
@pytest.mark.parametrize("shape", [(7, 5), (8, 8), (1, 1)])
def test_settings_that_do_nothing_leave_each_byte(word: str, shape: tuple[int, int]) -> None:
    images = some(5, *shape, 3)
    assert np.array_equal(single(word).apply(images, draws(5)), images)


def test_a_quarter_by_angle_is_a_quarter_by_turning() -> None:
    images = some(2, 9, 9, 2)
    zero, one = np.zeros(2, dtype=np.int64), np.full(2, ONE)
    assert np.array_equal(augment._affine(images, zero, one, -one, zero), np.rot90(images, -1, axes=(1, 2)))


def test_the_table_of_angles_is_the_same_with_any_library() -> None:
    """No entry lies so near a tie that the last place of a cosine could move it."""
    angles = np.radians(np.arange(360 * 64) / 64)
    for exact in (np.cos(angles) * ONE, np.sin(angles) * ONE):
        assert np.abs(np.abs(exact - np.floor(exact)) - 0.5).min() > 1e-7


def test_draws_are_even_and_independent_of_each_other() -> None:
    drawn = Draws.of(0, np.zeros(50_000, dtype=np.int64), np.arange(50_000))  # neighbouring ids, as bad as it gets
    columns = [drawn.at(slot).below(16, number) for slot in (0, 1) for number in (0, 1)]
    for column in columns:
        counts = np.bincount(column, minlength=16)
        assert ((counts - 3125) ** 2 / 3125).sum() < 45  # chi-square, 15 degrees: 1 in 10,000
    assert np.abs(np.corrcoef(columns) - np.eye(4)).max() < 0.02
    later = Draws.of(0, np.ones(50_000, dtype=np.int64), np.arange(50_000)).below(16, 0)
    assert abs(np.corrcoef(columns[0], later)[0, 1]) < 0.02


def test_draws_never_change() -> None:
    """A run that is resumed by a later version must see the same images."""
    drawn = Draws.of(5, np.array([0, 1]), np.array([-3, 2**40])).at(2)
    assert drawn.bits(0).tolist() == [10916753382206936631, 92737093640830170]


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 2.5, 8.0])
def test_mixups_shares_have_the_beta_distribution(alpha: float) -> None:
    shares = draw_shares(Draws.of(0, np.zeros(100_000, dtype=np.int64), np.arange(100_000)), alpha)
    assert shares.min() >= 0 and shares.max() <= 256
    exact = np.random.default_rng(0).beta(alpha, alpha, 100_000)
    for quantile in (0.1, 0.25, 0.5, 0.75, 0.9):
        share_below = (shares / 256 <= np.quantile(exact, quantile) + 0.5 / 256).mean()
        assert (
            abs(share_below - (np.round(exact * 256) / 256 <= np.quantile(exact, quantile) + 0.5 / 256).mean()) < 0.01
        )
    steps = _steps(alpha)
    assert (np.diff(steps) >= 0).all() and len(steps) == 256


@settings(max_examples=30, deadline=None)  # the first call compiles
@given(rows=st.integers(2, 7), lanes=st.integers(1, 5))
def test_a_partner_is_another_row_of_the_same_lane(rows: int, lanes: int) -> None:
    partners = draw_partners(draws(rows * lanes), rows)
    own = np.arange(rows * lanes)
    assert (partners != own).all() and np.array_equal(partners // rows, own // rows)


def test_each_partner_is_as_likely() -> None:
    partners = draw_partners(draws(40_000), 5) % 5
    distance = (partners - np.arange(40_000)) % 5
    assert np.bincount(distance, minlength=5)[0] == 0
    assert np.abs(np.bincount(distance)[1:] / 40_000 - 0.25).max() < 0.01


def test_images_and_labels_are_mixed_by_the_same_shares() -> None:
    images, labels = some(4, 3, 3, 1), np.array([0, 1, 2, 1])
    partners, shares = np.array([1, 0, 3, 2]), np.array([256, 0, 64, 128])
    mixed = mix_images(images, partners, shares)
    assert np.array_equal(mixed[0], images[0]) and np.array_equal(mixed[1], images[0])
    wide = images.astype(int)
    exact = (64 * wide[2] + 192 * wide[3] + 128) // 256
    assert np.array_equal(mixed[2], exact)
    soft, no_weights = mix_labels(one_hot(labels, 3), None, partners, shares)
    assert soft.dtype == np.float32 and no_weights is None
    assert soft.tolist() == [[1, 0, 0], [1, 0, 0], [0, 0.75, 0.25], [0, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["crop"], "crop:pixels[:padding]"),
        (["crop:four"], "pixels as an integer"),
        (["crop:-1"], "from 0"),
        (["crop:4:wrap"], "zero or edge or reflect"),
        (["crop:4:edge:1"], "crop:pixels[:padding]"),
        (["flip:left"], "horizontal"),
        (["rotate:nan"], "from 0 to 180"),
        (["scale:1.2:0.8"], "in order"),
        (["scale:1"], "scale:low:high"),
        (["colour:2"], "from 0 to 1"),
        (["cutout:8:256"], "0 to 255"),
        (["mixup:0"], "alpha"),
        (["mixup:0.2", "flip"], "last operation"),
        (["blur:2"], "rotate90"),
        ([""], "crop:pixels"),
    ],
)
def test_words_that_cannot_be_right_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match="--augment") as refused:
        parse(words)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("word", "shape", "told"),
    [
        ("rotate90", (8, 9, 1), "square"),
        ("crop:8:reflect", (8, 9, 1), "at most 7"),
        ("colour:0.1:0:0.1", (8, 8, 1), "no saturation"),
        ("colour:0.1", (8, 8, 4), "1 or 3 channels"),
    ],
)
def test_images_that_an_operation_cannot_change_are_refused(word: str, shape: tuple[int, int, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        single(word).check(shape)


def test_words_have_one_canonical_form() -> None:
    assert canonical(["crop:04", "rotate:15", "flip"]) == ("crop:4:zero", "rotate:15.0", "flip:horizontal")
    assert canonical(canonical(["colour:0.4", "mixup:.2"])) == ("colour:0.4:0.0:0.0", "mixup:0.2")
    assert all(name in forms() for name in ("crop", "flip", "rotate", "scale", "colour", "cutout", "mixup"))
