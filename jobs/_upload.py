"""The output URL of lockstep upload for the chosen protocol, and a summary of what happened to the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lockstep.storage.errors import ConfigError
from lockstep.storage.settings import hadoop_settings
from lockstep.storage.upload import Outcome
from lockstep.storage.urls import OBJECT_SCHEMES, split_url


def target(output: str, via: str | None) -> str:
    """The output's URL for the chosen protocol. Raises ConfigError for another URL."""
    from lockstep.storage.files.webhdfs_http import as_hdfs, as_webhdfs

    scheme = split_url(output)[0]
    if scheme in ("swebhdfs", *OBJECT_SCHEMES) and via is None:
        return output
    if scheme not in ("hdfs", "webhdfs"):
        raise ConfigError(
            "--output is neither on HDFS nor in an object store",
            got=output,
            allowed="hdfs://HOST:PORT/PATH, webhdfs://HOST:HTTP_PORT/PATH, or the same with a name service;"
            " swebhdfs://..., s3://..., gs://... or az://... without --via",
            next_step="Correct --output; is a variable in it, such as $HDFS, set?",
        )
    convert = {"webhdfs": as_webhdfs, "hdfs": as_hdfs}[via or scheme]
    return convert(output, hadoop_settings())


def line(outcome: Outcome) -> str:
    """The result for one file."""
    return f"{outcome.done:8} {outcome.item.url}: {outcome.item.size_bytes} bytes, equal by {outcome.compared_by}"


def summary(outcomes: Sequence[Outcome], output: str) -> str:
    """What was done, in a line."""
    counts = Counter(outcome.done for outcome in outcomes)
    sent = sum(outcome.item.size_bytes for outcome in outcomes if outcome.done != "there")
    files = f"{counts['sent']} sent, {counts['replaced']} replaced ({sent} bytes), {counts['there']} already there"
    return f"{output}: {files}"
