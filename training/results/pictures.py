"""Raw picture files in, predictions out: an exported model, with the pixels that lockstep etl_images makes of a
picture.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lockstep.features.images.decode import FORMATS, ImageError
from lockstep.features.images.intake import IMAGE, Intake, is_left_out
from lockstep.storage.errors import ConfigError, DataError, NotFoundError, require
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.urls import absolute, join
from lockstep.training.results.predictor import BATCH, ExportedModel

if TYPE_CHECKING:
    import pandas as pd


Images = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_CHECKED = Intake(size=None, channels=3, keep=True)


def predict_raw(url: str, rows: Any, images: Images | None, batch: int) -> Any:
    """The outputs of a run's model for raw `rows`, or predict_pictures of `images`. Raises ConfigError for both."""
    if (rows is None) == (images is None):
        raise ConfigError(
            "nothing says what to predict" if rows is None else "rows and images exclude each other",
            got="neither rows nor images" if rows is None else "both",
            allowed="predict(run, rows) or predict(run, images=FOLDER)",
            next_step="Pass one of them.",
        )
    if images is None:
        return ExportedModel.at(url).predictor()(rows, batch)
    return predict_pictures(url, images, batch)


def predict_pictures(url: str, images: Images, batch: int = BATCH) -> pd.DataFrame:
    """Predictions of picture files with the newest model of a run, or with an exported model, in this process.

    `images` are files, and folders that are read with all below; files that lockstep etl_images leaves out by their
    names are left out. Returns a row for each picture, in the order of folders and names: `file`, its path as it was
    given or below the folder that was given, and the columns `prediction`, `class`, `class_name` of
    lockstep.training.results.predict, as far as the model has them. Raises ConfigError for a model whose input is not
    one picture, NotFoundError for missing files, DataError for one that is no picture.
    """
    require(isinstance(batch, int) and batch >= 1, "a batch", repr(batch), "a whole number of rows, 1 or more")
    model = ExportedModel.at(url)
    given = [images] if isinstance(images, str | os.PathLike) else images
    files = [file for one in given for file in _files(os.fspath(one))]
    require(bool(files), "images", "no file", "a picture or more, or a folder of them")
    intake = _intake(model)
    predict = model.predictor()
    from lockstep.training.results.predict_rank import Form, predicted_columns  # TensorFlow is set up now

    form = Form.of_export(predict.model, model)
    parts = []
    for start in range(0, len(files), batch):
        names = files[start : start + batch]
        taken = [_read(name, intake) for name in names]
        outputs = predict({model.columns[0].name: pa.array(taken, pa.binary())}, batch)
        parts.append(pa.table({"file": pa.array(names, pa.string()), **predicted_columns(outputs, form)}))
    return pa.concat_tables(parts).to_pandas()


def _intake(model: ExportedModel) -> Intake | None:
    """What makes the model's input of a picture; None if the model takes picture files themselves."""
    names = [field.name for field in model.columns]
    if len(names) == 1 and (model.columns[0].encoding or {}).get("kind") == "image":
        return None
    if names == [IMAGE] and model.pixels is not None:
        return model.pixels.intake
    raise ConfigError(
        f"the model {model.url} does not say how a picture becomes its input",
        got=f"inputs {', '.join(names)}" if names != [IMAGE] else "no pictures.json in the model",
        allowed="a model of one input, whose dataset lockstep etl_images made of pictures",
        next_step="Pass its inputs as rows; or export the run's model again (`lockstep export`), if an earlier "
        "version exported it.",
    )


def _files(given: str) -> Iterator[str]:
    """The pictures at a path: itself, or all below a folder. Raises NotFoundError."""
    url = absolute(given)
    fs = filesystem(url)
    if not fs.exists(url):
        raise NotFoundError("no picture there", got=given, allowed="a file or a folder", next_step="Correct the path.")
    if not fs.stat(url).is_dir:
        yield given
        return
    above, some = len(url.rstrip("/")) + 1, False
    for entry in walk(fs, url):
        place = entry.url[above:]
        if not is_left_out(place.split("/")):
            if entry.is_dir:
                raise DataError(
                    f"{entry.url} is a link to a folder",
                    got="a link",
                    allowed="folders, files, and links to files, as lockstep etl_images reads them",
                    next_step="Replace the link by the folder that it leads to, or pass that folder too.",
                )
            some = True
            yield join(given, place)
    if not some:
        raise NotFoundError("no picture in the folder", got=given, allowed="one or more", next_step="Correct the path.")


def _read(file: str, intake: Intake | None) -> bytes:
    """The pixels of a picture, or with None its bytes after a check that it decodes. Raises DataError."""
    url = absolute(file)
    data = filesystem(url).read_bytes(url)
    try:
        return _CHECKED.take(data) if intake is None else intake.take(data)
    except ImageError as error:
        raise DataError(
            f"{file} is not a picture", got=error.reason, allowed=FORMATS, next_step="Leave the file out, or mend it."
        ) from None
