"""Petastorm's own tests of its readers, as they come with it, over what this project gives it.

Those of make_batch_reader over a dataset of scalars: others need OpenCV, PyTorch, an older pytest or Spark sessions of
their own. docs/decisions/066-petastorm.md tells how the others fare.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.petastorm import enable

enable()

# enable() comes before anything of Petastorm is imported
import petastorm.codecs  # noqa: E402

# Its common module declares a schema with images when it is imported; no test here writes or reads one.
petastorm.codecs.OPENCV_AVAILABLE = True

from petastorm.tests import test_common, test_parquet_reader  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HERE = {"scalar_dataset", "tmpdir", "reader_factory", "convert_early_to_numpy"}
OWN_TESTS = {
    name: test
    for name, test in vars(test_parquet_reader).items()
    if name.startswith("test_")
    and set(inspect.signature(test).parameters) <= HERE
    and "create_test" not in inspect.getsource(test)
}
for one in OWN_TESTS.values():
    for mark in getattr(one, "pytestmark", []):
        if test_parquet_reader._TP[1] in mark.args[1]:
            mark.args[1].remove(test_parquet_reader._TP[1])  # ten processes each time; tests of ours start two
globals().update(OWN_TESTS)


def test_there_are_tests() -> None:
    assert len(OWN_TESTS) == 15


@pytest.fixture(scope="module")
def scalar_dataset(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """100 rows of scalars, lists, strings and times in four files, which Petastorm's own function has Spark write."""
    path = tmp_path_factory.mktemp("scalar")
    data = test_common.create_test_scalar_dataset(f"file://{path}", 100, spark=spark)

    return SimpleNamespace(url=f"file://{path}", path=str(path), data=data)
