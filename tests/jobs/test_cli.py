"""What every job's command line does with a wrong configuration file: one error of ours, exit code 2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs import export
from lockstep.jobs._cli import JobParser, joined, names, run_job
from lockstep.spark.session import spark_session
from lockstep.storage.errors import ConfigError
from lockstep.storage.fs import filesystem


def parsed(argv: Sequence[str]) -> Any:
    job = JobParser("some", "A job.", "some")
    job.add_argument("--number", type=int)
    job.add_argument("--names", type=names, default=())
    job.add_argument("--text", type=joined)
    job.add_argument("--many", nargs="+")
    job.add_argument("--bare", action="store_true")
    return job.parse(argv)


@pytest.mark.parametrize(
    ("argv", "got"),
    [
        (["--nunber", "1"], "unknown flag --nunber (perhaps `--number`)"),  # not: --needed is required
        (["--needed=1", "--nunber=1", "--zzz"], "unknown flag --nunber (perhaps `--number`), --zzz"),
        (["--needed"], "argument --needed: expected one argument"),
        (["--", "--nunber"], "the following arguments are required: --needed"),
    ],
)
def test_a_misspelled_flag_is_named_first(argv: list[str], got: str) -> None:
    job = JobParser("some", "A job.", "some")
    job.add_argument("--number", type=int)
    job.add_argument("--needed", required=True)
    with pytest.raises(ConfigError) as caught:
        job.parse(argv)
    assert caught.value.got == got


@pytest.mark.parametrize(
    ("content", "argv"),
    [
        (None, ["--config"]),
        (None, ["--config", "absent.toml"]),
        (None, ["--config", "."]),
        ("", ["--config", "a.toml/b.toml"]),
        ("", ["--config", "x" * 300]),
        ("x = [", ["--config", "a.toml"]),
        ("some = 1", ["--config", "a.toml"]),
        ("[some]\ncolour = 1", ["--config", "a.toml"]),
        ("[some]\nnumber = [1, 2]", ["--config", "a.toml"]),
        ("[some]\nnumber = {a = 1}", ["--config", "a.toml"]),
        ("[some]\nnumber = []", ["--config", "a.toml"]),
        ("[some]\nnumber = true", ["--config", "a.toml"]),
        ("number = 1", ["--config", "a.toml"]),  # of no table: it was passed over
        ("[sume]\nnumber = 1", ["--config", "a.toml"]),
        ("[some]\nnames = [['a']]", ["--config", "a.toml"]),
        ("[some]\nnames = ['a,b', 'c']", ["--config", "a.toml"]),
        ("[some]\nbare = 'yes'", ["--config", "a.toml"]),
        ("[some]\nmany = [{a = 1}]", ["--config", "a.toml"]),
    ],
)
def test_a_wrong_file_is_one_error_of_four_parts(
    content: str | None,
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    # With calls left behind, as by tests of frozen daemons before it, run_job would end this very process.
    monkeypatch.setattr("lockstep.storage.files.deadlines.left_behind", lambda: 0)
    if content is not None:
        Path("a.toml").write_text(content)
    with pytest.raises(SystemExit) as ended:
        run_job(parsed, argv)
    assert ended.value.code == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0].strip() for line in told] == ["error", "got", "allowed", "next"]


def test_a_list_is_taken_wherever_a_flag_takes_several_values(tmp_path: Path) -> None:
    """And the tables of other jobs are left to them."""
    path = tmp_path / "a.toml"
    path.write_text("""
[some]
names = ["a", "b c"]
text = ["fold-0", "fold-1"]
many = ["x", 2]
number = [3]
bare = true
[train]
epochs = 1
""")
    found = parsed(["--config", str(path)])
    assert (found.names, found.text, found.many) == (("a", "b c"), "fold-0,fold-1", ["x", "2"])
    assert (found.number, found.bare) == (3, True)
    path.write_text("[some]\nnames = 'a,b'\ntext = 'x'\nmany = 'y'\nbare = false\n")
    found = parsed(["--config", str(path), "--many", "z", "w"])
    assert (found.names, found.text, found.many, found.bare) == (("a", "b"), "x", ["z", "w"], False)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ("[some]\nnmae = 'a'", "nmae = 'a' (perhaps `names`)"),
        ("[some]\nmani = 'a'", "mani = 'a' (perhaps `many`)"),
        ("[som]\nmany = 'a'", "[som] (perhaps `some`)"),
        ("[etl_log]\ninput = 'a'", "[etl_log] (perhaps `etl_logs`)"),
        ("[some]\nzzz = 1", "zzz = 1"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_one(tmp_path: Path, content: str, got: str) -> None:
    (tmp_path / "a.toml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        parsed(["--config", str(tmp_path / "a.toml")])
    assert caught.value.got == got and caught.value.exit_code == 2


@pytest.mark.parametrize("master", ["", "nonsense", "local[0]", "local[x]", "local[", "spark://"])
def test_a_master_that_is_none_is_told_before_java_starts(master: str) -> None:
    with pytest.raises(ConfigError, match="--master is invalid") as caught, spark_session("test", master):
        pass
    assert caught.value.allowed and caught.value.next_step


@pytest.mark.parametrize("url", ["hdfs://", "hdfs:///x", "hdfs://h:notaport/x"])
def test_an_hdfs_url_that_names_no_namenode_is_a_wrong_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(ConfigError, match="names no NameNode") as caught:
        filesystem(url).stat(url)
    assert caught.value.exit_code == 2 and caught.value.next_step


@pytest.mark.parametrize("text", ["first", "-3", "4e2", ""])
def test_a_checkpoint_that_is_none_is_told_with_what_may_stand_there(text: str) -> None:
    with pytest.raises(ConfigError, match="neither last, best nor a step"):
        export.parser().parse(["--run", "r", "--output", "o", f"--checkpoint={text}"])
