"""A run's history over several generations, and its report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.jobs import report, train
from lockstep.storage.documents import seal, unseal
from lockstep.storage.errors import CorruptionError, ExistsError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.training.results.curves import LOSS, curve_names, distinct, epoch_curve
from lockstep.training.results.follow import followed
from lockstep.training.results.report import about_run, render, write_report
from lockstep.training.results.resources import checkpoint_rows, reading_rows, straggler_rows, time_rows, usage_rows
from lockstep.training.run.lineage import CheckpointRef, Claim, claim_next
from lockstep.training.run.metrics import read_history
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import RunResult
from lockstep.training.run.summary import read_summary
from tests.training._tiny import write_table

HOSTILE = "<script>alert(1)</script>"


def rows(first: int, last: int, loss: float) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": s, "epoch": 0, "loss": loss, "seconds": 0.1 * s} for s in range(first, last + 1)]


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Generation 1 did steps 1-5; generation 2 went on from step 3 and did 4-6."""
    paths, fs = RunPaths(str(tmp_path / "run")), filesystem(str(tmp_path))
    fs.mkdirs(paths.root)
    data = {"datasets": [str(tmp_path / "data")], "split": "train"}
    config = {"model": {"model": "logistic"}, "data": data}
    document = {"format_version": 2, "kind": "run", "plan": {}, "config": config, "dataset_digest": "00ff"}
    Path(paths.run_json).write_bytes(seal(document))
    claim_next(fs, paths, None, epochs=1, num_ranks=1)
    claim_next(fs, paths, CheckpointRef(3, 1), epochs=1, num_ranks=1)
    epoch = {"kind": "epoch", "step": 6, "epoch": 0, "metrics": {"loss": 0.2, HOSTILE: 0.5}, "seconds": 1.0}
    for generation, part in ((1, rows(1, 5, 1.0)), (2, [*rows(4, 6, 0.5), epoch])):
        folder = Path(paths.metrics(generation))
        folder.mkdir(parents=True)
        (folder / "part-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return paths.root


def test_the_newest_generation_of_a_step_counts(run: str) -> None:
    history = read_summary(run)
    assert [(row["step"], row["loss"]) for row in history.steps] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 0.5), (5, 0.5), (6, 0.5),
    ]  # fmt: skip
    assert [row["step"] for row in history.epochs] == [6]
    assert history.generations == 2


def test_an_epoch_that_was_cut_and_then_ended_has_one_row(run: str) -> None:
    cut = {"kind": "epoch", "step": 2, "epoch": 0, "metrics": {"loss": 0.9, "val_loss": 0.8}, "seconds": 1.0}
    first = Path(RunPaths(run).metrics(1)) / "part-00000.jsonl"
    first.write_text(first.read_text() + json.dumps(cut) + "\n")
    assert [(row["step"], row["metrics"]["loss"]) for row in read_history(run).epochs] == [(6, 0.2)]
    (Path(RunPaths(run).metrics(2)) / "part-00000.jsonl").unlink()
    assert [row["step"] for row in read_history(run).epochs] == [2]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "{}",
        '{"kind": "step"}',
        '{"kind": "x", "step": 1}',
        '{"kind":"step","step":"1"}',
        '{"kind":"epoch","step":1}',
    ],
)
def test_a_line_that_is_no_measurement_is_named(run: str, line: str) -> None:
    part = Path(RunPaths(run).metrics(2)) / "part-00000.jsonl"
    part.write_text(part.read_text() + line + "\n")
    with pytest.raises(CorruptionError) as caught:
        read_history(run)
    assert caught.value.file.endswith("part-00000.jsonl") and caught.value.record == 4


def test_a_directory_that_is_no_run_and_a_run_that_has_not_begun(run: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a run"):
        read_history(str(tmp_path))
    for claim in Path(RunPaths(run).claims).iterdir():
        claim.unlink()
    with pytest.raises(NotFoundError, match="nothing to report"):
        write_report(run)


def trained_on_its_data(run: str, folder: Path) -> None:
    """Write the dataset that run.json names, and its digest there."""
    where = Path(RunPaths(run).run_json)
    digest = write_table(folder / "data").digest
    where.write_bytes(seal(unseal(where.read_bytes(), "run.json") | {"dataset_digest": digest}))


def test_a_run_that_has_not_ended_has_a_report(run: str, tmp_path: Path) -> None:
    url = write_report(run)
    assert url == RunPaths(run).report(2)
    page = Path(url).read_text()
    text = " ".join(re.sub("<[^>]*>", " ", page).split())
    for words in (
        "state not finished",
        "steps so far 6",
        "epochs so far 1",
        "last epoch: loss 0.2000",
        "there were some",
    ):
        assert words in text, words
    assert "Data cannot be read now" in text and "digest 00ff" in text  # the dataset was never there
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    trained_on_its_data(run, tmp_path)
    Path(RunPaths(run).checkpoint(6, 2)).mkdir(parents=True)
    report.main([run])  # again, with what is there by now
    text = " ".join(re.sub("<[^>]*>", " ", Path(url).read_text()).split())
    assert "split train 100 records" in text and "newest checkpoint step-0000000006.g0002" in text


def test_scores_of_followed_checkpoints_are_lines_of_the_report(run: str) -> None:
    folder = Path(RunPaths(run).evaluations("test-0123"))
    folder.mkdir(parents=True)
    for step, generation, loss in ((3, 1, 0.875), (6, 1, 0.75), (6, 2, 0.625)):
        result = {
            "split": "test",
            "dataset": "/data/<visits>",
            "metrics": {"loss": loss, "log_loss": 0.5, "odd": "nan"},
        }
        ref = CheckpointRef(step, generation)
        document = {"format_version": 1, "kind": "evaluation", **ref.to_json(), "result": result}
        (folder / f"{ref}.json").write_bytes(seal(document))
    fs, paths = filesystem(run), RunPaths(run)
    scores = followed(fs, paths)
    assert {step: row["loss"] for step, row in scores["test of <visits>"].items()} == {3: 0.875, 6: 0.625}
    history = read_summary(run)
    assert list(curve_names(history)) == [HOSTILE, "loss"]
    assert list(curve_names(history, scores)) == [HOSTILE, "log_loss", "loss"]
    text = Path(write_report(run)).read_text()
    assert "log_loss by epoch" in text and text.count("test of &lt;visits&gt;") >= 2 and "<visits>" not in text
    (folder / f"{CheckpointRef(6, 2)}.json").write_text("{")
    with pytest.raises(CorruptionError):
        write_report(run)


def test_jobs_train_writes_the_report_of_a_run_that_has_none(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = RunResult(
        run=run, generation=2, steps=6, epochs=1, epochs_asked=1, metrics={}, samples=9, seconds=1.0, samples_per_s=9.0,
        restarts=1, checkpoint=None, model=None, left_over=[],
    )  # fmt: skip
    url = Path(RunPaths(run).report(2))
    train.report(result)
    assert capsys.readouterr().out == f"report {url}\n" and "state" in url.read_text()
    url.write_text("with an evaluation")
    train.report(result)  # of a run that was complete before the call
    assert url.read_text() == "with an evaluation"
    url.unlink()
    (Path(RunPaths(run).metrics(1)) / "part-00000.jsonl").write_text("{")
    train.report(result)
    told = capsys.readouterr().err
    assert "the report was not written: " in told and f"next: lockstep report {run}" in told


def test_the_page_stands_alone_and_escapes_what_comes_from_data(run: str, tmp_path: Path) -> None:
    trained_on_its_data(run, tmp_path)
    result = RunResult(
        run=run, generation=2, samples=9, seconds=1.0, restarts=1, steps=6, epochs=1, epochs_asked=1,
        samples_per_s=12.3, left_over=["00ff"], metrics={HOSTILE: 0.5}, checkpoint="step-0000000006.g0002",
        model=HOSTILE, class_counts=[90, 10],
        restart_log=[{"generation": 2, "level": 1, "seconds": 8.25, "parts": {"claim": 0.01, HOSTILE: 8.2}}],
    ).to_json()  # fmt: skip
    Path(RunPaths(run).results).mkdir()
    Path(RunPaths(run).result(2)).write_bytes(seal(result))
    evaluation = {
        "split": HOSTILE, "samples": 25, "metrics": {"auc": 0.75, "loss": 0.25}, "class_counts": [20, 5],
        "baseline": {"name": "rate:page", "metrics": {"auc": 0.5}}, "intervals": {"auc": (0.7, 0.8)},
        "difference": {"auc": {"value": 0.25, "interval": None}},
        "calibration": {
            "of": "yes", "brier": 0.1525, "expected_error": 0.0625,
            "bins": [{"samples": 12, "predicted": 0.1, "observed": 0.2}],
        },
        "confusion": {"classes": [HOSTILE, "1"], "samples": [[17, 3], [1, 4]]}, "class_names": [HOSTILE, "1"],
        "slices": {"page": [
            {"value": HOSTILE, "samples": 25, "metrics": {"auc": 0.625}, "intervals": {"auc": [0.5, 0.75]}},
        ]},
    }  # fmt: skip
    page = Path(write_report(run, evaluation)).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    text = page.replace("http-equiv", "")
    assert "http" not in text.replace("http://www.w3.org/", "").replace("https://matplotlib.org/", "").replace(
        "http://purl.org/", ""
    ).replace("http://creativecommons.org/", "")  # names of XML vocabularies; nothing is fetched
    assert page.count("<svg") == 3  # loss, the one other metric, and calibration
    assert "Calibration of yes: expected error 0.0625, Brier score 0.1525" in page
    assert re.search(r">17</td><td [^>]*>3</td>", page)
    assert "<td>25</td><td>0.6250</td><td>0.5000 to 0.7500</td>" in page
    assert "25 records: 20 &lt;script&gt;alert(1)&lt;/script&gt;, 5 1" in page, "classes by their names"
    assert "restart: generation 2" in page and "in place (level 1) and made its first step 8.2 s after" in page
    cells = ('0.7500<br><span class="dim">0.7000 to 0.8000</span>', "0.5000", "0.2500")
    assert f"<tr><th>auc</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" in page
    assert page == Path(write_report(run, evaluation)).read_text()
    assert page == Path(write_report(run)).read_text(), "a later report keeps the evaluation"


def test_a_skipped_step_may_have_no_number_for_a_loss(run: str) -> None:
    """In mixed_float16 the forward pass may overflow too."""
    part = Path(RunPaths(run).metrics(2)) / "part-00000.jsonl"
    skipped = {"kind": "step", "step": 7, "epoch": 0, "loss": "nan", "skipped": True, "seconds": 1.0}
    part.write_text(part.read_text() + json.dumps(skipped) + "\n")
    assert "<svg" in epoch_curve(read_summary(run), LOSS)


def test_both_curves_and_the_time_of_a_validation_are_shown(run: str) -> None:
    both = {"loss": 0.4, "auc": 0.7, "val_loss": 0.5, "val_auc": 0.6, "val_log_loss": 0.45}
    lines = [
        {"kind": "epoch", "step": 3, "epoch": 0, "metrics": {"loss": 0.5, "auc": 0.6}, "seconds": 1.0},
        {"kind": "epoch", "step": 6, "epoch": 1, "metrics": both, "validation": {"seconds": 2.0}, "seconds": 1.0},
        {"kind": "time", "rank": 0, "step": 3, "steps": 3, "starting_s": 0.0, "data_s": 1, "compute_s": 1,
         "exchange_s": 1, "checkpoint_s": 0, "validation_s": 0.0, "other_s": 1, "sent_bytes": 0},
    ]  # fmt: skip
    part = Path(RunPaths(run).metrics(2)) / "part-00000.jsonl"
    part.write_text("".join(json.dumps(row) + "\n" for row in lines))
    history = read_summary(run)
    assert history.epochs[1]["validation"] == {"seconds": 2.0}
    assert list(curve_names(history)) == ["auc", "log_loss", "loss"]
    auc, log_loss = (epoch_curve(history, name) for name in ("auc", "log_loss"))
    assert "training" in auc and "validation" in auc and "validation" in log_loss and "training" not in log_loss
    assert "validating" not in time_rows(history)[0][1]
    history.times[0]["validation_s"] = 4.0
    assert "validating 50.0%" in time_rows(history)[0][1]


@given(
    st.dictionaries(
        st.sampled_from(["auc", "log_loss", "loss", "loss_without_regularisation"]),
        st.dictionaries(st.sampled_from(["", "val_"]), st.lists(st.sampled_from([0.25, 0.5]), min_size=1, max_size=2)),
    )
)
def test_no_curve_is_shown_twice_and_none_is_lost(made: dict[str, dict[str, list[float]]]) -> None:
    curves = {name: {key: list(enumerate(values)) for key, values in each.items()} for name, each in made.items()}
    found = distinct(curves)
    assert sorted([*found, *(twin for twins in found.values() for twin in twins)]) == sorted(curves)
    for name, twins in found.items():
        assert all(curves[twin].items() <= curves[name].items() for twin in twins), "its lines are among those shown"
        assert not any(curves[name] and curves[name].items() <= curves[one].items() for one in found if one != name)


def test_the_loss_in_another_precision_is_one_curve_with_the_log_loss(run: str) -> None:
    metrics = {"loss": 0.4, "val_loss": 0.50000001, "val_log_loss": 0.5}
    epoch = {"kind": "epoch", "step": 6, "epoch": 0, "metrics": metrics, "seconds": 1.0}
    (Path(RunPaths(run).metrics(2)) / "part-00000.jsonl").write_text(json.dumps(epoch) + "\n")
    text = Path(write_report(run)).read_text()
    assert "loss (log_loss is the same) by epoch" in text and text.count("<figcaption>") == 1


def test_a_dataset_is_linked_with_its_page_or_how_to_make_one(run: str, tmp_path: Path) -> None:
    trained_on_its_data(run, tmp_path)
    text = Path(write_report(run)).read_text()
    assert f'<a href="../../data">data</a>, not described yet: <code>lockstep describe {tmp_path}/data' in text
    (tmp_path / "data.html").touch()
    assert 'described in <a href="../../data.html">data.html</a>' in Path(write_report(run)).read_text()


def test_what_was_trained_how_and_when_is_told_from_the_run_s_own_record() -> None:
    config = {
        "model": {"model": "resnet20"},
        "data": {"datasets": ["a", "b"], "split": "train", "global_batch": 128, "seed": 0},
        "ranks": {"num_ranks": 2},
        "step": {"learning_rate": None},
    }
    document = {"config": config, "created_at": "2026-01-02T03:04:05+00:00", "versions": {"keras": "3"}}
    claims = {
        1: Claim(1, "a", None, epochs=2, num_ranks=2),
        2: Claim(2, "b", CheckpointRef(300, 1), epochs=2, num_ranks=4),
        3: Claim(3, "c", CheckpointRef(300, 1), epochs=9, num_ranks=9),  # failed, and led to nothing
        4: Claim(4, "d", CheckpointRef(400, 2), epochs=5, num_ranks=4),
    }
    rows = dict(about_run(document, claims, {"generation": 4, "finished_at": "2026-01-02T04:00:00+00:00"}))
    assert rows == {
        "model": "resnet20", "datasets": "a, b", "split": "train", "ranks": "2, from step 300 on 4",
        "global batch": "128", "epochs asked for": "2, from step 400 on 5", "learning rate": "the model's own",
        "seed": "0", "begun": "2026-01-02T03:04:05+00:00", "finished": "2026-01-02T04:00:00+00:00",
        "versions": "keras 3",
    }  # fmt: skip


def test_checkpoints_and_reading_are_told_where_there_are_any(run: str, tmp_path: Path) -> None:
    saved = {"kind": "checkpoint", "bytes": 9, "blocked_s": 0.25, "written_s": 2.0, "cost_s": 0.5, "interval_s": 30}
    reading = {"kind": "reading", "rank": 0, "fetched_bytes": 4_000_000, "waited_s": 1.5}
    for generation, rows_of in (
        (1, [{**saved, "step": 2, "skipped": 0}, {**reading, "step": 2}, {**reading, "step": 3}]),
        (2, [{**saved, "step": 5, "skipped": 2, "cost_s": 1.5},
             {**reading, "step": 5, "cache_hits": 3, "cache_misses": 1, "cache_hit_bytes": 2_000_000,
              "pass_bytes": 3_000_000, "split_bytes": 40_000_000}]),
    ):  # fmt: skip
        part = Path(RunPaths(run).metrics(generation)) / "part-00001.jsonl"
        part.write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    history = read_summary(run)
    assert dict(checkpoint_rows(history)) == {
        "committed": "2", "skipped, while one was being written": "2",
        "steps stopped for": "0.250 s in the median, 0.250 s at most",
        "written in the background in": "2.000 s in the median, 2.000 s at most",
        "cost of one, including slower steps": "1.000 s in the median, 1.500 s at most",
    }  # fmt: skip
    # Two processes, of which the first told twice what it had read since it began.
    text = "8.0 MB fetched, 3.0 s waited for; an epoch reads 7.5% of the 40.0 MB of the split; "
    text += "3 of 4 reads from the cache (75.0%), 2.0 MB"
    assert reading_rows(history) == [("rank 0", text)]
    page = render(run, [], [], history, [], None)
    assert "<h2>Checkpoints</h2>" in page and text in page


def test_slow_ranks_and_what_each_rank_used_are_shown_where_there_are_any(run: str) -> None:
    used = {"kind": "usage", "rank": 0, "host": HOSTILE, "limit_bytes": 2000 << 20, "limit_of": "container"}
    slow = {"kind": "straggler", "step": 5, "rank": 1, "host": "b", "what": "input", "own_s": 0.2, "others_s": 0.1}
    lines = [
        {**used, "step": 0, "rss_bytes": 500 << 20, "held_bytes": 600 << 20, "cores": 0.0},
        {**used, "step": 4, "rss_bytes": 900 << 20, "held_bytes": 1800 << 20, "cores": 0.5},
        {**used, "step": 5, "rss_bytes": 800 << 20, "held_bytes": 1700 << 20, "cores": 0.75, "gpu_bytes": 1 << 30,
         "gpu_share": 0.25},
        slow,
    ]  # fmt: skip
    part = Path(RunPaths(run).metrics(2)) / "part-00001.jsonl"
    part.write_text("".join(json.dumps(row) + "\n" for row in lines))
    history = read_summary(run)
    assert usage_rows(history)[1:] == [
        (f"rank 0 on {HOSTILE}", "900 MiB", "90% of 2,000 MiB (container)", "0.62", "1,024 MiB, 25% busy")
    ]
    text = "rank 1 on b: 200.0 ms of its own a step, the others 100.0 ms, most of it for input"
    assert straggler_rows(history) == [("from step 5", text)]
    page = render(run, [], [], history, [], None)
    assert text in page and "<td>900 MiB</td>" in page and HOSTILE not in page


def test_a_page_may_be_written_elsewhere_and_the_run_stays_as_it_is(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(run).rglob("*")}
    page = tmp_path / "pages" / "page.html"
    with pytest.raises(NotFoundError, match="no such folder"):
        report.main([run, "--html", str(page)])
    page.parent.mkdir()
    for _ in range(2):
        assert report.main([run, "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"report {page}\n" * 2
    assert {path: path.stat().st_mtime_ns for path in Path(run).rglob("*")} == before
    assert page.read_text() == Path(write_report(run)).read_text()
    page.write_text("mine")
    with pytest.raises(ExistsError, match="is not a page of lockstep report"):
        report.main([run, "--html", str(page)])
    assert page.read_text() == "mine"
