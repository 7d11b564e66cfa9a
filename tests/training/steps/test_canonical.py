"""`--canonical`: the tree over units, its sums over ranks, and whole runs whose bits do not depend on their ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.comm.tree_sums import TreeSums
from lockstep.training.config import TrainConfig
from lockstep.training.plan.lane_count import allowed_ranks
from lockstep.training.steps.canonical import ADD, KEEP, NOTHING, carries
from tests.training._ring import run_ring
from tests.training._tiny import write_images, write_table

OWN = "tests.training._models"


def _tree(first: int, stop: int) -> str:
    """What the sum over units is to be, written out."""
    if stop - first == 1:
        return str(first)
    middle = first + (stop - first) // 2
    return f"({_tree(first, middle)}+{_tree(middle, stop)})"


def _carried(first: int, count: int) -> str:
    table = carries(count)
    waits: dict[int, str] = {}
    for unit in range(count):
        value = str(first + unit)
        for depth in reversed(range(len(table[unit]))):
            if table[unit][depth] == ADD:
                value = f"({waits.pop(depth)}+{value})"
            elif table[unit][depth] == KEEP:
                assert depth not in waits, "one place at each depth"
                waits[depth] = value
                assert all(step == NOTHING for step in table[unit][:depth])
                break
    (total,) = waits.values()
    return total


@given(st.integers(1, 200), st.integers(0, 6))
def test_ranks_own_subtrees(units: int, power: int) -> None:
    ranks = 1 << power
    if ranks not in allowed_ranks(units):
        return
    parts = [_carried(rank * units // ranks, units // ranks) for rank in range(ranks)]
    while len(parts) > 1:  # as TreeSums does
        parts = [f"({one}+{other})" for one, other in zip(parts[::2], parts[1::2], strict=True)]
    assert parts == [_tree(0, units)]


@pytest.mark.parametrize("size", [1, 1001, 40_000])  # whole buffers; parts; parts of parts
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_add_neighbours_first(ranks: int, size: int) -> None:
    rng = np.random.default_rng(size)
    mine = (rng.standard_normal((ranks, size)) * 10.0 ** rng.integers(-8, 8, (ranks, size))).astype(np.float32)
    right = list(mine)
    while len(right) > 1:
        right = [one + other for one, other in zip(right[::2], right[1::2], strict=True)]

    def work(comm: Communicator) -> bytes:
        tree, buf = TreeSums(comm), mine[comm.rank].copy()
        tree.all_reduce(buf)
        tree.all_reduce(np.zeros(1, np.uint8), "max")
        return buf.tobytes()

    assert run_ring(ranks, work) == [right[0].tobytes()] * ranks
    assert ranks == 2 or size == 1 or mine.sum(0).tobytes() != right[0].tobytes(), "another order is another sum"


def test_three_ranks_are_no_tree() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="binary tree"):
            TreeSums(comm)

    run_ring(3, work)


@pytest.mark.slow
class TestRuns:
    """Ranks are threads; each TensorFlow kernel has one."""

    @pytest.fixture
    def data(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("data")
        write_table(folder / "table", records={"train": 200, "test": 30})
        write_images(folder / "images", records={"train": 200, "test": 30})
        return {"table": str(folder / "table"), "images": str(folder / "images")}

    def train(self, dataset: str, url: Path, ranks: int, model: str, **more: Any) -> tuple[Any, dict[str, str]]:
        """The result, and sha256 of each tensor of weights, optimizer and callbacks."""
        from tests.training._threads import final_tensors, run

        options: dict[str, Any] = {"global_batch": 24, "epochs": 2, "checkpoint_every": 1000, "seed": 7} | more
        result = run(
            TrainConfig(
                datasets=(dataset,),
                run=str(url),
                num_ranks=ranks,
                model=model,
                launcher="local",
                canonical=True,
                **options,
            )
        )
        tensors = {name: value for name, value in final_tensors(str(url)).items() if not name.startswith("seeds")}
        return result, {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in tensors.items()}

    @pytest.mark.parametrize(
        ("ranks", "kind", "model", "options"),
        [
            (2, "table", f"{OWN}:with_callbacks", {}),  # dropout, Adam, AUC, callbacks that act on metrics
            (4, "images", f"{OWN}:clipped_with_averages", {}),  # ghost BatchNorm, the norm over all gradients, EMA
            # A loss scale; 12 lanes, each a unit whose rows BatchNormalization sees alone, and 1 / 12 is no float.
            pytest.param(
                2,
                "images",
                f"{OWN}:small_conv",
                {"batchnorm": "local", "lanes": 12, "precision": "mixed_float16"},
                marks=pytest.mark.soak,
            ),
        ],
    )
    def test_any_number_of_ranks_gives_the_same_bits(
        self, data: dict[str, str], tmp_path: Path, ranks: int, kind: str, model: str, options: dict[str, Any]
    ) -> None:
        """Run 1 is one rank's; 2 begins, where there are callbacks, with one and goes on with several."""
        alone, one = self.train(data[kind], tmp_path / "1", 1, model, **options)
        if kind == "table":
            self.train(data[kind], tmp_path / "2", 1, model, **options, epochs=1)
        several, many = self.train(data[kind], tmp_path / "2", ranks, model, **options)
        assert many == one
        assert several.metrics == alone.metrics
