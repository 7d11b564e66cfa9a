"""The image job: image sets of any source become a dataset of pixels, or encoded images, and labels.

Decision record: docs/decisions/064-image-sources.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lockstep.etl import columns as c
from lockstep.etl.images import cifar, folders, idx, npz, parquet, planned, tar
from lockstep.etl.images.cifar import CifarPiece
from lockstep.etl.images.config import MAX_CLASSES, ImagesConfig
from lockstep.etl.images.depth import log_dark
from lockstep.etl.images.folders import FolderPiece, digest_trees
from lockstep.etl.images.idx import IdxPiece
from lockstep.etl.images.layout import ClassFolder, log_names, refuse_layout
from lockstep.etl.images.npz import ArrayPiece
from lockstep.etl.images.parquet import ParquetPiece
from lockstep.etl.images.planned import NotPlannable
from lockstep.etl.images.source import BAD, DROPPED, ID_COLUMNS, OUTPUT, RECORD, ImagePlan, Piece, composed, step_bytes
from lockstep.etl.images.tar import TarPiece
from lockstep.etl.input.files import Source, digest_sources, parts_below, path_below
from lockstep.etl.reasons import NO_CLASS
from lockstep.etl.spark.session import job_description
from lockstep.etl.spark.tasks import Items, over_slices
from lockstep.etl.split.splits import TRAIN
from lockstep.etl.write.append import Parent
from lockstep.etl.write.checks import Target, check_output, check_target
from lockstep.etl.write.job import Counts, Input, Labelled
from lockstep.etl.write.job import run as run_job
from lockstep.etl.write.late import LateImages, has_late_content
from lockstep.etl.write.refusal import CLASS_FOLDERS
from lockstep.etl.write.shards import RUN_AGAIN
from lockstep.etl.write.sources import check_contents, check_paths
from lockstep.features.images.intake import Intake
from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.features.schema.schema import Schema
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OTHER_GROUPS = 32  # reasons for which files are rejected, and rules by which they are left out
_KINDS: dict[str, type[Piece]] = {
    kind.__name__: kind for kind in (IdxPiece, CifarPiece, ArrayPiece, FolderPiece, TarPiece, ParquetPiece)
}


@dataclass(frozen=True, kw_only=True)
class Tally(Counts):
    """The counts, the names of the images' classes and where they are, and the number of images without a split; of
    the rejected files, the number of those that are in no class folder.
    """

    classes: tuple[str, ...]
    without_split: int
    folders: tuple[ClassFolder, ...] = ()
    without_class: int = 0

    @property
    def judged(self) -> int:
        """The number of pictures: other files, which are left out by their names, are none of them."""
        return self.read - sum(self.dropped.values())


def tally_of(parsed: DataFrame, most_classes: int = MAX_CLASSES) -> Tally:
    """Count the rows of lockstep.etl.images.source in one pass. Raises DataError for more than `most_classes` classes,
    such as texts that differ for every image.
    """
    from pyspark.sql import functions as f

    by = ("kind", "class", f.col(c.REASON).alias("reason"))
    sums = (
        f.count(f.lit(1)).alias("n"),
        f.sum(f.octet_length(c.RAW)).alias("raw"),
        f.count(f.when(f.col(c.SPLIT).isNull(), 1)).alias("unsplit"),
        f.count(f.when(f.col(c.SPLIT) == TRAIN, 1)).alias("in_train"),
        f.min("name").alias("first"),
        f.min(f.when(f.coalesce(f.col(c.SPLIT) != TRAIN, f.lit(True)), f.col("name"))).alias("first_elsewhere"),
    )
    most = most_classes + _OTHER_GROUPS
    found = parsed.groupBy(*by).agg(*sums).limit(most + 1).collect()
    if len(found) > most:
        raise _wrong_number(f"more than {most_classes}", [row["class"] for row in found], f"{most_classes} at most")
    good = sorted((row for row in found if row["kind"] == RECORD), key=lambda row: row["class"] or "")
    bad = [row for row in found if row["kind"] == BAD]
    return Tally(
        read=sum(row["n"] for row in found),
        bad=sum(row["n"] for row in bad),
        raw_bytes=sum(row["raw"] or 0 for row in bad),
        dropped={row["reason"]: row["n"] for row in found if row["kind"] == DROPPED},
        classes=tuple(row["class"] for row in good if row["class"] is not None),
        without_split=sum(row["unsplit"] for row in good),
        without_class=sum(row["n"] for row in bad if row["reason"] == NO_CLASS),
        folders=tuple(
            ClassFolder(
                label=row["class"],
                in_train=row["in_train"],
                elsewhere=row["n"] - row["in_train"],
                first=row["first"],
                first_elsewhere=row["first_elsewhere"],
            )
            for row in good
            if row["class"] is not None
        ),
    )


def class_names(config: ImagesConfig, plan: ImagePlan, tally: Tally, parent: Parent | None) -> Sequence[str]:
    """The names of the labels in order, () if they are not known: of the configuration, of the dataset that is
    continued, or sorted.

    Raises DataError if they cannot be labels.
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
    if config.classes is not None:
        return _among("images have classes that --classes does not name", config.classes, tally.classes)
    most = config.num_classes or MAX_CLASSES
    least = 2 if parent is None else 1
    if not least <= len(tally.classes) <= most:
        raise _wrong_number(str(len(tally.classes)), tally.classes, f"{least} to {most}")
    if parent is not None:
        return _continued(parent, tally.classes)
    if config.source in ("folder", "tar"):
        refuse_layout(tally.folders)
    log_names(tally.classes)
    return tally.classes


def _wrong_number(found: str, classes: Sequence[str | None], allowed: str) -> DataError:
    return DataError(
        f"{found} classes were found",
        got=", ".join(sorted(name for name in classes if name is not None)[:5])[:500] or "no image",
        allowed=allowed,
        next_step="Put the images of each class into a folder of its name; correct --num-classes.",
    )


def _continued(parent: Parent, found: Sequence[str]) -> Sequence[str]:
    """The names of the parent's labels, which the new ones must be. Raises DataError for another name."""
    known = parent.manifest.created_by["config"].get("class_names")
    what = f"{parent.url} cannot be continued: it does not have all classes"
    names = list(map(composed, known)) if isinstance(known, list) else []
    return _among(what, names if len(set(names)) == len(names) else [], found)


def _among(what: str, names: Sequence[str], found: Sequence[str]) -> Sequence[str]:
    if others := [name for name in found if name not in set(names)]:
        raise DataError(
            what,
            got=", ".join(others[:5]),
            allowed=", ".join(names[:20]) or "a dataset whose classes have names",
            next_step="Name all classes that may ever come by --classes, in a dataset without --append-to.",
        )
    return names


def to_json(piece: Piece) -> dict[str, Any]:
    """A piece as plain values."""
    # each Piece is a dataclass, which the type cannot express
    return {"kind": type(piece).__name__, **asdict(piece)}  # type: ignore[call-overload]


def from_json(found: Mapping[str, Any]) -> Piece:
    """The piece from the values of to_json."""
    values = dict(found)
    return _KINDS[values.pop("kind")](**values)


@dataclass(frozen=True)
class ParseImages:
    """Reads the pieces of a task: pieces as JSON in, rows of lockstep.etl.images.source.OUTPUT out. Raises what they
    raise.
    """

    intake: Intake
    num_classes: int | None

    def __call__(self, items: Items) -> Iterator[pa.RecordBatch]:
        for item in items:
            yield from from_json(item).read(self.intake, self.num_classes)


log = logging.getLogger(__name__)


def check(config: ImagesConfig) -> ImageInput:
    """Check before Spark starts that the output is free, that the files have the names, headers and lengths expected,
    and that split, sample, weights and the dataset that is continued go with the images' fields.
    """
    parent = check_output(config)
    plan = plan_of(config)
    check_paths(plan.named, parent)
    _prefixes(config, plan)
    if config.source in ("folder", "tar"):  # reading a row group of Parquet would take longer
        log_dark(plan.pieces, config.intake)
    return ImageInput(config, plan, _target(config, plan, plan.num_classes or _known_classes(config, parent), parent))


def _target(config: ImagesConfig, plan: ImagePlan, num_classes: int, parent: Parent | None) -> Target:
    fields = config.fields(plan.shape, num_classes)
    kinds = {field.name: c.ddl_type(field) for field in fields if field.name != SAMPLE_ID}
    return check_target(config, fields, kinds, parent)


def _known_classes(config: ImagesConfig, parent: Parent | None) -> int:
    """The number of classes where they have names, before these are known: the parent's, or the most."""
    label = None if parent is None else Schema.from_json(parent.manifest.schema).label
    if label is not None and label.num_classes is not None:
        return label.num_classes
    return config.num_classes or MAX_CLASSES


def plan_of(config: ImagesConfig) -> ImagePlan:
    """Find the input: archives, files or folders, and the pieces in which tasks read them."""
    given, step, root = config.split_spec.given, config.split_bytes, config.input_root
    if config.source == "folder":
        return _labelled(folders.plan(config.inputs, split_bytes=step, classes=config.classes), config)
    if config.source == "tar":
        listed = config.intake.limits if config.may_be_planned else None
        found = tar.plan(config.inputs, split_bytes=step, listed=listed, classes=config.classes)
        return _labelled(found, config)
    classes = config.label_count
    if config.source == "parquet":
        image, label = config.image_column, config.label_column
        return parquet.plan(config.inputs, image=image, label=label, given=given, num_classes=classes, root=root)
    assert classes is not None
    if config.source == "idx":
        return idx.plan(config.inputs, given=given, num_classes=classes, split_bytes=step, root=root)
    if config.source == "npz":
        names = tuple(zip(config.image_arrays, config.label_arrays, strict=True))
        return npz.plan(config.inputs, names=names, given=given, num_classes=classes, split_bytes=step, root=root)
    kind = config.source
    return cifar.plan(config.inputs, kind, given=given, num_classes=classes, split_bytes=step, root=root)


def _labelled(plan: ImagePlan, config: ImagesConfig) -> ImagePlan:
    """The plan, or with --unlabelled the one by whose pieces no folder is a class."""
    if not config.unlabelled:
        return plan
    pieces = [replace(piece, unlabelled=True) for piece in plan.pieces if isinstance(piece, FolderPiece | TarPiece)]
    return replace(plan, pieces=pieces)


def run(spark: SparkSession, config: ImagesConfig, images: ImageInput | None = None) -> DatasetManifest:
    """Read, decode, fit, split and publish; `images` is what `check` returned, if it was called.

    Raises the errors of check, and DataError for files that do not hold what they should.
    """
    return run_job(spark, images or check(config))


@dataclass(frozen=True)
class ImageInput(Input[Tally]):
    """An image set and the dataset that it becomes. The number of classes in `target` is only an upper bound if classes
    are names, which are known after reading.
    """

    what, label, is_rejected = "images", "images", f"kind = {BAD}"
    first_step = "read and decode the images"
    config: ImagesConfig
    plan: ImagePlan
    target: Target

    @property
    def sources(self) -> Sequence[Source]:
        """The files, archives or folders."""
        return self.plan.sources

    def write(self, spark: SparkSession) -> DatasetManifest:
        """Plan each shard on the driver if names and headers are enough for it; else pass all rows through Spark."""
        if self.plan.files is not None:
            try:
                return planned.run(spark, self.config, self.plan)
            except NotPlannable as why:
                log.debug("the shards are not planned ahead: %s", why)
        return super().write(spark)

    def parsed(self, spark: SparkSession) -> DataFrame:
        """The rows of lockstep.etl.images.source.OUTPUT."""
        pieces = [to_json(piece) for piece in self.plan.pieces]
        parse = ParseImages(self.config.intake, self.plan.num_classes)
        step = step_bytes(self.config.split_bytes)
        return over_slices(spark, pieces, self.plan.piece_bytes(), step, parse, OUTPUT)

    def counted(self, parsed: DataFrame) -> Tally:
        """Count the parsed rows in one pass."""
        with job_description(parsed.sparkSession, self.first_step):
            tally = tally_of(parsed, self.config.num_classes or MAX_CLASSES)
        # Some headers name the number of records, and each task checks its own: this compares the totals.
        if self.plan.records not in (None, tally.read):
            raise DataError(
                "the number of records read is not that of the files' headers",
                got=str(tally.read),
                allowed=str(self.plan.records),
                next_step=RUN_AGAIN,
            )
        return tally

    def labelled(self, parsed: DataFrame, counts: Tally) -> Labelled:
        """Classes that are names become numbers in the order of the names. Raises DataError for a file, archive or
        folder that is there twice.
        """
        config, plan, spark = self.config, self.plan, parsed.sparkSession
        names = () if config.unlabelled else class_names(config, plan, counts, self.target.parent)
        if counts.without_class:
            log.warning("%d files are in no class folder: %s", counts.without_class, CLASS_FOLDERS)
        classes, target = plan.num_classes or len(names), self.target
        label = target.rows.label
        if label is not None and classes != label.num_classes:
            target = _target(config, plan, classes, target.parent)
        images = _below_root(parsed.where(f"kind = {RECORD}"), _prefixes(config, plan))
        rows = images if label is None else _with_labels(images, plan, names)
        trees, named = plan.trees, bool(plan.named)
        sources = digest_trees(parsed, plan.sources) if trees else digest_sources(spark, plan.sources, paths=named)
        holding = sorted({piece.source for piece in plan.pieces})  # not files of labels, which may be equal
        check_contents([sources[number] for number in holding], {}, target.parent)
        late = None
        if config.late:
            by_content = has_late_content(config.split_spec, target.rows)
            late = LateImages(target.rows["image"], config.intake, by_content)
        return Labelled(
            rows=_with_occurrences(rows, images, plan.sources) if plan.names_may_repeat else rows,
            target=target,
            id_columns=ID_COLUMNS,
            sources=sources,
            created_config=config.with_classes(names),
            late=late,
            files=config.source in ("folder", "tar"),
        )


def _with_labels(rows: DataFrame, plan: ImagePlan, names: Sequence[str]) -> DataFrame:
    """Rows whose class is a name get the number of that name as label."""
    if plan.num_classes is not None:
        return rows
    from pyspark.sql import functions as f

    table = rows.sparkSession.createDataFrame(list(enumerate(names)), "label bigint, class string")
    return rows.drop("label").join(f.broadcast(table), "class")


def _prefixes(config: ImagesConfig, plan: ImagePlan) -> list[str]:
    """The path of each folder or archive below --input-root, which the names of its images then begin with; [] without
    that flag, or if the plan has put it into the names. Raises ConfigError for an input that is elsewhere.
    """
    root = config.input_root
    if root is None or plan.named:
        return []
    return ["/".join(parts_below(one.url, root)) if plan.trees else path_below(one.url, root) for one in plan.sources]


def _below_root(images: DataFrame, prefixes: Sequence[str]) -> DataFrame:
    if not prefixes:
        return images
    from pyspark.sql import functions as f

    known = f.array(*(f.lit(f"{prefix}/" if prefix else "") for prefix in prefixes))
    return images.withColumn("name", f.concat(f.get(known, f.col(c.SOURCE)), f.col("name")))


def _with_occurrences(rows: DataFrame, images: DataFrame, sources: Sequence[Source]) -> DataFrame:
    """Return the rows, without the column of occurrences if a name comes twice in one input, as two spellings of it do:
    the writer then computes them in order of source and position, for which it shuffles the images. Names are enough to
    decide it.

    Raises DataError for a name in two inputs: a number for it would depend on which inputs there are.
    """
    from pyspark.sql import functions as f

    ends = (f.min(c.SOURCE).alias("first"), f.max(c.SOURCE).alias("last"), f.count(f.lit(1)).alias("count"))
    repeated = images.groupBy("name").agg(*ends).where("count > 1")
    found = repeated.orderBy(f.expr("first = last"), "name").limit(1).collect()
    if found and found[0]["first"] < found[0]["last"]:
        one, two = (sources[found[0][end]].url for end in ("first", "last"))
        raise DataError(
            f"{one} and {two} hold images of one path, which would have the same id",
            got=found[0]["name"][:500],
            allowed="a path of its own for each image, below its folder or archive",
            next_step="Give --input-root a folder above both: ids then begin with the path of each. Or rename them.",
        )
    return rows.drop(c.OCCURRENCE) if found else rows
