"""ResNet-20 on CIFAR-10: accuracy after each epoch by this project at one and two ranks, and by plain Keras.

    python -m benchmarks.cifar10 FOLDER TRAIN TEST [--epochs 30] [--contestants ranks-1-0 keras-0 ...]

TRAIN and TEST are archives of `train/CLASS/*` and `test/CLASS/*`; dataset, runs and scores are kept in FOLDER, and the
same call resumes what was interrupted. All contestants have the model and schedule of `--model resnet20`, SGD with
momentum, batches of 128, and crops of 4 pixels and flips. `ranks-N-SEED` is this project at N ranks; `keras-SEED` is
Keras' own `fit` in one process on a tf.data input with a shuffle over the whole set. The seed gives first weights,
order and changes of images. Each epoch is scored on all test images. The last lines are a table of epochs, and each
contestant's best and last accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

BATCH, TRAIN_IMAGES = 128, 50_000
CONTESTANTS = [f"{name}-{seed}" for name in ("ranks-1", "ranks-2", "keras") for seed in (0, 1)]


def main() -> None:
    """Measure what is not measured yet, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS)
    args = parser.parse_args()
    dataset = args.folder / "dataset"
    if not dataset.exists():
        flags = ["--source", "tar", "--image-size", "32x32", "--split", "given", "--format", "parquet"]
        call(
            "lockstep.jobs.etl_images",
            *flags,
            "--input",
            args.train,
            args.test,
            "--output",
            str(dataset),
            "--master",
            "local[2]",
        )
    curves: dict[str, list[float]] = {}
    for name in args.contestants:
        kind, *numbers = name.split("-")
        curve = ranks if kind == "ranks" else plain
        curves[name] = curve(dataset, args.folder / name, args.epochs, *map(int, numbers))
    show(curves, args.epochs)


def call(*command: str) -> None:
    """Run a job of this project."""
    subprocess.run([sys.executable, "-m", *command], check=True)


def ranks(dataset: Path, run: Path, epochs: int, number: int, seed: int) -> list[float]:
    """The accuracy on the test split after each epoch of a run of `number` ranks."""
    from lockstep.training.run.metrics import read_history

    call(
        *("lockstep.jobs.train", "--dataset", str(dataset), "--run", str(run), "--model", "resnet20"),
        *("--num-ranks", str(number), "--launcher", "local", "--global-batch", str(BATCH), "--epochs", str(epochs)),
        *("--augment", "crop:4", "flip", "--batchnorm", "sync", "--validate", "test", "--audit", "--seed", str(seed)),
    )
    return [float(row["metrics"]["val_accuracy"]) for row in read_history(str(run)).epochs]


def plain(dataset: Path, folder: Path, epochs: int, seed: int) -> list[float]:
    """The accuracy on the test split after each epoch of Keras' own `fit`."""
    scores = folder / "scores.json"
    found: list[float] = json.loads(scores.read_text()) if scores.exists() else []
    if len(found) >= epochs:
        return found
    folder.mkdir(exist_ok=True)
    import keras

    def keep(epoch: int, logs: dict[str, float]) -> None:
        found[epoch:] = [logs["val_accuracy"]]
        scores.write_text(json.dumps(found))

    start = time.monotonic()
    kept = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    plain_fit(
        *(dataset, seed, BATCH, epochs),
        validation_data=split(dataset, "test"),
        validation_batch_size=500,
        callbacks=[kept, keras.callbacks.LambdaCallback(on_epoch_end=keep)],
        verbose=2,
    )
    print(f"keras, seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
    return found


def plain_fit(dataset: Path, seed: int, batch: int, epochs: int, **options: Any) -> None:
    """Keras' own `fit` of the same model, with `options`; the learning rate falls over all `epochs`."""
    import keras
    import tensorflow as tf

    from lockstep.features.schema.signature import Signature, TensorSpec
    from lockstep.training.models import ModelOptions, build

    keras.utils.set_random_seed(seed)
    image, label = TensorSpec(shape=(32, 32, 3), dtype="uint8"), TensorSpec(shape=(), dtype="int64")
    signature = Signature(features={"image": image}, label=label, num_classes=10)
    steps = epochs * (TRAIN_IMAGES // batch)
    model = build("resnet20", signature, ModelOptions(seed=seed, global_batch=batch, steps=steps)).model

    def changed(image: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        image = tf.image.random_flip_left_right(tf.pad(image, [[4, 4], [4, 4], [0, 0]]))
        return tf.image.random_crop(image, (32, 32, 3)), number

    model.jit_compile = False  # as on ranks; XLA needs twice the time on a CPU
    images, labels = split(dataset, "train")
    order = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(TRAIN_IMAGES, seed=seed)
    batches = order.map(changed, num_parallel_calls=2).batch(batch, drop_remainder=True).prefetch(2)
    model.fit(batches, epochs=epochs, **options)


def split(dataset: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 32, 32, 3) uint8 and classes (n,) int64."""
    import pyarrow.parquet as pq

    table = pq.read_table(dataset / f"split={name}", columns=["image", "label"])
    pixels = b"".join(table["image"].to_pylist())
    return np.frombuffer(pixels, np.uint8).reshape(-1, 32, 32, 3), table["label"].to_numpy()


def show(curves: dict[str, list[float]], epochs: int) -> None:
    """Print the table of epochs, and the best and last accuracies."""
    names = ("tensorflow", "keras", "numpy")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", end="")
    print("".join(f", {name} {version(name)}" for name in names))
    print("epoch " + " ".join(f"{name:>9}" for name in curves))
    for epoch in range(epochs):
        print(f"{epoch + 1:5} " + " ".join(f"{curve[epoch]:9.4f}" for curve in curves.values()))
    for name, curve in curves.items():
        print(f"{name}: best {max(curve):.4f}, last {curve[-1]:.4f}")


if __name__ == "__main__":
    main()
