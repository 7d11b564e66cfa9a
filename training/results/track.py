"""A run's metrics in other programs: files for TensorBoard, or a run of MLflow, while it trains and after it.

Both are optional packages (requirements-tracking.txt), read from the run and written next to it, by a process of their
own: they can neither slow a run down nor end it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.storage.documents import seal, unseal_as
from lockstep.storage.errors import ConfigError, CorruptionError, LockstepError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.storage.urls import absolute, basename, join
from lockstep.training.config import options_in
from lockstep.training.rules import VALIDATION
from lockstep.training.run.epochs import epochs_words
from lockstep.training.run.metrics import PARTS, History, read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from lockstep.training.run.run_json import read_run
from lockstep.training.run.status import FAILED, FINISHED, STOPPED, RunStatus, read_status

STATE = "lockstep.json"
RUN_TAG, SENT_TAG = "lockstep.run", "lockstep.sent"
MOST_METRICS, MOST_PARAMS = 1000, 100  # of one call to MLflow's server
_USED = ("rss_bytes", "cores", "gpu_bytes", "gpu_share")
_KINDS = ("steps", "epochs", "times", "usage")


@dataclass(frozen=True, slots=True)
class Point:
    """One number of a curve."""

    curve: str
    """`loss`, `auc`, `step_loss`, or `rank_0/compute_s`: the seconds of one step."""
    step: int
    value: float
    validation: bool = False


class Sent(dict[str, int]):
    """How much of each kind of row has been sent: the last step of `steps` and `epochs`, the count of the others."""

    @classmethod
    def of(cls, found: Mapping[str, Any], where: str) -> Sent:
        """Read back how much was sent. Raises CorruptionError."""
        if set(found) != set(_KINDS) or not all(type(number) is int and number >= 0 for number in found.values()):
            raise CorruptionError("a record of what was sent that is none", file=where, got=str(found)[:200])
        return cls(found)

    def take(self, history: History) -> list[Point]:
        """The points of `history` that were not sent, which count as sent from now on."""
        found = []
        for kind, validated in (("steps", False), ("epochs", True)):
            rows = [row for row in getattr(history, kind) if row["step"] > self[kind]]
            for row in rows:
                numbers = row["metrics"] if validated else {"step_loss": row["loss"]}
                for name, value in numbers.items():
                    if _finite(value):
                        name, of_validation = name.removeprefix(VALIDATION), name.startswith(VALIDATION)
                        found.append(Point(name, row["step"], float(value), of_validation))
            self[kind] = max([self[kind], *(row["step"] for row in rows)])
        for row in history.times[self["times"] :]:
            if row["steps"]:
                found += _of_rank(row, {part: row.get(part, 0.0) / row["steps"] for part in PARTS})
        for row in history.usage[self["usage"] :]:
            found += _of_rank(row, {name: row[name] for name in _USED if name in row})
        self["times"], self["usage"] = len(history.times), len(history.usage)
        return found


def _of_rank(row: Mapping[str, Any], numbers: Mapping[str, Any]) -> Iterator[Point]:
    return (Point(f"rank_{row['rank']}/{name}", row["step"], float(value)) for name, value in numbers.items())


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class Tracker(ABC):
    """Where the points of one run go; what it was sent is kept there, so that another call continues."""

    @abstractmethod
    def sent(self) -> Sent:
        """Return how much was sent before."""

    @abstractmethod
    def send(self, points: Sequence[Point], sent: Sent) -> None:
        """Send these points, and keep `sent` with them."""

    def end(self, state: str, result: Mapping[str, Any] | None) -> None:  # noqa: B027 - files need no end
        """The run has ended: `finished`, `stopped` or `failed`."""


def track(run: str, tracker: Tracker) -> tuple[RunStatus, int]:
    """Send what is new in the run; returns its status and how many numbers were sent. Raises LockstepError."""
    fs, paths = filesystem(run), RunPaths(run)
    status = read_status(fs, paths)  # before the rows: those of a run that ends now are sent by this call
    sent = tracker.sent()
    points = sent.take(read_history(run))
    if points:
        tracker.send(points, sent)
    if status.ended:
        tracker.end(status.state, find_result(fs, paths))
    return status, len(points)


class TensorBoard(Tracker):
    """Event files in LOGDIR/RUN/training and LOGDIR/RUN/validation, local or on HDFS; each call adds one to each.

    TensorBoard shows files of one directory as one run, in the order of their names.
    """

    def __init__(self, run: str, logdir: str) -> None:
        _need("tensorboardX", "--tensorboard")
        self._run, self._folder = run, join(absolute(logdir), basename(run))
        self._fs = filesystem(self._folder)

    def sent(self) -> Sent:
        """Return how much was sent up to the last call. Raises ConfigError if another run's files are there."""
        url = join(self._folder, STATE)
        try:
            document = unseal_as("tracked", self._fs.read_bytes(url), url)
        except NotFoundError:
            return Sent(dict.fromkeys(_KINDS, 0))
        if document.get("run") != self._run:
            raise ConfigError(
                f"{self._folder} has the curves of another run",
                got=f"{self._run}, and there {document.get('run')}",
                allowed="one run in a directory of this name",
                next_step="Give --tensorboard another directory, or remove that one.",
            )
        return Sent.of(document["sent"], url)

    def send(self, points: Sequence[Point], sent: Sent) -> None:
        """Write two event files, then what was sent: a call that dies between them repeats points, and loses none."""
        from tensorboardX import SummaryWriter

        for name, validation in (("training", False), ("validation", True)):
            chosen = [point for point in points if point.validation is validation]
            if not chosen:
                continue
            with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
                with SummaryWriter(folder) as writer:
                    for point in chosen:
                        writer.add_scalar(point.curve, point.value, point.step)
                (file,) = Path(folder).iterdir()
                # By count, since two calls in one second would give their files one name.
                number = len(self._fs.list(join(self._folder, name))) if self._there(name) else 0
                target = join(self._folder, name, f"events.out.tfevents.{number:010d}.lockstep")
                write_file(self._fs, target, file.read_bytes())
        document = seal({"format_version": 1, "kind": "tracked", "run": self._run, "sent": dict(sent)})
        write_file(self._fs, join(self._folder, STATE), document, exclusive=False)

    def _there(self, name: str) -> bool:
        url = join(self._folder, name)
        if self._fs.exists(url):
            return True
        self._fs.mkdirs(url)
        return False


class MLflow(Tracker):
    """One run of an MLflow experiment, found again by the URL of the run: parameters, metrics, datasets, the result."""

    def __init__(self, run: str, server: str, experiment: str) -> None:
        _need("mlflow", "--mlflow")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # seven, with growing pauses, are minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        from mlflow import MlflowClient

        self._run = run
        with _refused(server):
            self._client = MlflowClient(tracking_uri=server)
            found = self._client.get_experiment_by_name(experiment)
            self._experiment = found.experiment_id if found else self._client.create_experiment(experiment)
            self._id = self._find() or self._create()
        self._server = server

    def sent(self) -> Sent:
        """Return how much was sent up to the last call."""
        with _refused(self._server):
            text = self._client.get_run(self._id).data.tags.get(SENT_TAG)
        return Sent.of(json.loads(text), f"tag {SENT_TAG}") if text else Sent(dict.fromkeys(_KINDS, 0))

    def send(self, points: Sequence[Point], sent: Sent) -> None:
        """Send the points in parts; those of a call that dies are sent again, which MLflow keeps as repeated values."""
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        metrics = [
            Metric(f"{VALIDATION if point.validation else ''}{point.curve}", point.value, now, point.step)
            for point in points
        ]
        with _refused(self._server):
            for at in range(0, len(metrics), MOST_METRICS):
                self._client.log_batch(self._id, metrics=metrics[at : at + MOST_METRICS])
            self._client.set_tag(self._id, SENT_TAG, json.dumps(sent))

    def end(self, state: str, result: Mapping[str, Any] | None) -> None:
        """Say how it ended, and where its model is."""
        with _refused(self._server):
            if result is not None:
                self._client.set_tag(self._id, "lockstep.model", str(result["model"]))
                epochs = epochs_words(result["epochs"], result["epochs_asked"])
                self._client.set_tag(self._id, "lockstep.epochs", epochs)
                self._client.set_tag(self._id, "lockstep.restarts", str(result["restarts"]))
            status = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}[state]
            self._client.set_terminated(self._id, status)

    def _find(self) -> str | None:
        quoted = self._run.replace("'", "\\'")
        found = self._client.search_runs([self._experiment], f"tags.`{RUN_TAG}` = '{quoted}'", max_results=1)
        return str(found[0].info.run_id) if found else None

    def _create(self) -> str:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        stored = read_run(filesystem(self._run), RunPaths(self._run))
        config = options_in(stored["config"])
        created = self._client.create_run(self._experiment, run_name=basename(self._run), tags={RUN_TAG: self._run})
        run_id = str(created.info.run_id)
        params = [Param(name, str(value)[:6000]) for name, value in _flat(config) if value is not None]
        for at in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(run_id, params=params[at : at + MOST_PARAMS])
        datasets = [
            DatasetInput(
                Dataset(
                    name=basename(url), digest=str(stored["dataset_digest"])[:36], source_type="lockstep", source=url
                ),
                [InputTag("mlflow.data.context", "training")],
            )
            for url in config["datasets"]
        ]
        self._client.log_inputs(run_id, datasets=datasets)
        return run_id


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


class _refused:
    """MLflow's errors as ours, with the server's name in them."""

    def __init__(self, server: str) -> None:
        self._server = server

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        from mlflow.exceptions import MlflowException

        if isinstance(error, MlflowException):
            raise LockstepError(
                "MLflow refused, or did not answer",
                got=f"{self._server}: {str(error).splitlines()[0][:500]}",
                allowed="http://HOST:5000, or sqlite:///FILE",
                next_step="Correct --mlflow, or start the server; what was not sent is sent by the next call.",
            ) from error


def _need(package: str, flag: str) -> None:
    try:
        __import__(package)
    except ImportError as error:
        raise ConfigError(
            f"{flag} needs the package {package}",
            got=str(error),
            allowed=f"{package} where this command runs; the ranks do not need it",
            next_step="pip install -r requirements-tracking.txt",
        ) from None
