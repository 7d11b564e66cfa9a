"""Encoded images in TensorFlow's operations: the pixels of lockstep.features.images, bit by bit, for a SavedModel.

JPEG of one or three components and PNG, turned by the orientation in their EXIF, or else their XMP. Anything else fails
the call: other formats, and a PNG with one transparent colour at a depth where TensorFlow mistakes it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

LUMA = (19595, 38470, 7471)  # ITU-R 601 in 1/65536, as lockstep.features.images.resize has it
ORIENTATION = 0x0112
ENTRY_BYTES = 12  # of an EXIF directory


def decoded(files: tf.Tensor, height: int, width: int, channels: int, fit: str) -> tf.Tensor:
    """Files (n,) string -> pixels (n, height, width, channels) uint8."""
    shape = (height, width, channels)

    def one(data: tf.Tensor) -> tf.Tensor:
        pixels = _upright(*_pixels(data))
        if channels == 1:
            pixels = tf.reduce_sum(tf.cast(pixels, tf.int32) * tf.constant(LUMA), axis=2, keepdims=True)
            pixels = (pixels + 0x8000) // 0x10000
        return tf.ensure_shape(_fit(tf.cast(pixels, tf.float64), height, width, fit), shape)

    return tf.map_fn(one, files, fn_output_signature=tf.TensorSpec(shape, "uint8"))


def _pixels(data: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A file's pixels (h, w, 3), integers, and its EXIF orientation, 1 to 8."""
    is_png = tf.equal(tf.strings.substr(data, 0, 8), b"\x89PNG\r\n\x1a\n")
    known = tf.logical_or(is_png, tf.io.is_jpeg(data))
    with tf.control_dependencies([tf.debugging.Assert(known, ["an image that is neither JPEG nor PNG"])]):
        data = tf.identity(data)

    def png() -> tf.Tensor:
        header = tf.io.decode_raw(tf.strings.substr(data, 24, 2), tf.uint8)
        odd_grey = (header[0] != 8) & (header[1] == 0)  # TensorFlow mistakes its opacity
        transparent = tf.size(tf.strings.split(data, b"tRNS", maxsplit=1)) > 1
        good = ~transparent | (header[0] == 8) | (header[1] == 3)
        with tf.control_dependencies([tf.debugging.Assert(good, ["a PNG of this depth with a transparent colour"])]):
            odd_grey = tf.identity(odd_grey)
        wide = tf.cond(odd_grey, opaque, lambda: tf.io.decode_png(data, channels=4))
        pixels, over = tf.cast(wide[:, :, :3], tf.int32), tf.cast(wide[:, :, 3:], tf.int32)
        return (pixels * over + 255 * (255 - over) + 127) // 255  # transparent parts over white

    def opaque() -> tf.Tensor:
        return tf.pad(tf.io.decode_png(data, channels=3), [[0, 0], [0, 0], [0, 1]], constant_values=255)

    def jpeg() -> tf.Tensor:
        plain = tf.not_equal(tf.io.extract_jpeg_shape(data)[2], 4)
        with tf.control_dependencies([tf.debugging.Assert(plain, ["a JPEG of four components"])]):
            pixels = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE")
        return tf.cast(pixels, tf.int32)

    parts = tf.strings.split(data, tf.where(is_png, b"eXIf", b"Exif\0\0"), maxsplit=1)
    found = tf.cond(tf.size(parts) > 1, lambda: _orientation(parts[1]), lambda: 0)
    xmp = tf.where(is_png, b"XML:com.adobe.xmp", b"http://ns.adobe.com/xap/1.0/\0")
    parts = tf.strings.split(data, xmp, maxsplit=1)
    found = tf.cond((found == 0) & (tf.size(parts) > 1), lambda: _xmp_orientation(parts[1]), lambda: found)
    found = tf.where((found >= 1) & (found <= 8), found, 1)
    return tf.cond(is_png, png, jpeg), found


def _orientation(exif: tf.Tensor) -> tf.Tensor:
    """The orientation in EXIF's first directory, 0 if there is none."""
    data = tf.cast(tf.io.decode_raw(exif, tf.uint8), tf.int32)
    data = tf.pad(data, [[0, 8]])  # of a header that is cut off
    little = tf.equal(data[0], ord("I"))

    def number(values: tf.Tensor) -> tf.Tensor:  # (..., bytes)
        ordered = tf.where(little, values, tf.reverse(values, [-1]))
        return tf.reduce_sum(ordered * 256 ** tf.range(tf.shape(values)[-1]), axis=-1)

    at = tf.clip_by_value(number(data[4:8]), 0, tf.size(data) - 2)
    entries = tf.minimum(number(data[at : at + 2]), (tf.size(data) - at - 2) // ENTRY_BYTES)
    table = tf.reshape(data[at + 2 : at + 2 + entries * ENTRY_BYTES], (-1, ENTRY_BYTES))
    values = tf.boolean_mask(number(table[:, 8:10]), tf.equal(number(table[:, 0:2]), ORIENTATION))
    return tf.concat([values, [0]], 0)[0]


def _xmp_orientation(xmp: tf.Tensor) -> tf.Tensor:
    """The first orientation in XMP, an attribute or an element; 0 if there is none."""
    # \C is any byte: what follows the XMP is no UTF-8.
    first = tf.strings.regex_replace(xmp, r"^\C*?tiff:Orientation(?:=\"|>)([0-9])\C*$", r"\1")
    known = tf.strings.regex_full_match(first, "[0-9]")
    return tf.cond(known, lambda: tf.strings.to_number(first, tf.int32), lambda: 0)


def _upright(pixels: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turn an image upright: (h, w, c) -> (h, w, c), or (w, h, c) for orientations 5 to 8."""
    pixels = tf.cond(orientation >= 5, lambda: tf.transpose(pixels, (1, 0, 2)), lambda: pixels)
    for axis, mirrored in ((0, (3, 4, 7, 8)), (1, (2, 3, 6, 7))):
        flips = tf.reduce_any(tf.equal(orientation, mirrored))
        pixels = tf.cond(flips, lambda old=pixels, axis=axis: tf.reverse(old, [axis]), lambda old=pixels: old)
    return pixels


def _fit(pixels: tf.Tensor, height: int, width: int, how: str) -> tf.Tensor:
    """Fit an image as lockstep.features.images.resize.fit does: (h, w, c) float64 -> (height, width, c) uint8. All sums
    are exact.
    """
    sides = tf.cast(tf.shape(pixels), tf.int64)
    old_height, old_width = sides[0], sides[1]
    if how == "resize":
        return _resized(pixels, (height, width), (height, width))
    cover, given = how == "crop", (tf.constant(height, tf.int64), tf.constant(width, tf.int64))
    tall = (2 * old_height * width + old_width) // (2 * old_width)
    wide = (2 * old_width * height + old_height) // (2 * old_height)
    tall, wide = (
        tf.maximum(new, side) if cover else tf.clip_by_value(new, 1, side)
        for new, side in zip((tall, wide), given, strict=True)
    )
    by_height = tf.equal(height * old_width >= width * old_height, cover)
    whole = tf.where(by_height, given[0], tall), tf.where(by_height, wide, given[1])
    if cover:
        return _resized(pixels, whole, (height, width))
    before = [(side - new) // 2 for side, new in zip(given, whole, strict=True)]
    after = [side - new - first for side, new, first in zip(given, whole, before, strict=True)]
    return tf.pad(_resized(pixels, whole, whole), [*zip(before, after, strict=True), (0, 0)])


def _resized(pixels: tf.Tensor, whole: tuple[Any, Any], part: tuple[Any, Any]) -> tf.Tensor:
    """The middle `part` of the image resized by area to `whole`, rounded half up: uint8."""
    area = tf.cast(tf.shape(pixels)[0] * tf.shape(pixels)[1], tf.float64)
    rows, columns = (_overlaps(tf.shape(pixels)[axis], whole[axis], part[axis]) for axis in (0, 1))
    total = tf.einsum("jw,iwc->ijc", columns, tf.einsum("ih,hwc->iwc", rows, pixels))
    return tf.cast((2 * total + area) / (2 * area), tf.uint8)


def _overlaps(old: tf.Tensor, whole: Any, part: Any) -> tf.Tensor:
    """Return (part, old): of a line of old * whole units, those that a new pixel (`whole` of them) and an old one
    share.
    """
    old, whole, part = (tf.cast(size, tf.int64) for size in (old, whole, part))
    new_at = (tf.range(part)[:, None] + (whole - part) // 2) * old
    old_at = tf.range(old)[None, :] * whole
    shared = tf.minimum(new_at + old, old_at + whole) - tf.maximum(new_at, old_at)
    return tf.cast(tf.maximum(shared, 0), tf.float64)
