"""Images a second that one core augments: --augment against Keras' layers and tf.image, in one interleaved run.

    python -m benchmarks.augment [--images N] [--side N] [--rounds N]

Each contestant does what is nearest to one operation of --augment, on seeded uint8 images of 3 channels in batches of
256:
  ours   lockstep.features.images, including the random numbers by (seed, epoch, sample id)
  keras  the Keras layer on the whole batch, as a tf.function (a layer's random numbers depend on earlier calls)
  image  tf.image's stateless operation on each image, seeded by its number, in a tf.data map, as is common
TensorFlow computes in one thread; times are CPU times of the process. Each round runs all contestants in turn; the
first round is dropped. Keras works in floats; its RandomTranslation stands for a crop.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from lockstep.features.images.augment import parse
from lockstep.features.images.mixing import draw_partners, draw_shares, mix_images
from lockstep.features.images.random_numbers import Draws

BATCH = 256
LANE_ROWS = 16
layers = keras.layers
Work = Callable[[], object]


def ours(word: str, images: Any) -> Work:
    """All images through one operation of --augment."""
    operations = parse([word])

    def work() -> None:
        for start in range(0, len(images), BATCH):
            batch = images[start : start + BATCH]
            draws = Draws.of(1, np.zeros(len(batch), dtype=np.int64), np.arange(start, start + len(batch)))
            for operation in operations.single:
                operation.apply(batch, draws)
            if operations.mixup is not None:
                alpha = operations.mixup.alpha
                mix_images(batch, draw_partners(draws, LANE_ROWS), draw_shares(draws, alpha))

    return work


def by_keras(layer: Any, images: Any) -> Work:
    """All images through a Keras layer, a batch at a time; MixUp mixes labels, too."""
    labels = tf.one_hot(np.arange(BATCH) % 10, 10)
    mixes = isinstance(layer, layers.MixUp)

    @tf.function
    def call(batch: Any) -> Any:
        floats = tf.cast(batch, tf.float32)
        if mixes:
            return tf.cast(layer({"images": floats, "labels": labels}, training=True)["images"], tf.uint8)
        return tf.cast(layer(floats, training=True), tf.uint8)

    def work() -> None:
        for start in range(0, len(images), BATCH):
            call(images[start : start + BATCH]).numpy()

    return work


def by_image(change: Callable[[Any, Any], Any], images: Any) -> Work:
    """All images through an operation of tf.image, one at a time."""
    options = tf.data.Options()
    options.autotune.enabled = False  # TensorFlow 2.21's holds up the end of an iteration
    options.threading.private_threadpool_size = 1
    data = tf.data.Dataset.from_tensor_slices((images, np.arange(len(images)))).map(
        lambda image, number: change(image, tf.stack([1, number]))
    )
    data = data.batch(BATCH).with_options(options)

    def work() -> None:
        for batch in data:
            batch.numpy()

    return work


def cropped(image: Any, seed: Any) -> Any:
    """Four pixels more on each side, then a window of the old size."""
    return tf.image.stateless_random_crop(tf.pad(image, [[4, 4], [4, 4], [0, 0]]), image.shape, seed)


def coloured(image: Any, seed: Any) -> Any:
    """Brightness, contrast, saturation."""
    image = tf.image.stateless_random_brightness(image, 0.4, seed)
    image = tf.image.stateless_random_contrast(image, 0.6, 1.4, seed)
    return tf.image.stateless_random_saturation(image, 0.6, 1.4, seed)


def contestants(images: Any) -> dict[str, dict[str, Work]]:
    """By operation and way."""
    side, black = images.shape[1], {"fill_mode": "constant", "fill_value": 0.0, "seed": 1}
    shift = 4 / side
    cut = 8 / side
    found = {
        "crop:4": (layers.RandomTranslation(shift, shift, interpolation="nearest", **black), cropped),
        "flip": (layers.RandomFlip("horizontal", seed=1), tf.image.stateless_random_flip_left_right),
        "rotate:15": (layers.RandomRotation(15 / 360, **black), None),
        "scale:0.8:1.2": (layers.RandomZoom((-0.2, 0.2), **black), None),
        "colour:0.4:0.4:0.4": (
            layers.RandomColorJitter(
                (0, 255), brightness_factor=0.4, contrast_factor=0.4, saturation_factor=0.4, seed=1
            ),
            coloured,
        ),
        "cutout:8": (layers.RandomErasing(1.0, (cut**2, cut**2), fill_value=0.0, value_range=(0, 255), seed=1), None),
        "mixup:0.2": (layers.MixUp(0.2, seed=1), None),
    }
    return {
        word: {
            "ours": ours(word, images),
            "keras": by_keras(layer, images),
            **({} if change is None else {"image": by_image(change, images)}),
        }
        for word, (layer, change) in found.items()
    }


def main(argv: list[str]) -> int:
    """Print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after a dropped one")
    args = parser.parse_args(argv)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    shape = (args.images // BATCH * BATCH, args.side, args.side, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    print(f"python {platform.python_version()}, numpy {np.__version__}, tensorflow {tf.__version__},", end=" ")
    print(f"keras {keras.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    print(
        f"{len(images)} images of {args.side} x {args.side} x 3, {args.rounds} rounds: thousands of images a second of"
    )
    print("processor time, median (lowest - highest); last: ours over the faster of the others, in the same round")
    ways = contestants(images)
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(args.rounds + 1):
        for word, works in ways.items():
            for way, work in works.items():
                before = time.process_time()
                work()
                if number:
                    seconds.setdefault((word, way), []).append(time.process_time() - before)
    for word, works in ways.items():
        texts = {}
        for way in works:
            rates = [len(images) / 1000 / spent for spent in seconds[word, way]]
            texts[way] = f"{way} {statistics.median(rates):.0f} ({min(rates):.0f} - {max(rates):.0f})"
        peers = [seconds[word, way] for way in works if way != "ours"]
        times = [min(others) / mine for mine, *others in zip(seconds[word, "ours"], *peers, strict=True)]
        print(f"{word:20s} {', '.join(texts.values())}: {statistics.median(times):.1f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
