"""Secrets of a run and of its user are in nothing that others may read: arguments, environments, logs, files, Spark's
event log. Real ranks of `lockstep train`, on this host and in a barrier stage."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training._tiny import write_table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
TOKEN, OBJECT_KEY, SPARKS = "a-delegation-token-7f3d", "an-object-store-key-91ab", "a-secret-of-spark-55e0"
HOLDS_TOKEN = f"LOCKSTEP_WEBHDFS_TOKEN={TOKEN}".encode()  # the one way in which a user hands it over


def properties(folder: Path) -> Path:
    """Spark's settings, whose secrets are in a file and not in an argument, and an event log in `folder`."""
    events = folder / "events"
    events.mkdir()
    lines = (
        (ROOT / "tests" / "spark" / "spark-defaults.conf").read_text()
        + f"""
spark.eventLog.enabled true
spark.eventLog.dir {events.as_uri()}
spark.eventLog.compress false
spark.authenticate true
spark.authenticate.secret {SPARKS}
spark.executorEnv.LOCKSTEP_WEBHDFS_TOKEN {TOKEN}
spark.hadoop.fs.s3a.secret.key {OBJECT_KEY}
"""
    )
    (folder / "conf").mkdir()
    (folder / "conf" / "spark-defaults.conf").write_text(lines)
    return folder / "conf"


def visible() -> set[bytes]:
    """The command line and the environment of each process of this machine."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                found.add((process / name).read_bytes())
            except OSError:  # it has ended
                continue
    return found


def forms(secret: bytes) -> list[bytes]:
    """A secret as it may be written: its bytes, in hex, in base64, or the lines of a private key."""
    if secret.startswith(b"-----BEGIN"):
        return secret.splitlines()[1:-1]
    return [secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")]


BARRIER = pytest.param(("barrier", "--master", "local[2]"), id="barrier", marks=pytest.mark.soak)


@pytest.mark.parametrize("launcher", [pytest.param(("local",), id="local"), BARRIER])
def test_secrets_stay_where_they_belong(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    write_table(tmp_path / "data")
    keys, run, temporary = tmp_path / "keys", tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    own = {"SPARK_CONF_DIR": str(properties(tmp_path)), "LOCKSTEP_WEBHDFS_TOKEN": TOKEN, "TMPDIR": str(temporary)}
    call = [sys.executable, "-m", "tests.training._reveal_keys", str(keys), "--dataset", str(tmp_path / "data")]
    call += ["--run", str(run), "--model", "logistic", "--num-ranks", "2", "--global-batch", "8", "--epochs", "2"]
    call += ["--checkpoint-every", "5", "--tls", "on", "--audit", "--launcher", *launcher]
    seen: set[bytes] = set()
    with (tmp_path / "output").open("wb") as output:
        job = subprocess.Popen(call, cwd=ROOT, env={**os.environ, **own}, stdout=output, stderr=output)
        while job.poll() is None:
            seen |= visible()
            time.sleep(0.2)
    assert job.returncode == 0, (tmp_path / "output").read_text()
    made = [bytes.fromhex(line) for line in keys.read_text().split()]
    private = [secret for secret in made if secret.startswith(b"-----BEGIN")]
    assert len(private) == 2 and len(made) >= 4, "the session's secret, the generation's key, two certificates"
    assert any(b"lockstep.training.rank" in text for text in seen), "no rank was seen"

    kept = [path for folder in (run, tmp_path / "events", temporary) for path in folder.rglob("*") if path.is_file()]
    assert any(path.is_relative_to(tmp_path / "events") for path in kept) is (launcher[0] == "barrier")
    texts = {"a process": b"\0".join(seen).replace(HOLDS_TOKEN, b""), "the output": (tmp_path / "output").read_bytes()}
    texts |= {str(path.relative_to(tmp_path)): path.read_bytes() for path in kept}
    secrets = {f"secret {number}": form for number, secret in enumerate(made) for form in forms(secret)}
    secrets |= {secret: secret.encode() for secret in (TOKEN, OBJECT_KEY, SPARKS)}
    found = [(name, where) for where, text in texts.items() for name, secret in secrets.items() if secret in text]
    assert not found
