"""The result of a run, with its model at hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem
from lockstep.storage.shown import Shown, short
from lockstep.training.config import options_in
from lockstep.training.launch.session import Launch
from lockstep.training.results.evaluate import EvaluateRequest, evaluate, summary
from lockstep.training.results.pictures import Images, predict_raw
from lockstep.training.results.predictor import BATCH
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult
from lockstep.training.run.run_json import read_run


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun(RunResult):
    """A finished run: the fields of its result, `evaluate` and `predict`."""

    launch: Launch = field(repr=False, compare=False)
    """Runs ranks where the run was trained."""

    def __repr__(self) -> str:
        return short(self.summary())

    @classmethod
    def of(cls, result: RunResult, launch: Launch) -> Self:
        """The run that has this result."""
        return cls(**{name: getattr(result, name) for name in RunResult.__dataclass_fields__}, launch=launch)

    def evaluate(
        self,
        split: str = "test",
        *,
        dataset: str | None = None,
        baseline: str | None = None,
        batch: int = BATCH,
        num_ranks: int = 1,
    ) -> dict[str, Any]:
        """Evaluate the run's newest model on a split of its dataset, or of another one, as `lockstep.evaluate` does.

        Raises ConfigError for a run of several datasets if `dataset` is None.
        """
        if dataset is None:
            trained_on = options_in(read_run(filesystem(self.run), RunPaths(self.run))["config"])["datasets"]
            if len(trained_on) > 1:
                raise ConfigError(
                    "the run was trained on several datasets",
                    got=", ".join(trained_on),
                    allowed="one dataset to evaluate on",
                    next_step="Pass dataset=...",
                )
            dataset = str(trained_on[0])
        request = EvaluateRequest((self.run,), dataset, split, num_ranks=num_ranks, batch=batch, baseline=baseline)
        return Shown(evaluate(request, self.launch), summary)

    def predict(self, rows: Any = None, *, images: Images | None = None, batch: int = BATCH) -> Any:
        """The newest model's outputs for raw rows or picture files, as `lockstep.predict` returns them."""
        return predict_raw(self.run, rows, images, batch)
