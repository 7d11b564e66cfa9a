"""Train a network on pictures of garments with Keras alone."""

from __future__ import annotations

import gzip

import keras
import numpy as np


def pictures(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The images (n, 28, 28) float32 in 0..1 and labels (n,) uint8 of one part of data/fashion-mnist."""
    with gzip.open(f"data/fashion-mnist/{name}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28) / np.float32(255)
    with gzip.open(f"data/fashion-mnist/{name}-labels-idx1-ubyte.gz") as file:
        return images, np.frombuffer(file.read(), np.uint8, offset=8)


keras.utils.set_random_seed(1)
images, labels = pictures("train")
model = keras.Sequential(
    [
        keras.Input((28, 28)),
        keras.layers.Flatten(),
        keras.layers.Dense(64, "relu"),
        keras.layers.Dense(10, "softmax"),
    ]
)
optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
model.fit(images, labels, batch_size=128, epochs=4, shuffle=False, verbose=0)

_, accuracy = model.evaluate(*pictures("t10k"), verbose=0)
print(f"accuracy {accuracy:.4f}")
