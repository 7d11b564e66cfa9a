"""What can be told of an output before anything is read: that its places are free, and what it continues is there."""

from __future__ import annotations

from etl.config import NOT_KEPT, WriteConfig
from storage.errors import ExistsError
from storage.fs import absolute, filesystem, parent
from storage.manifest import load_dataset
from storage.publish import occupied

__all__ = ["NOT_KEPT", "check_output", "refuse_existing"]


def refuse_existing(url: str) -> None:
    """Raise ExistsError where the output, or a file in place of a directory above it, is there already.

    Asked before Spark starts, so that nobody waits for what cannot be published.
    """
    fs, above = filesystem(url), parent(absolute(url))
    if fs.exists(url):
        raise occupied(url)
    while not fs.exists(above) and parent(above) != above:
        above = parent(above)
    if fs.exists(above) and not fs.stat(above).is_dir:
        raise ExistsError(
            f"{url} cannot be made: {above} is a file",
            got="a file",
            allowed="directories above the output",
            next_step="Correct --output.",
        )


def check_output(config: WriteConfig) -> None:
    """What can be told of an output before Spark starts: it and the place of rejected input are free, and what it
    continues is there. Raises ExistsError, NotFoundError and DataError.
    """
    refuse_existing(config.output)
    if config.quarantine not in (None, NOT_KEPT):
        refuse_existing(str(config.quarantine))
    if config.append_to is not None:
        load_dataset(config.append_to)
