"""What holds of a folder of data, runs, searches and models that tools other than ours have moved or copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.storage.documents import unseal
from lockstep.storage.errors import LockstepError
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.urls import join
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.driver.train import Hooks
from lockstep.training.results.audit import check_run_audit
from lockstep.training.results.report import write_report
from lockstep.training.results.runs import read_runs
from lockstep.training.results.state import status_now
from lockstep.training.results.trained_run import TrainedRun
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.run_json import begun_from, read_run
from lockstep.training.run.status import now_utc
from lockstep.training.run.weights_source import located
from lockstep.training.search.config import SearchConfig
from lockstep.training.search.folds import cross_validate
from lockstep.training.search.report import search_page
from lockstep.training.search.search_status import read_search
from lockstep.training.search.space import space_of
from lockstep.training.search.tune import tune
from tests.builders.evaluations import evaluate, predict, publish
from tests.training._threads import run, run_threads
from tests.training._tiny import write_table

HOW = ("moved", "copied, with another one at the old place")
QUICK = Hooks(lease_watch_s=0.1)
Displaces = Callable[[str, str, bool], None]
"""Moves or (if true) copies a folder from a URL to another one, without Lockstep."""


def config_of(root: str, name: str, **more: Any) -> TrainConfig:
    """A run of the table at ROOT/data."""
    given = {"model": "logistic", "num_ranks": 1, "global_batch": 16, "epochs": 2, "launcher": "local", **more}
    return TrainConfig(**{"datasets": (join(root, "data"),), "run": join(root, name), **given})


def search_of(root: str, trials: int) -> SearchConfig:
    """A search over learning rates of the table at ROOT/data, judged by `val`."""
    space = space_of({"learning_rate": {"low": 1e-3, "high": 1.0, "log": True}}, "the test")
    base = config_of(root, "search", validate="val", seed=int(root.endswith("other")))
    return SearchConfig(base=base, space=space, metric="val_auc:max", trials=trials, sampler="random")


def data(root: str, seed: int = 0, **records: int) -> None:
    """The table at ROOT/data."""
    write_table(join(root, "data"), records=records or {"train": 100, "val": 30, "test": 30}, seed=seed)


def files(root: str) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file below `root`."""
    fs = filesystem(root)
    return {entry.url: (entry.size_bytes, entry.mtime_ms) for entry in walk(fs, root) if not entry.is_dir}


class MovedContract:
    """Inherit, and define the fixtures `root: str`, a fresh folder, and `displaces: Displaces`."""

    @pytest.fixture(params=HOW)
    def away(self, request: pytest.FixtureRequest, root: str, displaces: Displaces) -> Iterator[Callable[[Any], str]]:
        """Call it with what makes a folder: it returns the folder's new place. Nothing may change the old one."""

        def go(make: Callable[[str, int], object]) -> str:
            old, new = join(root, "old"), join(root, "archive", "new")
            make(old, 0)
            filesystem(root).mkdirs(join(root, "archive"))
            displaces(old, new, request.param != HOW[0])
            if request.param != HOW[0]:
                filesystem(old).delete(old, recursive=True)
                make(old, 1)
            before.append(files(old) if filesystem(old).exists(old) else {})
            return new

        before: list[dict[str, tuple[int, int]]] = []
        yield go
        old = join(root, "old")
        assert before == [files(old) if filesystem(old).exists(old) else {}], "the old place was written to"

    def test_a_run_with_its_data(self, away: Any, root: str) -> None:
        metrics = []

        def make(place: str, other: int) -> None:
            data(place, other)
            run(config_of(place, "run", seed=other, epochs=2 + other, audit=True))
            metrics.append(evaluate(join(place, "run"), join(place, "data"), "test", run_threads)["metrics"])

        new = away(make)
        url = join(new, "run")
        document = read_run(filesystem(url), RunPaths(url))
        assert document["config"]["data"]["datasets"] == [join(new, "data")]
        again = run(config_of(new, "run", audit=True))
        assert (again.run, again.model, again.generation) == (url, join(url, "models", "g0001"), 1)
        found = TrainedRun.of(again, run_threads).evaluate()
        assert found["metrics"] == metrics[0] and (found["dataset"], found["model"]) == (join(new, "data"), again.model)
        assert check_run_audit(url).ok and verify(url) == []
        page = join(root, "page.html")
        for where in (write_report(url), write_report(url, page=page)):
            text = filesystem(where).read_bytes(where).decode()
            assert join(root, "old") not in text and "<th>split test</th>" in text and "cannot be read now" not in text
        (listed,) = read_runs([new])
        assert (listed.url, listed.datasets, listed.state) == (url, [join(new, "data")], "finished")
        done = predict(url, join(new, "data"), "test", join(root, "predicted"), run_threads)
        assert (done.rows, done.model) == (30, again.model)
        longer = run(config_of(new, "run", epochs=4, audit=True))
        assert longer.steps == 25 and longer.run == url and check_run_audit(url).ok

    def test_a_search_with_its_data(self, away: Any, root: str) -> None:
        best: list[dict[str, Any]] = []

        def make(place: str, other: int) -> None:
            data(place, other)
            best.append(tune(search_of(place, 2 + other), run_threads, hooks=QUICK))

        new = away(make)
        search = join(new, "search")
        status = read_search(filesystem(search), search, now_utc())
        assert (status.state, len(status.trials)) == ("finished", 2)
        assert status.best is not None and status.best.value == best[0]["value"]
        again = tune(search_of(new, 2), run_threads, hooks=QUICK)
        assert again == _renamed(best[0], join(root, "old"), new)
        url = join(search, "best.json")
        stored = unseal(filesystem(url).read_bytes(url), url)
        assert {name: stored[name] for name in again} == again
        done = predict(again["run"], join(new, "data"), "test", join(root, "predicted"), run_threads)
        assert done.model == again["model"] and done.rows == 30
        copy = search_page(filesystem(search), search, join(root, "page.html"))
        for page in (search_page(filesystem(search), search), copy):
            assert join(root, "old") not in filesystem(page).read_bytes(page).decode()
        more = tune(search_of(new, 3), run_threads, hooks=QUICK)
        assert more["value"] >= again["value"] and more["run"].startswith(f"{search}/trials/")
        assert len(read_search(filesystem(search), search, now_utc()).trials) == 3

    def test_folds_with_their_data(self, away: Any, root: str) -> None:
        results: list[dict[str, Any]] = []

        def make(place: str, other: int) -> None:
            data(place, other, **{"fold-0": 40, "fold-1": 30})
            results.append(cross_validate(config_of(place, "cv", seed=other), run_threads))

        new = away(make)
        before = files(join(new, "cv"))
        again = cross_validate(config_of(new, "cv"), run_threads)
        assert again == _renamed(results[0], join(root, "old"), new)
        changed = {url for url, seen in files(join(new, "cv")).items() if before.get(url) != seen}
        kept = {join(new, "cv", name) for name in ("fold-0.json", "fold-1.json")}
        assert not changed & kept, "no fold is evaluated again"
        for fold in again["folds"]:
            found = evaluate(fold["run"], join(new, "data"), fold["fold"], run_threads)
            assert found["metrics"] == fold["metrics"] and found["model"] == fold["model"]

    def test_a_published_model_with_its_runs(self, away: Any, root: str) -> None:
        values = []

        def make(place: str, other: int) -> None:
            data(place, other)
            run(config_of(place, "day1", seed=other, epochs=2 + other))
            done = publish(
                join(place, "day1"), join(place, "models"), join(place, "data"), "test", "loss:min", run_threads
            )
            run(config_of(place, "day2", init_from=join(place, "models")))
            values.append(done["value"])

        new = away(make)
        assert located(join(new, "models")) == join(new, "day1", "models", "g0001")
        day2 = join(new, "day2")
        assert begun_from(read_run(filesystem(day2), RunPaths(day2))) == join(new, "day1")
        found = evaluate(join(new, "day1"), join(new, "data"), "test", run_threads)
        assert found["metrics"]["loss"] == values[0]
        again = publish(join(new, "day1"), join(new, "models"), join(new, "data"), "test", "loss:min", run_threads)
        assert (again["run"], again["value"]) == (join(new, "day1"), values[0])

    def test_a_run_without_its_data_names_what_is_missing_and_takes_no_other(
        self, root: str, displaces: Displaces
    ) -> None:
        """The run alone moves; where its data was there is other data, and so where it would be now."""
        old, new = join(root, "old"), join(root, "new", "run")
        data(old)
        result = run(config_of(old, "run", audit=True))
        filesystem(root).mkdirs(join(root, "new"))
        displaces(join(old, "run"), new, False)
        filesystem(old).delete(join(old, "data"), recursive=True)
        data(old, 1)
        data(join(root, "new"), 2)
        assert read_run(filesystem(new), RunPaths(new))["config"]["data"]["datasets"] == [join(old, "data")]
        page = filesystem(new).read_bytes(where := write_report(new)) and filesystem(where).read_bytes(where).decode()
        assert "is another dataset now" in page and "<th>split test</th>" not in page
        with pytest.raises(LockstepError) as caught:
            run(config_of(old, "run").but(run=new))
        error = caught.value
        assert "another `dataset_digest`" in error.what and error.got and error.allowed and error.next_step
        with pytest.raises(LockstepError):
            check_run_audit(new)
        assert status_now(filesystem(new), RunPaths(new), now_utc()).step == result.steps


def _renamed(value: Any, old: str, new: str) -> Any:
    """`value` with each `old` of its texts as `new`."""
    if isinstance(value, dict):
        return {name: _renamed(one, old, new) for name, one in value.items()}
    if isinstance(value, list):
        return [_renamed(one, old, new) for one in value]
    return value.replace(old, new) if isinstance(value, str) else value
