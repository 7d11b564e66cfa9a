"""Predicts every row of a split with a run's model: the caller's side, and the entry of each rank."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count
from typing import Any

from lockstep.features.schema.fields import SAMPLE_ID
from lockstep.features.schema.schema import Schema
from lockstep.process.signals import ended_in_order
from lockstep.storage.dataset.manifest import DatasetManifest, load_dataset
from lockstep.storage.documents import seal
from lockstep.storage.errors import ConfigError, CorruptionError, LockstepError, NotFoundError, require
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.progress import Progress
from lockstep.storage.publish import MANIFEST_NAME, publish_directory, write_file
from lockstep.storage.urls import absolute, join, parent
from lockstep.training.control.context import RankContext
from lockstep.training.control.failures import LauncherGoneError, RankFailedError
from lockstep.training.control.protocol import Message, is_final
from lockstep.training.control.server import Handler
from lockstep.training.control.task import Limits
from lockstep.training.driver.ownership import staging_folder
from lockstep.training.launch.session import Launch, Launches
from lockstep.training.plan.datasets import rows_of
from lockstep.training.rank import runtime
from lockstep.training.results.evaluate import Scored, check_alike
from lockstep.training.results.export_run import check_output
from lockstep.training.results.model_inputs import model_encoder, other_pixels
from lockstep.training.results.stored_model import StoredModel, Which, task_of
from lockstep.training.run import notes
from lockstep.training.run.paths import RunPaths

ENTRY = "lockstep.training.results.predict:main"
FORMAT_VERSION = 1
PART_ROWS = 1 << 18  # of a file; a failed rank repeats at most one
MIN_PARTS = 32  # of a small split, so that each of a few ranks has some
OWN_COLUMNS = (SAMPLE_ID, "file", "label", "prediction", "class", "label_name", "class_name")
MAX_FAILURES = 3  # in a row without a new file


@dataclass(frozen=True, slots=True)
class Predicted:
    """Published predictions: their directory, the rows in it, and the models or checkpoints that made them."""

    output: str
    rows: int
    model: str
    left_out: dict[str, Any]
    """{samples, first}: of a run with --bad-images skip, rows without a prediction, and the names of the first 20."""


@dataclass(frozen=True)
class PredictRequest(Message):
    """What to predict, and where the predictions go. Raises ConfigError without rows or ranks."""

    runs: tuple[str, ...]
    """The runs whose models predict; of several, the mean of their models' probabilities, as evaluate computes it."""
    dataset: str
    split: str
    output: str
    """The directory of the predictions, which must not exist."""
    _: KW_ONLY
    num_ranks: int = 1
    batch: int = 512
    """Rows that a rank computes at a time."""
    checkpoint: Which | None = None
    """None: the newest model, else the weights of the last checkpoint."""
    columns: tuple[str, ...] = ()
    """Stored columns that travel into the predictions."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.num_ranks < 1:
            raise ConfigError(
                "predictions need rows and ranks",
                got=f"batch={self.batch}, num_ranks={self.num_ranks}",
                allowed="integers from 1 up",
                next_step="Correct --batch or --num-ranks.",
            )
        require(bool(self.runs), "--run", "no run", "one run, or several whose models are averaged")
        object.__setattr__(self, "runs", tuple(map(absolute, self.runs)))
        for name in ("dataset", "output"):
            object.__setattr__(self, name, absolute(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class PredictOrder(Message):
    """What ranks are asked to predict."""

    request: PredictRequest
    """Its `columns` are all that travel."""
    members: list[StoredModel]
    parts: int
    """The number of files."""
    directory: str
    """The URL of the folder for the files."""


@dataclass(frozen=True, kw_only=True)
class PartFile(Message):
    """A complete file of predictions."""

    name: str
    bytes: int
    sha256: str
    rows: int
    not_finite: int
    """Rows whose prediction has NaN or an infinity."""
    left_out: int
    """Rows without a prediction, whose image cannot be decoded."""
    first_left_out: list[str]
    """The names of the first of them."""


@dataclass(frozen=True, kw_only=True)
class RankPredictions(Message):
    """What a rank has written."""

    files: list[PartFile]


def _dataset_at(request: PredictRequest) -> DatasetManifest:
    """The manifest of the request's dataset. Raises NotFoundError, which also says what to do with a folder of pictures
    or a file of rows.
    """
    try:
        return load_dataset(request.dataset)
    except NotFoundError as error:
        run = request.runs[0]
        error.next_step = (
            f"Check the path. Pictures and rows without a dataset go to Python: lockstep.predict({run!r}, "
            f"images={request.dataset!r}), or lockstep.predict(run, rows). Or run the ETL job first."
        )
        raise


def predict(request: PredictRequest, launch: Launch) -> Predicted:
    """Write a prediction for every row of the request's split, as Parquet.

    Columns: `sample_id` int64; `file` of pictures that came from folders or archives; the dataset's id columns that
    are stored, and the stored `columns`; `label` if the dataset has one; `prediction`, a double, or a list of
    floats for a model with several numbers a row; and `class` int64, the index of the largest, if the label is a
    class. If classes have names, `label_name` and `class_name` have them. Of a run with --bad-images skip, rows
    whose image cannot be decoded have null there. Rows are in the order of the dataset; files and bytes do not
    depend on `num_ranks`. An exported model is fed as it was trained, with its own statistics, unless the dataset is
    baked. A failed rank is started again, and
    repeats the file that it was writing. Nothing appears at `output` before all files are complete. Prints a note
    if predictions are not finite. Raises ConfigError, NotFoundError and ExistsError, where possible before a rank
    is started.
    """
    split, output = request.split, request.output
    fs = filesystem(output)
    for run in request.runs:
        check_output(fs, RunPaths(run), output)
    manifest = _dataset_at(request)
    rows = rows_of(manifest, split)
    request = replace(request, columns=columns_to_carry(manifest, request.columns))
    members = [Scored.of(run, request.checkpoint, manifest).stored for run in request.runs]
    check_alike(members, manifest, split)
    model_encoder(members, manifest)
    notes.show(notes.of_pixels(other_pixels(members[0], manifest)))
    parts = min(-(-rows // request.batch), max(MIN_PARTS, -(-rows // PART_ROWS)))
    staging = staging_folder(fs, parent(output), "predict")
    order = PredictOrder(request=request, members=members, parts=parts, directory=staging)
    made_by = [one.url for one in members]
    try:
        with ended_in_order():  # so that the staging directory is removed on SIGTERM too
            fs.mkdirs(staging)
            with Progress("predicting", parts, "files") as progress:
                files = _run(order, launch, fs, progress)
            if (found := sum(file.rows for file in files)) != rows:
                raise CorruptionError("predictions of other rows", file=staging, got=f"{found}", allowed=f"{rows}")
            names = [name for file in files for name in file.first_left_out]
            left_out = {"samples": sum(file.left_out for file in files), "first": names[: notes.NAMED]}
            document = {
                "format_version": FORMAT_VERSION,
                "kind": "predictions",
                "dataset": request.dataset,
                "dataset_digest": manifest.digest,
                "split": split,
                "model": made_by[0] if len(made_by) == 1 else made_by,
                "batch": request.batch,
                "rows": rows,
                "left_out": left_out,
                "files": {file.name: {"bytes": file.bytes, "sha256": file.sha256} for file in files},
            }
            write_file(fs, join(staging, MANIFEST_NAME), seal(document))
            publish_directory(fs, staging, output)
    finally:
        fs.discard(staging)
    notes.show(notes.of_predictions(sum(file.not_finite for file in files), rows))
    notes.show(notes.of_left_out(left_out, split, "have no prediction"))
    return Predicted(output, rows, ", ".join(made_by), left_out)


def columns_to_carry(manifest: DatasetManifest, asked: Sequence[str]) -> tuple[str, ...]:
    """The stored columns that travel into predictions: the dataset's id columns, and those `asked` for.

    Raises ConfigError for a column that is not stored, or that has the name of a column of predictions.
    """
    schema = Schema.from_json(manifest.schema)
    stored = [field.name for field in schema if field.kind != "id"]
    usable = [name for name in stored if name not in OWN_COLUMNS]
    for name in asked:
        if name not in usable:
            raise ConfigError(
                f"the column `{name}` cannot be added to predictions",
                got="a column of predictions has this name" if name in OWN_COLUMNS else "no such column is stored",
                allowed=", ".join(usable),
                next_step="Correct --columns; a column must be in the dataset's schema, such as with encoding ignore.",
            )
    ids = manifest.created_by["config"].get("id_columns") or ()
    return tuple(dict.fromkeys([*(name for name in ids if name in usable), *asked]))


class _Shown(Handler):
    """Shows how many files there are."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress, self._lock = progress, threading.Lock()

    def answer(self, rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A rank's notice of a finished file."""
        if kind != "predicted":
            return super().answer(rank, kind, fields)
        with self._lock:  # each rank has a thread here
            self._progress.update()
        return {}


def _run(order: PredictOrder, launch: Launch, fs: FileSystem, progress: Progress) -> list[PartFile]:
    """Start ranks until all files are complete; returns them in order."""
    failures, task = 0, task_of(ENTRY, order, order.members)
    with Launches(launch, order.request.num_ranks, Limits()) as launches:
        for generation in count(1):
            before = len(list(walk(fs, order.directory, may_vanish=True)))
            progress.set(0)
            try:
                results = launches.run(task, generation, _Shown(progress))
                return [file for result in results for file in RankPredictions.from_json(result).files]
            except LockstepError as error:
                if is_final(error) or isinstance(error, LauncherGoneError):
                    raise
                written = len(list(walk(fs, order.directory, may_vanish=True)))
                failures = 1 if written > before else failures + 1
                if failures > MAX_FAILURES or (isinstance(error, RankFailedError) and error.alike):
                    raise
                print(f"starting the ranks again: {error}", file=sys.stderr, flush=True)
    raise AssertionError("count() has no end")


def main(context: RankContext) -> dict[str, Any]:
    """Write this rank's files; returns RankPredictions as JSON."""
    config = PredictOrder.from_json(context.payload).members[0].config
    runtime.configure(context.world, precision=config.step.precision, seed=config.data.seed)
    from lockstep.training.results.predict_rank import run  # here, since it imports TensorFlow, which is set up now

    return run(context)
