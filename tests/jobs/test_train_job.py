"""lockstep train: its flags are the configuration, and what cannot be right is told before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.jobs import verify
from lockstep.jobs._train import config_of
from lockstep.jobs.train import main, parser
from lockstep.process.installed import ROOT
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.storage.fs import filesystem
from lockstep.training.config import TrainConfig, option_names
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.run_json import read_run
from tests.storage.dataset.test_increments import days
from tests.training._tiny import write_table
from tests.training.reading.test_fitted_files import write as write_folds

NEEDED = ("--model", "logistic", "--num-ranks", "2", "--global-batch", "8", "--epochs", "1")


def flags(tmp_path: Path, *more: str) -> list[str]:
    return ["--dataset", str(tmp_path / "data"), "--run", str(tmp_path / "run"), *NEEDED, *more]


def test_defaults_are_the_configuration_s(tmp_path: Path) -> None:
    config = config_of(parser().parse(flags(tmp_path)))
    plain = TrainConfig(
        datasets=(str(tmp_path / "data"),),
        run=str(tmp_path / "run"),
        model="logistic",
        num_ranks=2,
        global_batch=8,
        epochs=1,
    )
    assert config == plain
    assert TrainConfig.from_json(config.to_json()) == config


def test_flags_that_need_another_one_are_taken_with_it(tmp_path: Path) -> None:
    config = config_of(parser().parse(flags(tmp_path, "--cache", "/disk", "--cache-bytes", "5")))
    assert config.reading.cache_bytes == 5


def test_a_file_may_have_a_table_for_each_part(tmp_path: Path) -> None:
    """It gives what the same keys give without tables, in which files of before stay as they are."""
    file = tmp_path / "run.toml"
    file.write_text(
        "[train]\nseed = 3\nmodel = 'mlp'\n[train.step]\nbatchnorm = 'local'\nstrategy = 'async'\n"
        "[train.way]\nstaleness = 2\n[train.limits]\nstall_limit = 9.5\n"
    )
    same = ("--seed", "3", "--batchnorm", "local", "--strategy", "async", "--staleness", "2", "--stall-limit", "9.5")
    call = flags(tmp_path, "--config", str(file))
    assert config_of(parser().parse(call)) == config_of(parser().parse(flags(tmp_path, *same)))
    for wrong, named in (
        ("[train.limits]\nseed = 3", r"unknown key `seed` in \[train.limits\]"),
        ("[train.seed]\nseed = 3", r"`seed` in \[train\]"),
        ("[train]\nstep = 3", r"unknown key `step` in \[train\]"),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=named):
            parser().parse(call)


def test_every_field_has_a_flag(tmp_path: Path) -> None:
    text = parser().format_help()
    for option in option_names():
        name = {"datasets": "dataset", "extra": "set"}.get(option, option.removesuffix("_s")).replace("_", "-")
        assert f"--{name} " in text or f"--{name}\n" in text or f"[--{name}]" in text, option


def test_help_names_default_and_choices_of_each_flag(tmp_path: Path) -> None:
    """A flag has the type, the sentence and the default of its field; what is not given is left to the field."""
    text = " ".join(parser().format_help().split())
    assert "--window-bytes N Memory of a rank in which samples are shuffled, over all lanes (default 8 MiB)" in text
    assert "--start-limit S Seconds in which all ranks must start (default 300)" in text
    assert "--tls {on,off} Encrypt" in text and "(default: the model's own)" in text and "crop:pixels" in text
    given = flags(tmp_path, "--mix", "3", "1", "--warm-up-epochs", "0.5", "--canonical", "--augment", "flip", "crop:4")
    args = vars(parser().parse(given))
    assert (args["mix"], args["warm_up_epochs"], args["canonical"]) == ([3, 1], 0.5, True)
    several = flags(tmp_path, "--set", "width=64", "decay=1e-4", "--set", "width=32")  # the last one counts
    assert config_of(parser().parse(several)).model.extra == {"width": 32, "decay": 1e-4}
    assert args["augment"] == "flip crop:4" and not args.keys() & {"seed", "audit", "launcher", "split"}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--epochs", "0"), "epochs"),
        (("--lanes", "3"), "lanes"),
        (("--run", "webhdfs://host:1/run"), "run"),
        (("--dataset", "a", ""), "--dataset"),
        (("--precision", "float16"), "--precision"),
        (("--learning-rate", "-1"), "learning_rate"),
        (("--checkpoint-every", "0s"), "--checkpoint-every"),
        (("--heartbeat-limit", "1"), "seconds from 2 up"),  # a heart beats once a second
        # What does nothing without another flag, even where it says what is the default anyway.
        (("--cache-bytes", "17179869184"), "--cache-bytes without --cache DIR"),
        (("--master", "local[2]", "--launcher", "local"), "--master without --launcher barrier"),
        # Before Spark is asked for the dataset; the same for a run that goes on with fewer ranks.
        (("--canonical", "--num-ranks", "3", "--dataset", "hdfs://nowhere:1/d"), "with --canonical 1, 2, 4, ..."),
        # Before the dataset, which is not there, is looked for.
        (("--model", "logstic"), "Did you mean `logistic`?"),
        (("--set", "decays=0.1"), "perhaps `decay`"),
        (("--model", "mlp", "--set", "width=64", "--set", "dropout=1"), "below 1"),
        (("--set", "decay"), "'decay' is not NAME=VALUE"),
        (("--model", "resnet21"), "Did you mean `resnet20`?"),
        (("--model", "mymodel.build"), "Did you mean `mymodel:build`?"),
        (("--model", "no_such_module.models:build", "--launcher", "local"), "no module named `no_such_module`"),
        (("--min-ranks", "200"), "Correct --min-ranks"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, more: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main(flags(tmp_path, *more))
    assert named in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_missing_dataset_and_lanes_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("logistic", "resnet26"):
        with pytest.raises(NotFoundError, match="data"):
            main(flags(tmp_path, "--model", model))
    with pytest.raises(ConfigError, match=r"no module named `tests\.no_such`"):
        main(flags(tmp_path, "--model", "tests.no_such:build"))
    with monkeypatch.context() as submitted, pytest.raises(NotFoundError, match="data"):
        submitted.setenv("PYSPARK_GATEWAY_PORT", "1")  # --py-files and --archives may bring it to executors alone
        main(flags(tmp_path, "--model", "tests.no_such:build"))
    write_table(tmp_path / "data")
    with pytest.raises(ConfigError, match="9 ranks are more"):
        main(flags(tmp_path, "--num-ranks", "9"))
    six = ("--global-batch", "12", "--lanes", "6", "--batchnorm", "local")
    with pytest.raises(ConfigError, match=r"4 ranks cannot add up 6 lanes(?s:.*)divide 6: 1, 2\n"):
        main(flags(tmp_path, "--canonical", "--num-ranks", "4", *six))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [("--bad-images", "skip"), ("--augment", "flip")])
def test_images_of_a_table_are_refused_before_anything_starts(tmp_path: Path, more: tuple[str, ...]) -> None:
    write_table(tmp_path / "data")
    with pytest.raises(ConfigError, match="image"):
        main(flags(tmp_path, *more))
    assert not (tmp_path / "run").exists()


def test_one_fold_of_three_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_folds(tmp_path / "data", "w.fold-0", "w.fold-1", "w.fold-2")
    with pytest.raises(ConfigError, match=r"held out(?s:.*)all folds but one"):
        main(flags(tmp_path, "--split", "fold-1"))
    assert not (tmp_path / "run").exists()


def test_help_from_any_folder_loads_neither_tensorflow_nor_spark(tmp_path: Path) -> None:
    code = (
        f"import runpy, sys\nsys.argv = ['train.py', '--help']\n"
        f"try:\n    runpy.run_path({str(ROOT / 'jobs' / 'train.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'tensorflow', 'keras', 'pyspark'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "--global-batch" in done.stdout


@pytest.mark.slow
def test_since_trains_on_what_the_newest_continues_after_it(tmp_path: Path) -> None:
    """Each sample of the two later days is trained on once an epoch, none of the first."""
    urls = days(tmp_path / "days")
    call = ["--dataset", str(tmp_path / "days"), "--since", urls[0], "--run", str(tmp_path / "run"), *NEEDED]
    call += ["--audit", "--launcher", "local"]
    assert main(call) == 0
    stored = TrainConfig.from_json(read_run(filesystem(str(tmp_path)), RunPaths(str(tmp_path / "run")))["config"])
    assert (stored.data.datasets, stored.data.since) == (tuple(urls[1:]), urls[0])
    lines = [line for path in (tmp_path / "run").glob("**/*.csv") for line in path.read_text().splitlines()]
    seen = [int(line.split(",")[2], 16) for line in lines if line[0].isdecimal()]
    assert sorted(seen) == [*range(10, 18), *range(20, 28)]
    assert verify.main([str(tmp_path / "run")]) == 0
    assert main(call) == 0  # the same call finds the run finished
    call[3] = urls[1]
    with pytest.raises(ConfigError, match=r"begun with another `(records|dataset_digest)`"):
        main(call)
    with pytest.raises(ConfigError, match="one dataset, or a folder of increments"):
        config_of(parser().parse(["--dataset", *urls[1:], *call[2:]]))
