"""Ceph's S3 (RADOS gateway) as processes of the test: a monitor, a store in memory, and the gateway.

Its programs come from Debian's packages, unpacked into a user cache: nothing is installed and no service is started.
`scripts/setup.sh servers` fetches them.
"""

from __future__ import annotations

import base64
import email.utils
import hmac
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lockstep.storage.errors import ConfigError
from tests.cluster.process import spawn
from tests.debian import Unpacked
from tests.object_stores.server import BUCKET, KEY, SECRET, ObjectServer, environment_of, free_port
from tests.waiting import until

MEMORY_MIB = 2048
STEP_LIMIT_S = 60.0
CONF = """[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon_port}
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
keyring = {folder}/keyring
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
pid file =
run dir = {folder}/run
admin socket =
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd class dir = {libraries}/rados-classes
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd class update on start = false
osd crush update on start = false
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail warn = 1
mon data avail crit = 0
mon tick interval = 1
paxos propose interval = 0.05
paxos min wait = 0.02
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw enable usage log = false
"""


CEPH = Unpacked(
    "ceph-of-debian",
    packages=("ceph-mon", "ceph-osd", "ceph-common", "radosgw"),
    programs=("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "osdmaptool"),
    wanted="ceph|radosgw|lib",
)


@contextmanager
def serving_ceph(folder: Path, port: int = 0) -> Iterator[ObjectServer]:
    """Start a cluster of one disk in memory with its S3 gateway, and end it afterwards."""
    root, environment = CEPH.root(), CEPH.environment()
    assert root is not None, "run `scripts/setup.sh servers` first"
    folder, port = folder.resolve(), free_port(port)
    libraries = root / "usr" / "lib" / "x86_64-linux-gnu"
    for name in ("run", "mon", "osd", "rgw"):
        (folder / name).mkdir()
    fsid, mon_port = str(uuid.uuid4()), free_port()
    (folder / "ceph.conf").write_text(
        CONF.format(
            fsid=fsid, mon_port=mon_port, port=port, folder=folder, libraries=libraries, memory_bytes=MEMORY_MIB << 20
        )
    )
    (folder / "keyring").write_text("")
    log = folder / "client.rgw.log"

    def command(name: str, *options: str) -> list[str]:
        return [str(root / "usr" / "bin" / name), "-c", str(folder / "ceph.conf"), *options]

    def once(call: Sequence[str]) -> None:
        done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, timeout=STEP_LIMIT_S)
        assert done.returncode == 0, f"{call}: {done.stdout}{done.stderr}"

    with ExitStack() as ends:
        daemons = []

        def start(name: str, *options: str) -> None:
            process = spawn(name, command(name, *options, "-f"), environment, folder / f"{name}.out", keep=False)
            ends.callback(process.end)
            daemons.append(process)

        def answers() -> bool:
            ended = [process.name for process in daemons if not process.alive]
            assert not ended, f"{ended} ended: {_last_words(folder)}"
            return _answers(endpoint)

        once(command("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"v1:127.0.0.1:{mon_port}", "monmap"))
        once(command("osdmaptool", "--createsimple", "1", "osdmap"))  # so that no `ceph osd new` is needed
        once(command("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--osdmap", "osdmap"))
        start("ceph-mon", "-i", "a")
        once(command("ceph-osd", "--mkfs", "-i", "0"))
        start("ceph-osd", "-i", "0")
        start("radosgw", "-n", "client.rgw")
        endpoint = f"http://127.0.0.1:{port}"
        until(answers, STEP_LIMIT_S)
        once(
            command(
                "radosgw-admin", "-n", "client.rgw", "user", "create", "--uid", "tests", "--display-name", "tests",
                "--access-key", KEY, "--secret-key", SECRET,
            )
        )  # fmt: skip
        _create_bucket(endpoint)
        yield ObjectServer(endpoint, log, environment_of(endpoint))


def _last_words(folder: Path) -> str:
    """The last line of each daemon's log."""
    logs = {log.name: log.read_text(errors="replace").splitlines() for log in folder.glob("*.log")}
    return "; ".join(f"{name}: {lines[-1]}" for name, lines in sorted(logs.items()) if lines)


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=10).close()
    except OSError:
        return False
    return True


def _create_bucket(endpoint: str) -> None:
    """By a request that is signed as S3 was at first: the gateway still takes it."""
    date = email.utils.formatdate(usegmt=True)
    digest = hmac.digest(SECRET.encode(), f"PUT\n\n\n{date}\n/{BUCKET}".encode(), "sha1")
    headers = {"Date": date, "Authorization": f"AWS {KEY}:{base64.b64encode(digest).decode()}"}
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=STEP_LIMIT_S).close()


if __name__ == "__main__":
    try:
        CEPH.fetch()
    except ConfigError as error:
        sys.exit(str(error))
