"""Keys that expire while a run trains: of a profile's file, and of an instance's role by a metadata server of the test.

moto takes any key, so its server here checks the time of each (`KEYS` in server.py) and answers as Amazon's S3 does.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from lockstep.storage.verify import verify
from lockstep.training.config import TrainConfig
from lockstep.training.run.lineage import read_claims
from lockstep.training.run.paths import RunPaths
from tests.object_stores.server import BUCKET, ObjectServer, serving
from tests.object_stores.test_run import weights
from tests.training._driver_alone import drive
from tests.training._tiny import write_table
from tests.waiting import WAIT_S, until

ROOT = Path(__file__).resolve().parents[2]
LIFE_S = 2.0
GIVE_UP_S = 4.0
pytestmark = pytest.mark.slow


class Keys:
    """The keys that the server takes; each is good for some seconds."""

    def __init__(self, folder: Path) -> None:
        self.file, self.profile, self._count = folder / "keys.json", folder / "credentials", itertools.count(1)
        self.last_s = 0.0
        self.file.write_text("{}")

    def renew(self) -> str:
        """A new key, and the second at which it expires as `last_s`."""
        name = f"key{next(self._count)}"
        self.last_s = time.time() + LIFE_S
        fresh = self.file.with_name("fresh")
        fresh.write_text(json.dumps(json.loads(self.file.read_text()) | {name: self.last_s}))
        fresh.replace(self.file)
        return name

    def write_profile(self) -> None:
        """Overwrite the profile's file as an editor does: for a moment it is empty."""
        self.profile.write_text(f"[default]\naws_access_key_id = {self.renew()}\naws_secret_access_key = secret\n")

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Write the profile's file twice in a key's life."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(LIFE_S / 2):
                self.write_profile()

        self.write_profile()
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(WAIT_S)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    made = Keys(tmp_path)
    monkeypatch.setenv("KEYS", str(made.file))
    return made


@pytest.fixture
def server(keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A server that checks keys, and an environment with the profile's file alone."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "core-site.xml").write_text(
        f"<configuration><property><name>lockstep.storage.give-up-s</name><value>{GIVE_UP_S}</value></property>"
        "</configuration>"
    )
    with serving(tmp_path) as made:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION"):
            monkeypatch.setenv(name, made.environment[name])
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys.profile))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
        yield made


def config_at(url: str) -> TrainConfig:
    return TrainConfig(
        datasets=(join(url, "data"),), run=join(url, "run"), model="tiny", num_ranks=1, global_batch=8, epochs=8,
        checkpoint_every=10, keep_checkpoints=2, launcher="local",
    )  # fmt: skip


def start(config: TrainConfig) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.training._driver_alone", json.dumps(config.to_json()), "put_new", "$^"]
    return subprocess.Popen(
        [*command, "train_slowly"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    """The weights of the same run on a disk."""
    write_table(tmp_path / "data")
    drive(config_at(str(tmp_path)))
    return weights(str(tmp_path / "run"))


@pytest.mark.usefixtures("server")
def test_a_run_goes_through_while_its_profile_is_renewed(keys: Keys, whole: dict[str, bytes]) -> None:
    config = config_at(f"s3://{BUCKET}")
    with keys.renewed():
        write_table(join(f"s3://{BUCKET}", "data"))
        with start(config) as driver:
            said = driver.communicate(timeout=WAIT_S)[0]
        assert driver.returncode == 0, said
        assert weights(config.run) == whole and verify(config.run) == []
    assert len(json.loads(keys.file.read_text())) > 3


@pytest.mark.usefixtures("server")
def test_a_run_whose_keys_are_not_renewed_ends_with_one_error_and_resumes_with_new_ones(
    keys: Keys, whole: dict[str, bytes]
) -> None:
    config = config_at(f"s3://{BUCKET}")
    paths = RunPaths(config.run)
    with keys.renewed():
        write_table(join(f"s3://{BUCKET}", "data"))
        driver = start(config)
        fs = filesystem(config.run)
        until(lambda: fs.exists(paths.checkpoints) or driver.poll() is not None)
    with driver:
        said = driver.communicate(timeout=WAIT_S)[0]
    late_s = time.time() - keys.last_s
    assert driver.returncode == 1 and "the credentials have expired" in said, said
    assert "Renew them, and start the job again" in said, said
    assert late_s < 5 * GIVE_UP_S, f"{late_s:.1f} s: {said}"
    with keys.renewed():
        assert drive(config).generation == 2
        assert weights(config.run) == whole and verify(config.run) == []
        assert list(read_claims(fs, paths)) == [1, 2]


@pytest.mark.usefixtures("server")
def test_a_run_goes_through_with_keys_of_a_role_by_a_metadata_server_of_the_test(
    keys: Keys, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an instance's own server answers, by Amazon's page on IMDSv2; obstore asks it, and renews."""

    class Metadata(BaseHTTPRequestHandler):
        def answer(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            self.answer("token")

        def do_GET(self) -> None:
            if self.path.endswith("/security-credentials/"):
                self.answer("role")
                return
            name = keys.renew()
            expires = datetime.fromtimestamp(keys.last_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            found = {"AccessKeyId": name, "SecretAccessKey": "s", "Token": "t", "Expiration": expires}
            self.answer(json.dumps(found))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as metadata:
        threading.Thread(target=metadata.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{metadata.server_port}")
        config = config_at(f"s3://{BUCKET}")
        write_table(join(f"s3://{BUCKET}", "data"))
        with start(config) as driver:
            said = driver.communicate(timeout=WAIT_S)[0]
        assert driver.returncode == 0, said
        assert weights(config.run) == whole and verify(config.run) == []
        metadata.shutdown()
    assert len(json.loads(keys.file.read_text())) > 3
