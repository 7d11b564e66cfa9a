"""The ETL jobs' calls: four-part errors before Spark starts, and `--help`; a job that is refused is in test_logs.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.features.images.choices import FIT_WORDS, FITS
from lockstep.features.images.resize import fit
from lockstep.jobs import etl_images, etl_logs
from lockstep.storage.errors import ConfigError, DataError, ExistsError, LockstepError, NotFoundError


def test_what_is_told_before_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("log").write_bytes(b"x\n")
    Path("empty").touch()
    cases: list[tuple[list[str], type[LockstepError], int]] = [
        (["--input", "none", "--output", "out"], NotFoundError, 2),
        (["--input", "empty", "--output", "out"], DataError, 2),
        (["--input", "log", "--output", "there"], ExistsError, 2),
        (["--input", "log", "--output", "out", "--split", "x"], ConfigError, 2),
        (["--input", "log", "--output", "out", "--shard-bytes", "x"], ConfigError, 2),
        (["--input", "log", "--output", "out", "--colour", "red"], ConfigError, 2),
        (["--input", "log", "--output", "gopher://x/y"], ConfigError, 2),
        (["--output", "out"], ConfigError, 2),
    ]
    for job in (etl_logs, etl_images):
        for flags, kind, code in cases:
            with pytest.raises(kind) as caught:
                job.main(flags)
            assert caught.value.exit_code == code
            assert caught.value.got and caught.value.allowed and caught.value.next_step


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for job, flags in ((etl_logs, ["--log-format", "--label"]), (etl_images, ["--source", "--image-size"])):
        with pytest.raises(SystemExit) as ended:
            job.main(["--help"])
        text = capsys.readouterr().out
        assert ended.value.code == 0
        for flag in [
            *flags,
            "--input",
            "--output",
            "--max-bad",
            "--format",
            "--split",
            "--shard-bytes",
            "--seed",
            "--config",
        ]:
            assert flag in text


def test_the_fits_do_what_their_help_says() -> None:
    """A white picture twice as wide as high, with a black rim at its left and right."""
    wide = np.full((1, 8, 16, 1), 255, dtype=np.uint8)
    wide[:, :, :4] = wide[:, :, 12:] = 0
    stretched, cut, kept = (fit(wide, 4, 4, how)[0, :, :, 0].tolist() for how in FITS)
    assert [name in FIT_WORDS for name in FITS] == [True] * 3
    assert stretched == [[0, 255, 255, 0]] * 4, "all of it, narrower"
    assert cut == [[255] * 4] * 4, "its middle"
    assert kept == [[0] * 4, [0, 255, 255, 0], [0, 255, 255, 0], [0] * 4], "all of it in its shape, black around it"
