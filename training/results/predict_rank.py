"""One rank of a prediction: open the split, load the model, write this rank's files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.features.encode.encoder import Encoded
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import file_digest
from lockstep.storage.urls import join
from training.batches.augmenting import labels_of
from training.batches.feed import eval_batches, eval_rows
from training.config import TrainConfig
from training.control.context import RankContext
from training.control.protocol import OPENING
from training.models.on_disk import load_checkpoint, load_export, upload
from training.reading.background import ReadAhead
from training.results.predictor import prediction_column
from training.scoring.score_split import open_split

GROUP_BYTES = 8 << 20  # of a row group


def run(context: RankContext, config: TrainConfig) -> dict[str, Any]:
    """Write the files of this rank's consecutive share of `parts`, except those that an earlier generation has written.

    Each part has the same batches at any number of ranks. Returns {files: [{name, rows, not_finite, bytes, sha256}]}.
    """
    payload, world, beat = context.payload, context.world, context.control.beat
    directory, parts, batch = payload["directory"], payload["parts"], payload["batch"]
    beat(0, OPENING)
    split = open_split(payload["dataset"], payload["split"], config)
    label = split.encoder.schema.label
    yes_or_no = label is not None and label.dtype == "bool"
    beat(0, "load the model")
    if payload["model"] is not None:
        model = load_export(payload["model"], config, split.manifest)
    else:
        signature = labels_of(config, split.encoder.signature)
        model = load_checkpoint(payload["checkpoint"], config, split.manifest, signature)
    steps = 0

    def predicted(part: int) -> Iterator[pa.RecordBatch]:
        nonlocal steps
        batches = eval_batches(split.reader, split.encoder, part, parts, batch)
        with ReadAhead(batches, lambda: f"the rows of file {part}", config.stall_limit_s) as ahead:
            for rows in ahead:
                outputs = model.predict_on_batch(rows.x)
                steps += 1
                beat(steps, "predict")
                yield columns_of(rows, outputs, yes_or_no=yes_or_no, classes=split.encoder.signature.num_classes)

    fs, files = filesystem(directory), []
    for part in range(world.rank * parts // world.num_ranks, (world.rank + 1) * parts // world.num_ranks):
        name = f"part-{part:05d}.parquet"
        if fs.exists(join(directory, name)):
            size, digest = file_digest(fs, join(directory, name))
            file = {"name": name, "bytes": size, "sha256": digest}
            bad = not_finite(BytesIO(fs.read_bytes(join(directory, name))))
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, name)
                _write(path, predicted(part))
                bad = not_finite(path)
                # Not exclusive: a rank that its driver has lost may still write the same bytes.
                file = upload(path, directory, name, exclusive=False)
        start, stop = eval_rows(split.reader, part, parts, batch)
        files.append({**file, "rows": stop - start, "not_finite": bad})
        context.control.notify("predicted")
    return {"files": files}


def columns_of(rows: Encoded, outputs: Any, *, yes_or_no: bool, classes: int | None) -> pa.RecordBatch:
    """The columns of training.results.predict for one batch. `yes_or_no`: its label is stored as bool."""
    columns: dict[str, Any] = {"sample_id": rows.sample_id}
    if rows.y is not None:
        columns["label"] = rows.y.astype(np.bool_) if yes_or_no else rows.y
    several = np.ndim(outputs) == 2 and outputs.shape[1] > 1
    columns["prediction"] = prediction_column(outputs, several=several)
    if several and classes is not None:
        columns["class"] = outputs.argmax(axis=1)
    return pa.RecordBatch.from_pydict(columns)


def not_finite(file: Path | BytesIO) -> int:
    """The rows of a file of predictions that hold NaN or an infinity."""
    column = pq.read_table(file, columns=["prediction"]).column(0).combine_chunks()
    several = pa.types.is_list(column.type)
    values = np.asarray(column.flatten() if several else column).reshape(len(column), -1)
    return int((~np.isfinite(values)).any(axis=1).sum())


def _write(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches, one or more, as a Parquet file in row groups of about GROUP_BYTES."""
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
