"""The pipeline's configuration, its bar and its table; whole pipelines run on YARN and in the demo."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.etl.tables import TableConfig
from lockstep.jobs import pipeline
from lockstep.jobs._pipeline import Outcome, Pipeline, table
from lockstep.storage.errors import ConfigError, DataError, LockstepError, NotFoundError
from tests.docs.steps import ROOT

LOG = """
[pipeline]
name = "log"
metric = "auc"
[etl_logs]
input = ["access.log"]
[train]
model = "logistic"
num_ranks = 2
global_batch = 16
epochs = 1
[evaluate]
baseline = "rate:page"
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("access.log").write_bytes(b'a - - [01/Jul/1995:00:00:01 -0400] "GET / HTTP/1.0" 200 1\n')
    path = Path("conf.toml")
    path.write_text(LOG)
    return path


def test_steps_share_dataset_and_run_in_one_folder(conf: Path) -> None:
    loaded = Pipeline.load(str(conf), "out/now")
    assert (loaded.dataset, loaded.run_url) == ("out/now/log/dataset", "out/now/log/run")
    assert loaded.train_args.datasets == [loaded.dataset] and loaded.evaluate_args.run == [loaded.run_url]
    loaded.check()


def test_lists_are_what_flags_with_commas_are(conf: Path) -> None:
    tables = 'log_format = "csv"\nschema = "s.toml"\ncolumns = ["a", "b"]\nid_columns = ["a"]\ninput'
    conf.write_text(LOG.replace("input", tables).replace("epochs = 1", 'epochs = 1\nsplit = ["fold-0", "fold-1"]'))
    Path("s.toml").write_text("[[fields]]\nname = 'b'\ndtype = 'bool'\nkind = 'label'\n")
    loaded = Pipeline.load(str(conf), "out")
    assert loaded.train_args.split == "fold-0,fold-1"
    Path("access.log").write_text("1,true\n2,false\n")
    loaded.check()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[evaluate]", "[evaluation]", "tables etl_logs, evaluation, pipeline, train (perhaps `evaluate`)"),
        ("[etl_logs]", "[etl_images]\nsource = 'idx'\n[etl_logs]", "is not a pipeline"),  # two sources of one dataset
        ("num_ranks = 2", "num_ranks = 2\nranks = 2", "(perhaps `num_ranks`)"),
        ("epochs = 1", "epochs = 'many'", "invalid arguments"),
        ("epochs = 1", "epochs = 0", "the training configuration's `epochs` is invalid"),
        ('metric = "auc"', "", "invalid arguments"),
        ('metric = "auc"', 'metric = "auc"\nat_least = "much"', "invalid arguments"),
        ('metric = "auc"', 'metric = "auc"\nat_least = "nan"', "invalid arguments"),
        ('name = "log"', 'name = "../log"', "it names a folder"),
        ('name = "log"', 'name = ""', "it names a folder"),
        ('baseline = "rate:page"', "", "there is no baseline to compare"),
        ("[pipeline]", "pipeline = 3\n[other]", "`pipeline`"),
        ("access.log", "absent.log", "absent.log"),
        ("name =", "name", "is not TOML"),
        ("epochs = 1", "epochs = 1\nmaster = 'local[2]'", "does nothing in the steps of a pipeline"),
        ("epochs = 1", "epochs = 1\ncache_bytes = 1000", "--cache-bytes without --cache DIR"),
    ],
)
def test_wrong_configurations_are_refused_before_spark_starts(conf: Path, old: str, new: str, named: str) -> None:
    assert old in LOG
    conf.write_text(LOG.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        pipeline.main(["--config", str(conf)])
    assert named in str(caught.value) or named == "`pipeline`"
    assert caught.value.exit_code == 2 and caught.value.next_step
    assert not Path(".demo").exists()


def test_two_pipelines_of_one_name_are_refused(conf: Path) -> None:
    Path("other.toml").write_bytes(conf.read_bytes())
    with pytest.raises(ConfigError, match="two pipelines have the same name"):
        pipeline.main(["--config", str(conf), "other.toml"])


class Nothing(dict[str, Any]):
    """What a step returns that did not run: an evaluation, and a manifest of which nothing was rejected."""

    counts = SimpleNamespace(quarantined=0)


NOTHING = Nothing(metrics={"accuracy": 0.5})


def test_a_metric_that_the_model_has_not(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "_step", lambda self, name, step: NOTHING)
    with pytest.raises(ConfigError, match="no metric `auc`") as caught:
        Pipeline.load(str(conf), "out").run(cast(Any, None))
    assert "accuracy" in caught.value.allowed


def test_a_metric_that_the_baseline_has_not(conf: Path) -> None:
    """A loss that regularisers add to is the model's own."""
    metrics = {"loss": 0.5, "loss_without_regularisation": 0.4}
    evaluation = {"metrics": metrics, "baseline": {"name": "majority", "metrics": {"loss_without_regularisation": 0.6}}}
    conf.write_text(LOG.replace('metric = "auc"', 'metric = "loss"'))
    with pytest.raises(ConfigError, match="majority has no metric `loss`") as caught:
        Pipeline.load(str(conf), "out")._bar(evaluation)
    assert "loss_without_regularisation" in caught.value.allowed


@pytest.mark.parametrize(("launcher", "name"), [("local", "OnHost"), ("barrier", "OnSpark")])
def test_the_training_s_launcher_is_the_file_s(
    conf: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, name: str
) -> None:
    conf.write_text(LOG.replace("epochs = 1", f"epochs = 1\nlauncher = '{launcher}'"))
    launches = []
    monkeypatch.setattr("lockstep.jobs._pipeline.train_run", lambda config, launch, **_: launches.append(type(launch)))
    monkeypatch.setattr(Pipeline, "_step", lambda self, name, step: step() if name == "train" else NOTHING)
    with pytest.raises(ConfigError, match="no metric `auc`"):
        Pipeline.load(str(conf), "out").run(cast(Any, None))
    assert [kind.__name__ for kind in launches] == [name]


def test_missing_files_are_named() -> None:
    with pytest.raises(NotFoundError, match=r"absent\.toml"):
        pipeline.main(["--config", "absent.toml"])
    with pytest.raises(ConfigError, match="invalid arguments"):
        pipeline.main([])


def outcome(value: float, bar: float) -> Outcome:
    counts = SimpleNamespace(read=10, written=7, quarantined=1, dropped={"censored": 2})
    result = SimpleNamespace(
        steps=5, epochs=0.5, epochs_asked=2, first_step_s=3.21, samples_per_s=9.6, run="r", model="m"
    )
    evaluation: dict[str, Any] = {"metrics": {"auc": value}, "baseline": {"name": "rate:page", "metrics": {"auc": bar}}}
    return Outcome(
        name="log", manifest=cast(Any, SimpleNamespace(counts=counts)), result=cast(Any, result), metric="auc",
        evaluation=evaluation, bar=bar, bar_name="rate:page", seconds=3.0, dataset="d", report="h",
    )  # fmt: skip


def test_table_tells_every_count_and_path() -> None:
    lines = [" ".join(line.split()) for line in table([outcome(0.71, 0.68)]).splitlines()]
    for line in ("read 10", "written 7", "quarantined 1", "dropped 2 censored", "steps 5", "metric auc 0.7100"):
        assert line in lines
    assert "baseline 0.6800 (rate:page)" in lines
    assert lines[-4:] == ["log: dataset d", "log: run r", "log: model m", "log: report h"]


@pytest.mark.parametrize(
    ("value", "good"),
    [(0.70, True), (0.68, True), (0.67, False), (float("nan"), False)],  # a model of NaN reaches no bar
)
def test_a_model_below_its_bar_fails_the_job(
    conf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float, good: bool
) -> None:
    monkeypatch.setattr(pipeline, "run", lambda args, folder: [outcome(value, 0.68)])
    error: LockstepError | None = None
    try:
        pipeline.main(["--config", str(conf)])
    except DataError as caught:
        error = caught
    assert (error is None) is good
    assert "metric" in capsys.readouterr().out  # the table is told in any case


def test_the_dataset_may_be_made_of_a_table(conf: Path) -> None:
    conf.write_text(LOG.replace("[etl_logs]\ninput", "[etl_table]\nid_columns = ['id']\nlabel = 'label'\ninput"))
    loaded = Pipeline.load(str(conf), "out")
    assert isinstance(loaded.etl, TableConfig) and loaded.etl.output == loaded.dataset
    loaded.check()
    conf.write_text(LOG.replace("[etl_logs]", "[etl_table]\nid_columns = ['id']\n[etl_logs]"))
    with pytest.raises(ConfigError, match="is not a pipeline") as caught:
        Pipeline.load(str(conf), "out")
    assert "one of [etl_logs], [etl_images], [etl_table]" in caught.value.allowed


def test_the_help_and_the_tutorial_say_each_key_of_the_table(
    conf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        pipeline.main(["--help"])
    printed = capsys.readouterr().out
    conf.write_text(LOG.replace("[pipeline]\n", "[pipeline]\ncolour = 1\n"))
    with pytest.raises(ConfigError) as caught:
        Pipeline.load(str(conf), "out")
    keys = [word.strip("`") for word in re.findall(r"[a-z_]+", caught.value.allowed)]
    assert {"name", "metric", "at_least"} == set(pipeline.KEYS) <= set(keys), caught.value
    page = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    assert [key for key in pipeline.KEYS if f"{key}: " not in printed or f"\n| `{key}` | " not in page] == []
