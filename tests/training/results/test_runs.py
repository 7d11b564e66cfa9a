"""Runs side by side: found, listed with their state, filtered, ordered, compared, and shown as a page."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from lockstep.jobs import describe as describe_job
from lockstep.jobs import runs as job
from lockstep.jobs import status as status_job
from lockstep.jobs import watch
from lockstep.storage.documents import seal
from lockstep.storage.errors import ConfigError, ExistsError, NotFoundError, StorageError
from lockstep.storage.files.interface import FileStat
from lockstep.storage.files.local import LocalFileSystem
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import write_file
from lockstep.training.config import TrainConfig
from lockstep.training.driver.ownership import Ownership, driver_lives, read_lease
from lockstep.training.driver.stop import write_stopped
from lockstep.training.driver.train import train
from lockstep.training.results.report import write_report
from lockstep.training.results.runs import (
    SHOWN_METRICS,
    ListedRun,
    as_text,
    comparison,
    filtered,
    listing,
    metric_names,
    ordered,
    read_runs,
)
from lockstep.training.results.runs_page import MOST_CURVES, SCRIPT, _Look, reports_of, runs_page
from lockstep.training.run.lineage import CheckpointRef
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.status import RunStatus, now_utc
from tests.training._threads import run_threads
from tests.training._tiny import write_table

pytestmark = pytest.mark.slow
HOSTILE = "<b>\x1b[2J"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, the page of its dataset, and runs/{first,second}; the second began with the first's model."""
    folder = tmp_path_factory.mktemp("made")
    write_table(folder / "data", records={"train": 96, "test": 64})
    (folder / "data.html").write_text("about the dataset")
    common = {"datasets": (str(folder / "data"),), "num_ranks": 2, "global_batch": 24, "launcher": "local"}
    first, second = str(folder / "runs" / "first"), str(folder / "runs" / "second")
    train(TrainConfig(**common, run=first, model="logistic", epochs=3, validate="test"), run_threads)  # type: ignore[arg-type]
    more = {"init_from": first, "learning_rate": 0.01, "extra": {"decay": 0.001}}
    train(TrainConfig(**common, run=second, model="logistic", epochs=2, **more), run_threads)  # type: ignore[arg-type]
    scores = {"metrics": {"auc": 0.75}, "intervals": {}, "samples": 64, "class_counts": None, "baseline": None}
    nothing: dict[str, Any] = {"calibration": None, "confusion": None, "slices": {}}
    write_report(first, {"split": "test", **scores, **nothing})
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy whose runs a test may change; its datasets are those of `made`."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    return tmp_path / "runs"


def unfinished(run: Path) -> RunPaths:
    """The run as if its driver had died before the result."""
    paths = RunPaths(str(run))
    shutil.rmtree(paths.results)
    return paths


def states(folder: Path, look_s: float = 0.0) -> dict[str, str]:
    return {run.name: run.state for run in read_runs([str(folder)], look_s)}


def test_a_folder_s_runs_are_listed_with_state_steps_and_metrics(folder: Path) -> None:
    first, second = read_runs([str(folder)])
    assert (first.name, first.state, first.ranks, first.steps, first.steps_asked) == ("first", "finished", 2, 12, 12)
    assert (second.name, second.steps, second.config["set.decay"]) == ("second", 8, 0.001)
    assert {"loss", "val_loss", "val_auc", "test_auc"} <= set(first.metrics)
    assert first.digest == second.digest and first.begun <= second.begun
    assert second.begun_from is not None and second.begun_from.endswith("/runs/first") and first.begun_from is None
    head, *rows = listing([first, second])
    assert head[:5] == ["run", "state", "model", "ranks", "step"] and head[-2:] == ["dataset", "digest"]
    assert rows[0][:5] == ["first", "finished", "logistic", "2", "12 of 12"] and rows[0][-2] == "data"
    assert read_runs([str(folder / "first")])[0].name == "first", "a run itself"


def test_a_run_without_a_result_is_interrupted_stopped_or_training(folder: Path) -> None:
    paths, fs = unfinished(folder / "second"), filesystem(str(folder))
    assert states(folder) == {"first": "finished", "second": "interrupted"}
    interrupted = read_runs([paths.root])[0]
    assert interrupted.steps == 8 and interrupted.metrics["loss"] > 0, "from its metrics"
    write_stopped(fs, paths, generation=1, by="SIGTERM", tip=CheckpointRef(8, 1), steps=8, saved=True)
    assert states(folder)["second"] == "stopped"
    report = Path(write_report(paths.root)).read_text()
    assert "not finished, stopped: in good order" in report and "by SIGTERM at " in report
    with Ownership(fs, paths):
        assert states(folder)["second"] == "training"
        assert "not finished, training: its driver lives" in Path(write_report(paths.root)).read_text()
    assert states(folder)["second"] == "stopped"


@pytest.mark.parametrize(
    ("written", "seen", "code"),
    [("training", "interrupted", 1), ("starting", "interrupted", 1), ("failed", "failed", 1)],
)
def test_runs_status_and_watch_agree_on_a_run_whose_driver_is_gone(
    folder: Path, capsys: pytest.CaptureFixture[str], written: str, seen: str, code: int
) -> None:
    """A driver that was killed leaves its last state in the file, one that gave up says so."""
    paths, fs = unfinished(folder / "second"), filesystem(str(folder))
    with Ownership(fs, paths):
        pass  # its lease is closed
    long_ago = (now_utc() - datetime.timedelta(seconds=90)).isoformat(timespec="milliseconds")
    status = RunStatus(state=written, written_at=long_ago, step=8, steps=8, epochs=1, why="no memory")
    write_file(fs, paths.status, status.to_bytes(), exclusive=False)
    assert states(folder)["second"] == seen
    assert status_job.main([paths.root]) == 0
    assert capsys.readouterr().out.startswith(f"{paths.root}: {seen}, step 8 of 8")
    assert status_job.main([paths.root, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == seen
    assert watch.main([paths.root, "--silent-limit", "60"]) == code
    assert capsys.readouterr().out.startswith(f"{paths.root}: {seen}, step 8 of 8")
    assert f"not finished, {seen}: " in Path(write_report(paths.root)).read_text()


@contextmanager
def rewritten(paths: RunPaths, every_s: float) -> Iterator[None]:
    """A driver of another host rewrites the lease."""
    ended = Event()

    def keep() -> None:
        counter = 0
        while not ended.wait(every_s):
            counter += 1
            lease = {"kind": "lease", "nonce": "a", "counter": counter, "closed": False, "host": "elsewhere", "pid": 1}
            Path(f"{paths.lease}.new").write_text(json.dumps(lease))
            Path(f"{paths.lease}.new").rename(paths.lease)

    thread = Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_driver_on_another_host_lives_if_it_rewrites_its_lease(folder: Path) -> None:
    paths = unfinished(folder / "second")
    with rewritten(paths, 0.02):
        while driver_lives(read_lease(filesystem(paths.root), paths.lease)) is not None:
            pass
        assert states(folder, look_s=0.5)["second"] == "training"
    assert states(folder, look_s=0.05)["second"] == "interrupted"


def test_a_damaged_run_is_a_line_and_the_others_are_listed(folder: Path) -> None:
    for name in ("claim", "no-json", "strange"):
        shutil.copytree(folder / "first", folder / name)
    (folder / "first" / "run.json").write_text("{")
    Path(RunPaths(str(folder / "claim")).claim(1)).write_text("{}")
    (folder / "no-json" / "run.json").unlink()
    config = {"data": {"epochs": HOSTILE}}
    strange = {"format_version": 2, "kind": "run", "plan": {"parts": []}, "config": config}
    (folder / "strange" / "run.json").write_bytes(seal(strange))
    found = {run.name: run for run in read_runs([str(folder)])}
    assert {name for name, run in found.items() if run.state == "damaged"} == {"first", "claim", "no-json", "strange"}
    assert found["second"].state == "finished" and all(run.problem for name, run in found.items() if name != "second")
    lines = as_text(listing(list(found.values()))).splitlines()
    assert len(lines) == 6 and sum("damaged: " in line for line in lines) == 4
    assert "strange" in runs_page(list(found.values()), "", str(folder / "page.html"))


def test_a_folder_that_cannot_be_listed_is_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs_list = LocalFileSystem.list

    def refuse(fs: LocalFileSystem, url: str) -> list[FileStat]:
        if url.endswith("second"):
            raise StorageError("cannot list it")
        return fs_list(fs, url)

    monkeypatch.setattr(LocalFileSystem, "list", refuse)
    assert [(run.name, run.state, run.problem) for run in read_runs([str(folder)])] == [
        ("second", "damaged", "cannot list it"), ("first", "finished", ""),
    ]  # fmt: skip
    with pytest.raises(StorageError):
        read_runs([str(folder / "second")])


def test_folders_of_a_search_are_looked_into_and_datasets_are_not(made: Path, tmp_path: Path) -> None:
    for trial in ("0000", "0001"):
        shutil.copytree(made / "runs" / "first", tmp_path / "all" / "search" / "trials" / trial)
    shutil.copytree(made / "data", tmp_path / "all" / "data")
    shutil.copytree(made / "runs" / "first", tmp_path / "all" / "data" / "inside")
    names = [run.name for run in read_runs([str(tmp_path / "all")])]
    assert names == ["search/trials/0000", "search/trials/0001"]
    both = read_runs([str(tmp_path / "all" / "search"), str(made / "runs"), str(made / "runs" / "first")])
    assert [run.name for run in both].count("runs/first") == 1 and len(both) == 4, "each once"
    with pytest.raises(NotFoundError, match="no run at"):
        read_runs([str(made / "data")])
    with pytest.raises(NotFoundError, match="no run at"):
        read_runs([str(tmp_path / "nowhere")])


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        ("model=logistic", ["first", "second"]),
        ("epochs>=3", ["first"]),
        ("epochs<3", ["second"]),
        ("learning_rate=0.01", ["second"]),
        ("learning_rate=1e-2", ["second"]),  # as a number
        ("set.decay>0", ["second"]),
        ("validate!=none", ["first"]),
        ("datasets=data", ["first", "second"]),  # by its name
        ("state=finished", ["first", "second"]),
        ("test_auc>0", ["first"]),  # the other one has none
        ("model>3", []),
        ("audit=false", ["first", "second"]),
    ],
)
def test_runs_are_chosen_by_a_condition(made: Path, condition: str, names: list[str]) -> None:
    assert [run.name for run in filtered(read_runs([str(made / "runs")]), [condition])] == names


def test_unknown_names_and_conditions_that_are_none_are_refused(made: Path) -> None:
    runs = read_runs([str(made / "runs")])
    with pytest.raises(ConfigError, match=r"no run has `epoch`") as caught:
        filtered(runs, ["epoch=3"])
    assert "perhaps `epochs`" in caught.value.got
    with pytest.raises(ConfigError, match="is no condition"):
        filtered(runs, ["epochs"])
    with pytest.raises(ConfigError, match="--sort"):
        ordered(runs, "val_acu:max")


def run_with(name: str, **metrics: float) -> ListedRun:
    return ListedRun(url=f"/{name}", name=name, state="finished", metrics=metrics)


def test_the_best_run_is_first_and_runs_without_the_metric_are_last() -> None:
    runs = [run_with("none"), run_with("low", auc=0.6, loss=0.2), run_with("high", auc=0.7, loss=0.3)]
    assert [run.name for run in ordered(runs, "auc")] == ["high", "low", "none"]
    assert [run.name for run in ordered(runs, "auc:min")] == ["low", "high", "none"]
    assert [run.name for run in ordered(runs, "loss")] == ["low", "high", "none"]
    assert listing(runs, "loss:max")[0][6:8] == ["loss", "auc"], "what they are ordered by is shown first"


def test_a_metric_is_next_to_those_of_its_validation_and_evaluation() -> None:
    many = {f"m{number}": 0.5 for number in range(20)}
    runs = [
        run_with("plain", loss=1.0, auc=0.5),
        replace(run_with("both", loss=1.0, auc=0.5, val_auc=0.6, test_auc=0.4, r2=0.1), evaluated="test"),
        run_with("many", loss=1.0, **many),
    ]
    names = metric_names(runs)
    assert names[:4] == ["loss", "auc", "val_auc", "test_auc"] and len(names) == 25
    assert len(listing(runs)[0]) == 9 + SHOWN_METRICS


def test_only_options_that_differ_are_compared(made: Path) -> None:
    head, first, second = comparison(read_runs([str(made / "runs")]))
    options = head[1 : head.index("accuracy")]
    assert {"epochs", "learning_rate", "init_from", "set.decay", "validate"} <= set(options)
    assert head[0] == "run" and not {"model", "datasets", "dataset_digest", "num_ranks", "seed"} & set(head)
    assert (first[head.index("epochs")], second[head.index("epochs")]) == ("3", "2")
    assert second[head.index("learning_rate")] == "0.01" and first[head.index("learning_rate")] == "-"


def test_the_page_has_curves_and_a_lineage_with_relative_links(made: Path, folder: Path) -> None:
    url = str(folder / "page.html")
    page = runs_page(read_runs([str(made / "runs")]), "asked for", str(made / "page.html"))
    assert '<a href="runs/first/reports/g0001.html">first</a>' in page
    assert '<a href="data.html">data</a>' in page, "the page of lockstep describe next to the dataset"
    assert '<a href="runs/first/models/g0001">g0001</a>' in page
    first, second = (page.index(f"run {name}") for name in ('<a href="runs/first', "second (finished)"))
    assert first < second and "first weights of" in page[second:] and "<ul>" in page[first:second], "below its parent"
    assert (
        page.count("<svg") >= 3
        and page.count("loss")
        and "smoothed" not in page
        and "<title>Runs compared</title>" in page
    )
    assert "prefers-color-scheme: dark" in page
    # The one script is ours, to the letter, and the policy lets a browser run no other.
    assert page.count("<script") == 1 and f"<script>{SCRIPT}</script>" in page
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policies = re.findall('<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert policies == [f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"]
    assert not re.search("https?:|fetch|import|eval", SCRIPT)
    boxes = re.findall('<input class="scripted" type="checkbox" data-run="([0-9]+)" checked>', page)
    assert boxes == ["0", "1"] and set(re.findall('<g class="run" data-run="([0-9]+)">', page)) == set(boxes)
    assert page.count('<div class="sortable">') == 2
    # Colours are the page's: nothing but lines of runs has one of its own.
    assert set(re.findall(r"stroke: (#[0-9a-f]{6})", page)) <= {"#b0b0b0", "#2f7fd0", "#d9722a"}
    assert "logarithmic" not in page
    looks = [_Look.of(place) for place in range(MOST_CURVES)]
    assert len({(look.colour, look.marker) for look in looks}) == MOST_CURVES, "each pair of colour and mark is one run"
    many = [ListedRun(url=f"/{n}", name=HOSTILE, state="finished") for n in range(MOST_CURVES + 2)]
    assert HOSTILE not in runs_page(many, HOSTILE, url)


def test_the_page_of_a_dataset_links_the_reports_of_its_runs(made: Path, tmp_path: Path) -> None:
    page = made / "described.html"
    assert describe_job.main([str(made / "data"), "--html", str(page), "--runs", str(made / "runs")]) == 0
    text = page.read_text()
    assert '<a href="runs/first/reports/g0001.html">first</a> <span class="dim">logistic, finished</span>' in text
    assert "<li>second <span" in text, "a run without a report is named"
    strange = ListedRun(url="/x", name=HOSTILE, state="finished", config={"datasets": ["/d/"], "model": HOSTILE})
    ((link, words),) = reports_of("/d", [strange, replace(strange, config={"datasets": ["/e"]})], str(page))
    assert HOSTILE not in link and words == f"{HOSTILE}, finished"
    with pytest.raises(ConfigError, match="--runs"):
        describe_job.main([str(made / "data"), "--runs", str(made / "runs")])


def test_a_far_longer_run_does_not_hide_the_others(folder: Path) -> None:
    part = next(Path(RunPaths(str(folder / "second")).metrics(1)).glob("part-*.jsonl"))
    metrics = {"loss": 0.5, "auc": 0.6}
    rows = [{"kind": "epoch", "step": 4 * e + 4, "epoch": e, "metrics": metrics, "seconds": 1.0} for e in range(200)]
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(folder / "first", folder / "third")
    page = runs_page(read_runs([str(folder)]), "", str(folder / "page.html"))
    assert "epoch, logarithmic" in page and ">100<" in page


def test_the_job_prints_tables_and_replaces_only_its_own_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "page.html"
    asked = [str(folder), "--where", "model=logistic", "epochs>=1", "--sort", "loss", "--compare", "--html", str(page)]
    for _ in range(2):
        assert job.main(asked) == 0
    printed = capsys.readouterr().out
    assert "12 of 12" in printed and "learning_rate" in printed and f"page: {page}" in printed
    assert "by loss" in page.read_text()
    assert job.main([str(folder), "--where", "model=mlp", "--sort", "auc", "--compare"]) == 0
    assert capsys.readouterr().out == "none of 2 runs meets all conditions\n"
    page.write_text("mine")
    with pytest.raises(ExistsError, match=r"not a page of lockstep runs"):
        job.main(asked)
    assert page.read_text() == "mine"
