"""What an error of Spark's says of the Python of its nodes: none there, or another one than the driver's."""

from __future__ import annotations

import re

from lockstep.storage.errors import ConfigError

_MISSING = re.compile(r'Cannot run program "[^"]*"[^\n]*')
_MISMATCH = "PYTHON_VERSION_MISMATCH"


def wrong_python(text: str) -> ConfigError | None:
    """The error of executors that cannot start a fitting Python, from the text of an error of Spark's; else None."""
    if _MISMATCH in text:
        found = re.findall(r"(?:worker|driver)[^0-9]{1,40}(\d+\.\d+)", text.partition(_MISMATCH)[2])
        return ConfigError(
            "the executors run another Python than the driver",
            got=" and ".join(found[:2]) or "another minor version",
            allowed="the same minor version on every node",
            next_step="Set PYSPARK_PYTHON (spark.pyspark.python) to the same minor version on every node.",
        )
    if match := _MISSING.search(text):
        return ConfigError(
            "the executors cannot start Python",
            got=match.group()[:300],
            allowed="a Python on every node",
            next_step="Set PYSPARK_PYTHON (spark.pyspark.python) to the nodes' Python, or give --archives FILE#python.",
        )
    return None
