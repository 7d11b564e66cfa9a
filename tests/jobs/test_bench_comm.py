"""lockstep bench_comm: what is refused before ranks start, the table's arithmetic, and two real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.jobs._cli import size
from lockstep.jobs.bench_comm import main, parser
from lockstep.storage.errors import CommunicationError, ConfigError, ExistsError
from lockstep.training.profiling.bench_comm import Row, table


@pytest.mark.parametrize(("text", "nbytes"), [("4096", 4096), ("4K", 4096), ("1M", 1 << 20), ("2G", 2 << 30)])
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--num-ranks", "1"), "num_ranks"),  # nothing to measure
        (("--num-ranks", "2", "--sizes", "4k"), "4k"),
        (("--num-ranks", "2", "--sizes", "0"), "sizes"),
        (("--num-ranks", "2", "--sizes", "6"), "multiples of 4"),
        (("--num-ranks", "2", "--rounds", "0"), "--rounds"),
        (("--num-ranks", "2", "--algorithm", "star"), "star"),
        (("--num-ranks", "2", "--backend", "shm", "--algorithm", "ring"), "no algorithm `ring`"),
        (("--num-ranks", "2", "--backend", "tcp", "nccl"), "does not authenticate its peers"),
        (("--num-ranks", "2", "--master", "yarn"), "--master without --launcher barrier"),  # local is the default
    ],
)
def test_what_cannot_be_right_is_told_before_ranks_start(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        main(flags)


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("mine")
    with pytest.raises(ExistsError):
        main(["--num-ranks", "2", "--json", str(tmp_path / "rows.json")])


def test_bandwidths() -> None:
    row = Row(
        nbytes=4_000_000,
        backend="tcp",
        algorithm="ring",
        asked="auto",
        median_s=0.002,
        fastest_s=0.001,
        slowest_s=0.003,
        wrong=0,
    )
    assert row.algorithm_bytes_per_s == 2e9
    assert row.bus_bytes_per_s(4) == 3e9  # 2(N-1)/N of it crosses each link
    line = table([row], 4).splitlines()[-1].split()
    assert line == ["4000000", "tcp", "auto:", "ring", "2000.0", "1000.0", "3000.0", "2.000", "3.000", "0"]


@pytest.mark.slow
def test_two_ranks_of_this_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    flags = ["--num-ranks", "2", "--sizes", "4K", "64K", "--rounds", "2", "--json", str(file)]
    assert main([*flags, "--backend", "tcp"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["nbytes"] for row in rows} == {4096, 65536}
    assert {row["backend"] for row in rows} == {"tcp"}
    assert all(row["wrong"] == 0 and 0 < row["fastest_s"] <= row["median_s"] <= row["slowest_s"] for row in rows)
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 2 + len(rows)


def test_wrong_sums_end_the_job_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(
        nbytes=8, backend="tcp", algorithm="ring", asked="auto", median_s=1.0, fastest_s=1.0, slowest_s=1.0, wrong=3
    )
    monkeypatch.setattr("lockstep.jobs.bench_comm.measured", lambda config, launch: [row])
    with pytest.raises(CommunicationError, match="wrong sums") as caught:
        main(["--num-ranks", "2"])
    assert caught.value.exit_code == 1
    assert "ring" in capsys.readouterr().out  # the table is shown all the same


def test_the_help_names_every_flag() -> None:
    text = parser().format_help()
    for flag in ("--num-ranks", "--sizes", "--backend", "--algorithm", "--rounds", "--json", "--launcher", "--master"):
        assert flag in text
