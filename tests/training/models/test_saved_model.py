"""The encodings as TensorFlow computes them, and the columns that it cannot encode."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, PngImagePlugin

from lockstep.features.encode.encoder import Encoder
from lockstep.features.encode.hashing import hash_values
from lockstep.features.images.decode import decode
from lockstep.features.images.resize import fit as fitted_to
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.fitted import Moments
from lockstep.features.schema.schema import Schema

pytestmark = pytest.mark.slow


def test_the_hash_is_xxh64() -> None:
    import tensorflow as tf

    from lockstep.training.models.saved_model import xxh64

    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, size, dtype=np.uint8).tobytes() for size in [*range(140), 997]]  # each tail, stripes
    numbers = rng.integers(-(2**63), 2**63 - 1, 50)
    for seed in (0, 42, 2**63 - 1):
        found = tf.function(lambda values, seed=seed: xxh64(values, seed))(tf.constant(texts))
        np.testing.assert_array_equal(found, hash_values(pa.array(texts, pa.binary()), seed))
        np.testing.assert_array_equal(xxh64(tf.constant(numbers), seed), hash_values(pa.array(numbers), seed))
    assert xxh64(tf.constant([], tf.string), 0).shape == (0,)


def test_columns_that_tensorflow_cannot_encode_are_named_and_constants_are_zero(tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    from lockstep.training.models.saved_model import export_saved_model

    def exported(*fields: Field, fitted: dict[str, Moments]) -> tuple[str, dict[str, str]]:
        schema = Schema((sample_id_field(), *fields))
        signature = Encoder(schema, fitted).signature
        inputs = {
            name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in signature.features.items()
        }
        model = keras.Model(
            inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="_sum")(inputs["x"])
        )
        folder = str(tmp_path / fields[0].name)
        return folder, export_saved_model(model, folder, signature, schema, fitted)[1]

    x = Field(name="x", dtype="float32", encoding={"kind": "standardise", "file": "x.json"})
    moments = {"x": Moments(name="x", count=9, mean=1e6, variance=0.0, fitted_on=("train",))}
    folder, reasons = exported(x, fitted=moments)
    assert reasons == {}
    raw = tf.saved_model.load(folder).signatures["raw"]
    found = raw(x=tf.constant([1e6, np.nan, 1e6 + 0.0625, 2e6], tf.float32))["prediction"].numpy()
    np.testing.assert_array_equal(found, [[0], [0], [0], [1e6]])  # a constant's last bits count for nothing
    folder, reasons = exported(Field(name="my field", dtype="float32"), x, fitted=moments)
    found = tf.saved_model.load(folder).signatures["raw"](x=tf.constant([2e6]), my_field=tf.constant([1.0]))
    assert reasons == {} and found["prediction"].numpy() == [[1e6]]
    names = Field(name="names", dtype="float32", shape=(None,), encoding={"kind": "sequence", "length": 2})
    lengths = Field(name="names_length", dtype="float32")
    folder, reasons = exported(names, x, Field(name="n", dtype="uint64"), lengths, fitted=moments)
    assert reasons == {
        "names": "its second input would be called `names_length`, like another column",
        "n": "a TensorFlow signature cannot take uint64",
    }
    assert list(tf.saved_model.load(folder).signatures) == ["serving_default"]


def pictures() -> dict[str, bytes]:
    """PNG of each mode, JPEG grey and of each subsampling, and both with each orientation in both byte orders."""
    rng = np.random.default_rng(3)
    found: dict[str, bytes] = {}

    def add(name: str, image: Image.Image, kind: str = "PNG", **options: Any) -> None:
        file = io.BytesIO()
        image.save(file, kind, **options)
        found[name] = file.getvalue()

    whole = Image.fromarray(rng.integers(0, 256, (23, 31, 4), dtype=np.uint8))
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        add(f"PNG {mode}", whole.convert(mode))
    add("PNG P with transparency", whole.convert("RGB").quantize(16), transparency=3)
    add("PNG RGB with a transparent colour", whole.convert("RGB"), transparency=whole.convert("RGB").getpixel((2, 3)))
    add("PNG 16 bits", Image.fromarray(rng.integers(0, 1 << 16, (20, 9), dtype=np.uint16)))
    smooth = whole.convert("RGB").resize((61, 45), Image.Resampling.BICUBIC)
    add("JPEG L", smooth.convert("L"), "JPEG")
    add("progressive JPEG", smooth, "JPEG", progressive=True)
    for subsampling in range(3):
        add(f"JPEG {subsampling}", smooth, "JPEG", subsampling=subsampling)
    for orientation in range(10):
        for order in ("<", ">"):
            exif = Image.Exif()
            exif.endian, exif[0x010F], exif[0x0112] = order, "a maker", orientation
            for kind in ("JPEG", "PNG"):
                add(f"{kind} {orientation} {order}", smooth, kind, exif=exif)
    xmp = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description {}/></x:xmpmeta>'
    turned, exif = xmp.format('tiff:Orientation="6"'), Image.Exif()
    exif[0x010F] = "a maker"
    for name, text, more in (
        ("XMP", turned, {}),
        ("XMP element", xmp.format("a='b'").replace("/>", "><tiff:Orientation>8</tiff:Orientation>"), {}),
        ("XMP of a rating", xmp.format('xmp:Rating="3"'), {}),
        ("XMP beside EXIF without one", turned, {"exif": exif}),
    ):
        add(f"JPEG, {name}", smooth, "JPEG", xmp=text.encode(), **more)
        info = PngImagePlugin.PngInfo()
        info.add_itxt("XML:com.adobe.xmp", text)
        add(f"PNG, {name}", smooth, "PNG", pnginfo=info, **more)
    exif[0x0112] = 3
    add("JPEG, EXIF before XMP", smooth, "JPEG", xmp=turned.encode(), exif=exif)
    add("JPEG, EXIF cut off", smooth, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x09\x01")
    add("line", whole.crop((0, 0, 31, 1)))
    return found


@pytest.mark.parametrize(
    ("fit", "height", "width", "channels"), [("resize", 16, 16, 3), ("crop", 45, 61, 1), ("pad", 7, 40, 3)]
)
def test_images_have_the_pixels_of_the_dataset(fit: str, height: int, width: int, channels: int) -> None:
    import tensorflow as tf

    from lockstep.training.models.saved_images import decoded

    files = pictures()
    call = tf.function(lambda data: decoded(data, height, width, channels, fit))
    found = call(tf.constant(list(files.values()))).numpy()
    for one, (name, data) in zip(found, files.items(), strict=True):
        np.testing.assert_array_equal(one, fitted_to(decode(data, channels)[None], height, width, fit)[0], name)
    assert call(tf.constant([], tf.string)).shape == (0, height, width, channels)


def test_other_images_fail() -> None:
    import tensorflow as tf

    from lockstep.training.models.saved_images import decoded

    wide = {"transparency": 0}
    for kind, mode, more in (("GIF", "L", {}), ("JPEG", "CMYK", {}), ("PNG", "I;16", wide)):
        file = io.BytesIO()
        Image.new(mode, (4, 4)).save(file, kind, **more)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"neither JPEG nor PNG|four components|transparent"):
            decoded(tf.constant([file.getvalue()]), 4, 4, 3, "resize")


def test_inputs_are_named_by_what_tensorflow_takes() -> None:
    from lockstep.training.models.saved_model import input_names

    names = ["a", "x y", "x.y", "x_y", "1a", "self", "é"]
    assert list(input_names(names).values()) == ["a", "x_y", "x_y_", "x_y__", "arg_1a", "arg_self", "arg__"]
