"""The first weights of a model that goes on from another training: weights alone, nothing of its optimizer or steps."""

from __future__ import annotations

import io
import tempfile
import zipfile
import zlib
from pathlib import Path

import keras

from lockstep.storage.errors import ConfigError, CorruptionError
from training.models.on_disk import plain_layers
from training.run.checkpoint import read_manifest
from training.run.read_parts import read_whole
from training.run.weights_source import weights_at
from training.steps import model_state

WEIGHTS_FILE = "model.weights.h5"  # as it is called in an archive of Keras', and as Keras wants its name to end
HDF5 = b"\x89HDF\r\n\x1a\n"


def load_initial(model: keras.Model, url: str) -> None:
    """Put the weights at `url` (training.run.weights_source) into a built model; all of them or none.

    No code that lies in a model's file is run: layers are the model's own. Raises ConfigError for weights of another
    model, CorruptionError for a file that cannot be read.
    """
    source = weights_at(url)
    if source.checkpoint is not None:
        manifest = read_manifest(source.checkpoint)
        tensors = read_whole(source.checkpoint, manifest, (model_state.WEIGHTS,))
        model_state.load(model, tensors, (model_state.WEIGHTS,), source.checkpoint)
        return
    assert source.file is not None
    before = model.get_weights()
    with tempfile.TemporaryDirectory() as folder, plain_layers(model):
        path = Path(folder, WEIGHTS_FILE)
        try:
            path.write_bytes(_weights_in(source.file))
            model.load_weights(path, objects_to_skip=[model.optimizer])
        # What is no archive or a damaged one. RuntimeError: HDF5's names are broken, an archive is of a later version.
        except (OSError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            model.set_weights(before)
            got = (str(error) or repr(error)).splitlines()[0]
            raise CorruptionError("a model's file cannot be read", file=url, got=got) from error
        except ValueError as error:
            model.set_weights(before)  # Keras may have loaded some of them
            raise ConfigError(
                f"the weights in {url} are another model's",
                got=" ".join(str(error).split())[:500],
                allowed="the weights of the model that --model builds, by layer, name and shape",
                next_step="Give the --model that those weights come from, or leave out --init-from.",
            ) from error


def _weights_in(data: bytes) -> bytes:
    """The HDF5 file in a .keras archive; what is HDF5 already is returned as it is."""
    if data.startswith(HDF5):
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(WEIGHTS_FILE)
