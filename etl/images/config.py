"""The configuration of `lockstep etl_images`, checked before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.etl.choices import SOURCES, STORES, Source, Store
from lockstep.etl.images.cifar import NUM_CLASSES
from lockstep.etl.images.source import composed
from lockstep.etl.write.config import OutputConfig
from lockstep.features.images.choices import FITS, MAX_PIXELS, ROTATIONS, Fit
from lockstep.features.images.decode import Limits
from lockstep.features.images.intake import Intake
from lockstep.features.schema.fields import Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.errors import require
from lockstep.storage.urls import several

ENCODED = ("folder", "tar", "parquet")
NAMED = ("folder", "tar")  # whose folders name the classes
MAX_SIDE = 4096
MAX_CLASSES = 1 << 16
_DEFAULT_CLASSES = {"idx": 10, "npz": 10, **NUM_CLASSES}
_BYTE_CLASSES = {"idx": 256, **NUM_CLASSES}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesConfig(OutputConfig):
    """The configuration of `lockstep etl_images`. Raises ConfigError for invalid values."""

    source: Source = "idx"
    """idx, cifar10, cifar100, npz: images of equal size; folder, tar, parquet: JPEG, PNG, GIF, TIFF, WebP, BMP, PNM."""
    image_size: tuple[int, int] | None = None
    """Height and width of all images; None keeps those of idx, cifar and npz, whose images are all equal."""
    fit: Fit = "resize"
    """How images get that size: resize, crop or pad, see lockstep.features.images.resize.fit."""
    rotate: int = 0
    """Degrees clockwise, before the size is changed: 0, 90, 180 or 270."""
    channels: int | None = None
    """1 (grey) or 3 (RGB); None keeps those of idx, cifar and npz, and means 3 for files."""
    store: Store = "pixels"
    """pixels, or encoded: the bytes of the files, which a reader decodes and resizes."""
    num_classes: int | None = None
    """Labels are 0 to num_classes - 1, others are quarantined; None for 10 (cifar100: 100) or the number of names."""
    classes: tuple[str, ...] | None = None
    """The names of all classes, in the order of their labels; None for those that are found, sorted."""
    image_column: str = "image"
    """The column of encoded images in Parquet; a struct's field as column.field."""
    label_column: str = "label"
    """The column of labels in Parquet, numbers or text."""
    image_arrays: tuple[str, ...] = ()
    """The arrays of images in .npz and .npy files; () for those of the usual names, such as x_train or images."""
    label_arrays: tuple[str, ...] = ()
    """The arrays of their labels, in the same order."""
    max_pixels: int = MAX_PIXELS
    """Larger images go to quarantine before they are decoded."""

    def __post_init__(self) -> None:
        super(ImagesConfig, self).__post_init__()
        for name in ("image_arrays", "label_arrays"):
            object.__setattr__(self, name, several(getattr(self, name)))
        files = self.source in ENCODED
        require(self.source in SOURCES, "--source", self.source, ", ".join(SOURCES))
        require(self.fit in FITS, "--fit", self.fit, ", ".join(FITS))
        require(self.rotate in ROTATIONS, "--rotate", str(self.rotate), ", ".join(map(str, ROTATIONS)))
        require(self.channels in (None, 1, 3), "--channels", str(self.channels), "1 or 3")
        require(self.store in STORES, "--store", self.store, ", ".join(STORES))
        require(self.store == "pixels" or files, "--store", f"encoded with --source {self.source}", ", ".join(ENCODED))
        require(
            self.store == "pixels" or self.rotate == 0,
            "--rotate",
            "with --store encoded",
            "0: the bytes are stored unchanged",
        )
        require(1 <= self.max_pixels <= 1 << 28, "--max-pixels", str(self.max_pixels), "1 to 2^28")
        if self.num_classes is not None:
            most = _BYTE_CLASSES.get(self.source, MAX_CLASSES)
            require(2 <= self.num_classes <= most, "--num-classes", str(self.num_classes), f"2 to {most}")
        if self.classes is not None:
            object.__setattr__(self, "classes", tuple(map(composed, self.classes)))
            named = files and self.num_classes is None
            require(named, "--classes", f"with --source {self.source}", "labels that are names, without --num-classes")
            good = all(self.classes) and len(set(self.classes)) == len(self.classes) > 1
            require(good, "--classes", ",".join(self.classes), "two different names or more, as cat,dog")
        if self.image_size is not None:
            good = all(1 <= size <= MAX_SIDE for size in self.image_size)
            require(good, "--image-size", str(self.image_size), f"1 to {MAX_SIDE}")
        elif files:
            require(False, "--image-size", f"none with --source {self.source}", "HxW: files may have any size")
        require(not self.bake, "--bake", "images", "--store pixels without --bake: pixels are the inputs of a model")
        idle = (
            ("--fit", self.fit != "resize" and self.image_size is None, "--image-size"),
            ("--max-pixels", self.max_pixels != MAX_PIXELS and not files, f"--source {' or '.join(ENCODED)}"),
            ("--image-arrays", bool(self.image_arrays) and self.source != "npz", "--source npz"),
            ("--label-arrays", bool(self.label_arrays) and self.source != "npz", "--source npz"),
            ("--image-column", self.image_column != "image" and self.source != "parquet", "--source parquet"),
            ("--label-column", self.label_column != "label" and self.source != "parquet", "--source parquet"),
        )
        for flag, does_nothing, needed in idle:
            require(not does_nothing, flag, f"{flag} without {needed}", f"with {needed}, else it has no effect")
        arrays = (*self.image_arrays, *self.label_arrays)
        paired = len(self.image_arrays) == len(self.label_arrays) and all(arrays) and len(set(arrays)) == len(arrays)
        lists = f"{','.join(self.image_arrays)} with --label-arrays {','.join(self.label_arrays)}"
        require(paired, "--image-arrays", lists, "different names, an array of labels for each array of images")
        self._check_labels()
        column = self.split_spec.column
        require(column in (None, "label"), "--split", self.split, "a split without a column, or stratified:label:A/B")

    def _check_labels(self) -> None:
        """Raise ConfigError for pictures without labels of a source that has labels, or with classes."""
        if not self.unlabelled:
            return
        named = self.source in NAMED
        require(named, "--unlabelled", f"--source {self.source}", f"with --source {' or '.join(NAMED)}")
        classes = self.num_classes is not None or self.classes is not None
        step = "Leave it out: the model names its classes."
        require(not classes, "--classes or --num-classes", "with --unlabelled", "without it", step)

    @property
    def label_count(self) -> int | None:
        """The number of classes of numeric labels; None if it is only known after reading the files."""
        return self.num_classes or _DEFAULT_CLASSES.get(self.source)

    @property
    def late(self) -> bool:
        """Whether images may become pixels only when they are written. Not if splits or weights depend on counts of
        records: these need to know first which images are broken.
        """
        counted = self.weights != "none" or self.split_spec.counted
        return self.source in ENCODED and self.store == "pixels" and not counted

    @property
    def may_be_planned(self) -> bool:
        """Whether ids, splits and order depend only on names and headers: then the driver can plan shards."""
        split = self.split_spec
        hashed = split.kind in ("random", "kfold", "given") and split.column is None and self.classes is None
        return (
            self.source == "tar"
            and self.late
            and hashed
            and not self.unlabelled
            and self.sample is None
            and self.append_to is None
            and self.input_root is None
        )

    def fields(self, shape: tuple[int, int, int] | None, num_classes: int) -> Schema:
        """The fields of the dataset: pixels (height, width, channels) uint8, and the class. With --store encoded an
        image is the bytes of its file, which a reader decodes and brings to that size.

        `shape` is that of the input's images, None for files of any size.
        """
        if shape is None:
            assert self.image_size is not None, "files of any size are brought to one"
            shape = (*self.image_size, 3)
        height, width, channels = self.intake.shape(*shape)
        image = Field(name="image", dtype="uint8", shape=(height, width, channels))
        if self.store == "encoded":
            encoding = {"kind": "image", "height": height, "width": width, "channels": channels, "fit": self.fit}
            image = Field(name="image", dtype="bytes", encoding=encoding)
        label = Field(name="label", dtype="int64", kind="label", num_classes=num_classes)
        return self.stored(Schema((sample_id_field(), image, label)))

    @property
    def intake(self) -> Intake:
        """The operations on each image."""
        return Intake(
            size=self.image_size,
            channels=self.channels or (3 if self.source in ENCODED else None),
            how=self.fit,
            degrees=self.rotate,
            keep=self.store == "encoded",
            late=self.late,
            limits=Limits(max_pixels=self.max_pixels),
        )

    def with_classes(self, class_names: Sequence[str]) -> dict[str, Any]:
        """Return `to_json` with the names of the classes, which are known after reading."""
        return {**self.to_json(), "class_names": list(class_names) or None}

    def to_json(self) -> dict[str, Any]:
        """The settings that decide the content of the dataset, in addition to input and seed."""
        own: dict[str, Any] = {
            "job": "etl_images",
            "source": self.source,
            "image_size": None if self.image_size is None else list(self.image_size),
            "fit": self.fit,
            "rotate": self.rotate,
            "channels": self.channels,
            "store": self.store,
            "num_classes": self.num_classes,
            "max_pixels": self.max_pixels,
        }
        if self.classes is not None:
            own["classes"] = list(self.classes)
        if self.source == "parquet":
            own |= {"image_column": self.image_column, "label_column": self.label_column}
        if self.source == "npz":
            own |= {"image_arrays": list(self.image_arrays), "label_arrays": list(self.label_arrays)}
        return {**super(ImagesConfig, self).to_json(), **own}
