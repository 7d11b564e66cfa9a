"""From image sets of any source to a dataset of pixels, or encoded images, and labels."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from etl import columns as c
from etl.images import cifar, folders, idx, parquet, planned, tar
from etl.images.cifar import CifarPiece
from etl.images.config import MAX_CLASSES, ImagesConfig
from etl.images.folders import FolderPiece, digest_trees
from etl.images.idx import IdxPiece
from etl.images.parquet import ParquetPiece
from etl.images.planned import NotPlannable
from etl.images.source import BAD, DROPPED, ID_COLUMNS, OUTPUT, RECORD, ImagePlan, Piece, step_bytes
from etl.images.tar import TarPiece
from etl.input.files import digest_sources
from etl.spark.errors import translated
from etl.spark.session import described, tuned, watched
from etl.spark.tasks import Items, over_slices
from etl.write.checks import check_columns, check_output, check_schema
from etl.write.dataset import write_dataset
from etl.write.late import Intake, Late, LateImages, has_late_content
from etl.write.quarantine import Origin, check_bad
from etl.write.shards import RUN_AGAIN
from lockstep.features.schema.fields import SAMPLE_ID, Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import DataError
from lockstep.storage.urls import absolute

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OTHER_GROUPS = 16  # what is rejected, and what is left out by the few rules there are


@dataclass(frozen=True, slots=True)
class Tally:
    """How many rows of each kind there are, and the classes of the images by their names."""

    read: int
    bad: int
    raw_bytes: int
    dropped: Mapping[str, int]
    classes: tuple[str, ...]
    without_split: int


def tally_of(parsed: DataFrame, most_classes: int = MAX_CLASSES) -> Tally:
    """Count the rows of etl.images.source in one pass. Raises DataError for more classes than that: unique texts
    in place of labels are as many as images.
    """
    from pyspark.sql import functions as f

    by = ("kind", "class", f.when(f.col("kind") == DROPPED, f.col("reason")).alias("reason"))
    sums = (
        f.count(f.lit(1)).alias("n"),
        f.sum(f.octet_length("raw")).alias("raw"),
        f.count(f.when(f.col(c.SPLIT).isNull(), 1)).alias("unsplit"),
    )
    most = most_classes + _OTHER_GROUPS
    found = parsed.groupBy(*by).agg(*sums).limit(most + 1).collect()
    if len(found) > most:
        raise _wrong_number(f"more than {most_classes}", [row["class"] for row in found], f"{most_classes} at most")
    good = [row for row in found if row["kind"] == RECORD]
    bad = [row for row in found if row["kind"] == BAD]
    return Tally(
        read=sum(row["n"] for row in found),
        bad=sum(row["n"] for row in bad),
        raw_bytes=sum(row["raw"] or 0 for row in bad),
        dropped={row["reason"]: row["n"] for row in found if row["kind"] == DROPPED},
        classes=tuple(sorted(row["class"] for row in good if row["class"] is not None)),
        without_split=sum(row["unsplit"] for row in good),
    )


def class_names(config: ImagesConfig, plan: ImagePlan, tally: Tally) -> Sequence[str]:
    """The names of the labels in order, () where nobody knows any: sorted, or those of the dataset that is continued.

    Raises DataError where they cannot be labels.
    """
    if config.split_spec.given and tally.without_split:
        raise DataError(
            f"{tally.without_split} images do not name their split",
            got="neither a folder nor an archive named like a split",
            allowed="train/CLASS/..., test/CLASS/... or val/CLASS/..., or archives named so",
            next_step="Use --split 80/20.",
        )
    if plan.num_classes is not None:
        return plan.class_names
    most = config.num_classes or MAX_CLASSES
    least = 2 if config.append_to is None else 1
    if not least <= len(tally.classes) <= most:
        raise _wrong_number(str(len(tally.classes)), tally.classes, f"{least} to {most}")
    return tally.classes if config.append_to is None else _continued(config.append_to, tally.classes)


def _wrong_number(found: str, classes: Sequence[str | None], allowed: str) -> DataError:
    return DataError(
        f"{found} classes were found",
        got=", ".join(sorted(name for name in classes if name is not None)[:5])[:500] or "no image",
        allowed=allowed,
        next_step="Put the images of each class into a folder of its name; correct --num-classes.",
    )


def _continued(url: str, found: Sequence[str]) -> Sequence[str]:
    """The names of the dataset at `url`, whose labels the new one's must be. Raises DataError for another name."""
    known = load_dataset(absolute(url)).created_by["config"].get("class_names")
    names = known if isinstance(known, list) else []
    others = [name for name in found if name not in set(names)]
    if others:
        raise DataError(
            f"{url} cannot be continued: it has not all classes",
            got=", ".join(others[:5]),
            allowed=", ".join(map(str, names[:20])) or "a dataset whose classes have names",
            next_step="Make a dataset of its own without --append-to.",
        )
    return names


_KINDS: dict[str, type[Piece]] = {
    kind.__name__: kind for kind in (IdxPiece, CifarPiece, FolderPiece, TarPiece, ParquetPiece)
}


def to_json(piece: Piece) -> dict[str, Any]:
    """A piece as plain values."""
    # each Piece is a dataclass; the protocol cannot say so
    return {"kind": type(piece).__name__, **asdict(piece)}  # type: ignore[call-overload]


def from_json(found: Mapping[str, Any]) -> Piece:
    """The piece that to_json wrote."""
    values = dict(found)
    return _KINDS[values.pop("kind")](**values)


@dataclass(frozen=True)
class ParseImages:
    """Reads the pieces of a task: pieces as JSON in, rows of etl.images.source.OUTPUT out. Raises what they raise."""

    intake: Intake
    num_classes: int | None

    def __call__(self, items: Items) -> Iterator[pa.RecordBatch]:
        for item in items:
            yield from from_json(item).read(self.intake, self.num_classes)


log = logging.getLogger(__name__)


def check(config: ImagesConfig) -> ImagePlan:
    """What can be checked before Spark starts: the output, the files, their names, headers and lengths, and that split,
    sample, weights and the dataset that is continued go with what the images become.
    """
    check_output(config)
    plan = _planned(config)
    fields = _schema(config, plan, plan.num_classes or _known_classes(config))
    check_columns(config, fields, {field.name: c.ddl_type(field) for field in fields if field.name != SAMPLE_ID})
    check_schema(config, fields)
    return plan


def _planned(config: ImagesConfig) -> ImagePlan:
    given, step = config.split_spec.given, config.split_bytes
    if config.source == "folder":
        return folders.plan(config.inputs, split_bytes=step)
    if config.source == "tar":
        listed = config.intake.limits if config.may_be_planned else None
        return tar.plan(config.inputs, split_bytes=step, listed=listed)
    classes = config.label_count
    if config.source == "parquet":
        image, label = config.image_column, config.label_column
        return parquet.plan(config.inputs, image=image, label=label, given=given, num_classes=classes)
    assert classes is not None
    if config.source == "idx":
        return idx.plan(config.inputs, given=given, num_classes=classes, split_bytes=step)
    return cifar.plan(config.inputs, config.source, given=given, num_classes=classes, split_bytes=step)


def schema(shape: tuple[int, int, int], num_classes: int, *, encoded_fit: str | None = None) -> Schema:
    """The fields of an image set's dataset: (height, width, channels) uint8 pixels and the class.

    With `encoded_fit` the image is a file's bytes, which a reader decodes and brings to that shape in that way.
    """
    image = Field(name="image", dtype="uint8", shape=shape)
    if encoded_fit is not None:
        height, width, channels = shape
        encoding = {"kind": "image", "height": height, "width": width, "channels": channels, "fit": encoded_fit}
        image = Field(name="image", dtype="bytes", encoding=encoding)
    return Schema((sample_id_field(), image, Field(name="label", dtype="int64", kind="label", num_classes=num_classes)))


def run(spark: SparkSession, config: ImagesConfig, plan: ImagePlan | None = None) -> DatasetManifest:
    """Read, decode, fit, split and publish; `plan` is what `check` gave, where it was asked already.

    Raises the errors of check, and DataError where files are not what they say.
    """
    plan = plan or check(config)
    intake = config.intake
    with translated(spark, "reading the images"), tuned(spark, plan.sources), watched(spark, "etl images"):
        if plan.files is not None:
            try:
                return planned.run(spark, config, plan, schema_of=lambda count: _schema(config, plan, count))
            except NotPlannable as why:
                log.debug("the shards are not planned ahead: %s", why)
        pieces, step = [to_json(piece) for piece in plan.pieces], step_bytes(config.split_bytes)
        parse = ParseImages(intake, plan.num_classes)
        parsed = over_slices(spark, pieces, plan.piece_bytes(), step, parse, OUTPUT).persist()
        try:
            with described(spark, "read and decode the images"):
                tally = tally_of(parsed, config.num_classes or MAX_CLASSES)
            # Some headers promise so many records and each task checks its own: a second way to the same number.
            if plan.records not in (None, tally.read):
                raise DataError(
                    "the records that were read are not those that the files' headers promise",
                    got=str(tally.read),
                    allowed=str(plan.records),
                    next_step=RUN_AGAIN,
                )
            quarantine = (
                parsed.where(f"kind = {BAD}")
                .withColumnRenamed(c.SOURCE, "source")
                .withColumnRenamed(c.POSITION, "position")
            )
            urls = [source.url for source in plan.sources]
            check_bad(config, quarantine, urls, tally.bad, tally.read)
            names = class_names(config, plan, tally)
            classes = plan.num_classes or len(names)
            origin = Origin(
                sources=digest_trees(parsed, plan.sources) if plan.trees else digest_sources(spark, plan.sources),
                read=tally.read,
                dropped=tally.dropped,
                quarantined=tally.bad,
                quarantined_raw_bytes=tally.raw_bytes,
                quarantine=quarantine,
                created_config=config.told(names),
            )
            rows = _labelled(parsed.where(f"kind = {RECORD}"), plan, names)
            if plan.names_may_repeat:
                rows = _counted(rows, parsed)
            fields = _schema(config, plan, classes)
            return write_dataset(
                rows,
                config.output,
                schema=fields,
                id_columns=ID_COLUMNS,
                origin=origin,
                late=_late(config, fields) if config.late else None,
                **config.write_options(),
            )
        finally:
            parsed.unpersist()


def _schema(config: ImagesConfig, plan: ImagePlan, num_classes: int) -> Schema:
    intake = config.intake
    shape = intake.shape(*(plan.shape or (*_size(config), 3)))
    return schema(shape, num_classes, encoded_fit=config.fit if intake.keep else None)


def _known_classes(config: ImagesConfig) -> int:
    """How many classes there are where they have names, before these are known: the parent's, or the most."""
    if config.append_to is not None:
        label = Schema.from_json(load_dataset(config.append_to).schema).label
        if label is not None and label.num_classes is not None:
            return label.num_classes
    return config.num_classes or MAX_CLASSES


def _late(config: ImagesConfig, fields: Schema) -> Late:
    """How the images are made in the task that writes them, and how many of them may turn out broken there."""
    images = LateImages(fields["image"], config.intake, has_late_content(config.split_spec, fields))

    def check(origin: Origin) -> None:
        assert origin.quarantine is not None and origin.read is not None
        urls = [source.url for source in origin.sources]
        check_bad(config, origin.quarantine, urls, origin.quarantined, origin.read)

    return Late(images, check)


def _size(config: ImagesConfig) -> tuple[int, int]:
    assert config.image_size is not None, "files of any size are brought to one"
    return config.image_size


def _labelled(rows: DataFrame, plan: ImagePlan, names: Sequence[str]) -> DataFrame:
    """Rows whose class is a name get the place of that name as their label."""
    if plan.num_classes is not None:
        return rows
    from pyspark.sql import functions as f

    table = rows.sparkSession.createDataFrame(list(enumerate(names)), "label bigint, class string")
    return rows.drop("label").join(f.broadcast(table), "class")


def _counted(rows: DataFrame, parsed: DataFrame) -> DataFrame:
    """Without the occurrences where a name comes twice, as after an archive was added to: the writer then works them
    out in order of source and position, for which it moves the images. Names alone tell whether it must.
    """
    known = parsed.where(f"kind = {RECORD}").groupBy("name").count()
    return rows.drop(c.OCCURRENCE) if known.where("count > 1").limit(1).collect() else rows
