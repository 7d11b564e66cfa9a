"""One rank of a prediction: open the split, load the model, write this rank's files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lockstep.features.encode.encoder import Encoded, Encoder
from lockstep.features.schema.schema import class_names_of
from lockstep.storage.dataset.layout import FILES_FOLDER, files_of_shard
from lockstep.storage.dataset.manifest import DatasetManifest, has_files, load_dataset, read_checked
from lockstep.storage.errors import CorruptionError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import file_digest
from lockstep.storage.urls import join
from lockstep.training.batches.feed import eval_batches, eval_rows
from lockstep.training.control.context import RankContext
from lockstep.training.control.protocol import OPENING
from lockstep.training.models.on_disk import load_model, upload
from lockstep.training.plan.datasets import split_of, task_of
from lockstep.training.reading.background import ReadAhead
from lockstep.training.reading.open import OpenSplit
from lockstep.training.results.model_inputs import model_encoder
from lockstep.training.results.predict import PartFile, PredictOrder, RankPredictions
from lockstep.training.results.predictor import ExportedModel, prediction_column
from lockstep.training.results.stored_model import StoredModel
from lockstep.training.run.notes import NAMED
from lockstep.training.scoring.ensemble import ensemble_of
from lockstep.training.scoring.score_split import takes_logits

GROUP_BYTES = 8 << 20  # of a row group
BAD_IMAGES = b"lockstep.bad_images"  # key in a file's footer
_FILES = pa.schema([("sample_id", pa.int64()), ("file", pa.string())])


def run(context: RankContext) -> dict[str, Any]:
    """Write the files of this rank's consecutive share of `parts`, except those that an earlier generation has written.

    Each part has the same batches at any number of ranks. Returns RankPredictions as JSON.
    """
    order = PredictOrder.from_json(context.payload)
    request, config, directory, parts = order.request, order.members[0].config, order.directory, order.parts
    world, beat, batch = context.world, context.control.beat, request.batch
    beat(0, OPENING)
    inputs = model_encoder(order.members, load_dataset(request.dataset))
    split = OpenSplit.at(
        request.dataset, request.split, as_trained_on=config.data.split, also=request.columns, encoder=inputs
    )
    split = split.of_task(task_of(config, request.dataset))
    beat(0, "load the model")
    model = _mean_of(order.members, split, encoded=inputs is not None)
    form = _form_of(model, split, order.members[0])
    steps, encoder = 0, split.encoder
    if config.skips_bad_images and encoder.can_skip_images:
        encoder = encoder.skipping_bad_images()
    encoder = Carrying(encoder, request.columns)
    files_of = None
    if has_files(split.manifest):
        files_of = FilesOf(request.dataset, split.manifest, request.split)

    def predicted(part: int, bad: list[str]) -> Iterator[pa.RecordBatch]:
        nonlocal steps
        at, _ = eval_rows(split.reader, part, parts, batch)
        batches = eval_batches(split.reader, encoder, part, parts, batch)
        with ReadAhead(batches, lambda: f"the rows of file {part}", config.limits.stall_limit_s) as ahead:
            for rows in ahead:
                outputs = model.predict_on_batch(rows.x)
                steps += 1
                beat(steps, "predict")
                bad += [f"{image.what} ({image.detail})" for image in rows.bad]
                named = None if files_of is None else files_of.rows(at, rows.sample_id).combine_chunks()
                at += len(rows.sample_id)
                yield columns_of(rows, outputs, form, named)

    fs, files = filesystem(directory), list[PartFile]()
    for part in range(world.rank * parts // world.num_ranks, (world.rank + 1) * parts // world.num_ranks):
        name = f"part-{part:05d}.parquet"
        if fs.exists(join(directory, name)):
            size, digest = file_digest(fs, join(directory, name))
            file: dict[str, Any] = {"name": name, "bytes": size, "sha256": digest}
            found = doubts_in(BytesIO(fs.read_bytes(join(directory, name))))
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, name)
                bad: list[str] = []
                _write(path, predicted(part, bad), bad)
                found = doubts_in(path)
                # Not exclusive: a rank that its driver has lost may still write the same bytes.
                file = upload(path, directory, name, exclusive=False)
        start, stop = eval_rows(split.reader, part, parts, batch)
        files.append(PartFile(**file, rows=stop - start, **found))
        context.control.notify("predicted")
    return RankPredictions(files=files).to_json()


def _mean_of(members: Sequence[StoredModel], split: OpenSplit, *, encoded: bool) -> keras.Model:
    """The model of the one of `members`, or the mean of several; with `encoded`, the rows are encoded as these were
    trained, else the dataset must have the encoder of their training data.
    """
    signature = split.encoder.signature
    models = [
        load_model(str(member.model), member.config.model.model)
        if encoded
        else member.load(split.manifest, signature, may_lack_label=True)
        for member in members
    ]
    return models[0] if len(models) == 1 else ensemble_of(models, list(map(takes_logits, models)), signature)


def _form_of(model: keras.Model, split: OpenSplit, member: StoredModel) -> Form:
    """The form of the outputs, by the label of the split or, without one, by what the model's export says of it."""
    if split.encoder.schema.label is None and member.model is not None:
        return Form.of_export(model, ExportedModel.at(member.model))
    return Form.of(model, split)


@dataclass(frozen=True, slots=True)
class Form:
    """How outputs become columns: whether the label is stored as bool, its number of classes and their names, and
    whether the outputs are log-odds or logarithms.
    """

    yes_or_no: bool
    classes: int | None
    names: tuple[str, ...] | None = None
    logits: bool = False

    @classmethod
    def of(cls, model: keras.Model, split: OpenSplit) -> Self:
        """The form of the outputs of `model` for the rows of `split`."""
        label, classes = split.encoder.schema.label, split.encoder.signature.num_classes
        yes_or_no = label is not None and label.dtype == "bool"
        return cls(yes_or_no, classes, class_names_of(split.manifest), takes_logits(model))

    @classmethod
    def of_export(cls, model: keras.Model, exported: ExportedModel) -> Self:
        """The form of the outputs of an exported `model`, loaded."""
        signature = exported.signature
        classes, label = signature.num_classes, signature.label
        yes_or_no = label is not None and classes is None and not signature.label_is_number
        return cls(yes_or_no, classes, signature.class_names, takes_logits(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried(Encoded):
    """Encoded rows with the stored columns that travel into their predictions."""

    stored: pa.RecordBatch


class Carrying(Encoder):
    """An encoder whose rows are Carried."""

    def __init__(self, inner: Encoder, columns: Sequence[str]) -> None:
        self._inner, self._stored = inner, list(columns)

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        rows = self._inner.encode(batch)
        return Carried(rows.x, rows.y, rows.sample_id, rows.weight, rows.bad, stored=batch.select(self._stored))


def predicted_columns(outputs: Any, form: Form) -> dict[str, pa.Array]:
    """What a model says of each row: `prediction`, `class`, `class_name`, those that its outputs have."""
    several = np.ndim(outputs) == 2 and outputs.shape[1] > 1
    columns = {"prediction": prediction_column(outputs, several=several)}
    if several and form.classes is not None:
        columns["class"] = pa.array(outputs.argmax(axis=1))
    names = form.names
    if names is not None and several and outputs.shape[1] == len(names):
        columns["class_name"] = _named(outputs.argmax(axis=1), names)
    elif names is not None and not several and form.yes_or_no:
        columns["class_name"] = _named((outputs.reshape(-1) > (0.0 if form.logits else 0.5)).astype(np.int64), names)
    return columns


class FilesOf:
    """The files that the records of a split were, in their order, read from the dataset shard by shard."""

    def __init__(self, url: str, manifest: DatasetManifest, split: str) -> None:
        self._url, self._manifest, self._shards = url, manifest, split_of(manifest, split).shards
        ends = np.cumsum([0, *(shard.records for shard in self._shards)])
        self._ends, self._read = ends, (-1, pa.table({}))

    def rows(self, start: int, ids: NDArray[np.int64]) -> pa.ChunkedArray:
        """The files of the rows from `start` on. Raises CorruptionError if they are not of the samples `ids`."""
        parts, at = [], start
        while at < start + len(ids):
            number = int(np.searchsorted(self._ends, at, side="right")) - 1
            first, last = int(self._ends[number]), min(int(self._ends[number + 1]), start + len(ids))
            parts.append(self._shard(number).slice(at - first, last - at))
            at = last
        found = pa.concat_tables(parts)
        if not np.array_equal(found.column("sample_id"), ids):
            raise CorruptionError(
                "the names of files are not those of the samples",
                file=f"{self._url}/{FILES_FOLDER}",
                got="other sample ids",
                allowed="a row for each record, in the order of its shard",
            )
        return found.column("file")

    def of_samples(self, ids: Collection[int]) -> dict[int, str]:
        """The files of those of the samples `ids` that the split has."""
        found: dict[int, str] = {}
        for number in range(len(self._shards)):
            table = self._shard(number)
            mine = table.filter(pc.is_in(table.column("sample_id"), pa.array(ids, pa.int64())))
            found |= zip(*mine.to_pydict().values(), strict=True)
        return found

    def _shard(self, number: int) -> pa.Table:
        if self._read[0] != number:
            path = files_of_shard(self._shards[number].path)
            data = read_checked(filesystem(self._url), self._url, path, self._manifest.files[path])
            try:
                table = pq.read_table(pa.BufferReader(data), columns=_FILES.names).cast(_FILES)
            except (pa.ArrowException, OSError, ValueError, KeyError) as error:
                got = (str(error).strip() or repr(error)).splitlines()[0]
                raise CorruptionError("names of files cannot be read", file=f"{self._url}/{path}", got=got) from None
            self._read = number, table
        return self._read[1]


def columns_of(rows: Encoded, outputs: Any, form: Form, files: pa.ChunkedArray | None = None) -> pa.RecordBatch:
    """The columns of lockstep.training.results.predict for one batch. Rows of bad images have no prediction and no
    class.
    """
    columns: dict[str, Any] = {"sample_id": rows.sample_id}
    if files is not None:
        columns["file"] = files
    if isinstance(rows, Carried):
        columns |= {name: rows.stored.column(name) for name in rows.stored.schema.names}
    if rows.y is not None:
        columns["label"] = rows.y.astype(np.bool_) if form.yes_or_no else rows.y
    found = predicted_columns(outputs, form)
    class_name = found.pop("class_name", None)
    columns |= found
    if form.names is not None and rows.y is not None:
        columns["label_name"] = _named(rows.y.astype(np.int64), form.names)
    if class_name is not None:
        columns["class_name"] = class_name
    if rows.bad:
        good = np.ones(len(outputs), bool)
        good[[image.row for image in rows.bad]] = False
        for name in columns.keys() & {"prediction", "class", "class_name"}:
            columns[name] = pc.if_else(pa.array(good), columns[name], pa.scalar(None, columns[name].type))
    return pa.RecordBatch.from_pydict(columns)


def _named(numbers: NDArray[np.int64], names: Sequence[str]) -> pa.Array:
    return pa.array(names, pa.string()).take(pa.array(numbers))


def doubts_in(file: Path | BytesIO) -> dict[str, Any]:
    """Return {not_finite, left_out, first_left_out} of a file of predictions, as PartFile has them."""
    parquet = pq.ParquetFile(file)
    first = json.loads((parquet.metadata.metadata or {}).get(BAD_IMAGES, b"[]"))
    column = parquet.read(columns=["prediction"]).column(0).combine_chunks()
    present = column.drop_null()
    numbers = np.asarray(present.flatten() if pa.types.is_list(column.type) else present)
    a_row = max(1, numbers.size // max(1, len(present)))
    return {
        "not_finite": int((~np.isfinite(numbers.reshape(-1, a_row))).any(axis=1).sum()),
        "left_out": column.null_count,
        "first_left_out": first,
    }


def _write(path: Path, batches: Iterable[pa.RecordBatch], bad: Sequence[str]) -> None:
    """Write batches, one or more, as a Parquet file in row groups of about GROUP_BYTES. Its footer has the names in
    `bad`, which the batches fill, for a generation that finds the file.
    """
    more = iter(batches)
    first = next(more)
    with pq.ParquetWriter(path, first.schema, compression="zstd", write_page_checksum=True) as file:
        group: list[pa.RecordBatch] = []
        for batch in chain([first], more):
            group.append(batch)
            if sum(each.nbytes for each in group) >= GROUP_BYTES:
                file.write_table(pa.Table.from_batches(group))
                group = []
        if group:
            file.write_table(pa.Table.from_batches(group))
        if bad:
            file.add_key_value_metadata({BAD_IMAGES: json.dumps(bad[:NAMED]).encode()})
