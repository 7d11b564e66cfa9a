"""The dataset that most tests of strategies train on, and what a start has restored."""

from __future__ import annotations

import pytest

from tests.training._tiny import write_table


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """200 rows to train on, and 30 to test."""
    folder = tmp_path_factory.mktemp("data") / "table"
    write_table(folder, records={"train": 200, "test": 30})
    return str(folder)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tensors of each start that has restored a checkpoint: all were equal to the files', bit for bit."""
    from lockstep.training.rank.saver import Found, Progress, Saver
    from lockstep.training.run.checkpoint_division import read_whole
    from lockstep.training.steps.model_state import OPTIMIZER, WEIGHTS, specs_of, whole_state

    restored, found_equal = Saver.restore, list[int]()

    def restore(self: Saver, found: Found) -> Progress:
        progress = restored(self, found)
        state = whole_state(self._model, self._comm, WEIGHTS, OPTIMIZER)
        if state is not None:
            stored = read_whole(found.url, found.manifest, (WEIGHTS, OPTIMIZER))
            assert stored.keys() == state.keys() == specs_of(self._model, WEIGHTS, OPTIMIZER).keys()
            for name, value in stored.items():
                assert (value.dtype, value.shape) == (state[name].dtype, state[name].shape), name
                assert value.tobytes() == state[name].tobytes(), name
            found_equal.append(len(stored))
        return progress

    monkeypatch.setattr(Saver, "restore", restore)
    return found_equal
