"""From image sets of any source to a dataset of pixels, or encoded images, and labels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from etl import columns as c
from etl.images import cifar, folders, idx_images, parquet, planned, tar
from etl.images.config import MAX_CLASSES, ImagesConfig
from etl.images.digest_trees import digest_trees
from etl.images.image_rows import BAD, ID_COLUMNS, OUTPUT_DDL, RECORD
from etl.images.image_tally import class_names, tally_of
from etl.images.parse_images import ParseImages, to_json
from etl.images.pieces import ImagePlan, step_bytes
from etl.images.planned_rows import NotPlannable
from etl.input.files import digest_sources
from etl.spark.errors import translated
from etl.spark.session import described, tuned
from etl.spark.tasks import sliced
from etl.spark.watch import watched
from etl.write.beside import Origin
from etl.write.late import LateImages
from etl.write.output import check_columns, check_output, check_schema
from etl.write.quality import check_bad
from etl.write.shards import RUN_AGAIN
from etl.write.write import write_dataset
from etl.write.write_late import Late, has_late_content
from lockstep.features.schema.fields import SAMPLE_ID, Field, sample_id_field
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.errors import DataError
from lockstep.storage.settings import hadoop_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
        return idx_images.plan(config.inputs, given=given, num_classes=classes, split_bytes=step)
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
        parse = ParseImages(hadoop_settings(), intake, plan.num_classes)
        parsed = sliced(spark, pieces, plan.piece_bytes(), step).mapInArrow(parse, OUTPUT_DDL).persist()
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
