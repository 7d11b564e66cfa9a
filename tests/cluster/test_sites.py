"""Jobs on an HDFS as sites have it: NameNodes that fail over under ETL and training."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.jobs._checks import CheckFailed
from lockstep.jobs._site_checks import check_namenodes, check_ticket, check_tokens
from lockstep.spark.session import ship_rooms
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import ConfigError, StorageError
from lockstep.storage.files.interface import FileSystem
from lockstep.storage.fs import filesystem, walk
from lockstep.storage.publish import write_file
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.verify import verify
from lockstep.training.results.audit import check_run_audit
from lockstep.training.run.paths import RunPaths
from lockstep.training.run.result import find_result
from tests.cluster.conf import HOST
from tests.cluster.realm import REALM
from tests.cluster.sites import SERVICE, Site
from tests.cluster.test_jobs import ROOT, cut_log, ended, job
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
WAIT_S = 600.0
TRAIN = (
    "--model", "logistic", "--num-ranks", "2", "--global-batch", "16", "--epochs", "6", "--checkpoint-every", "40",
    "--audit", "--validate", "test", "--launcher", "barrier", "--master", "local[2]",
)  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A name service of its own, as this process and its children see it."""
    site = Site(tmp_path / "site")
    try:
        site.start_hdfs()
        for name, value in site.env.items():
            monkeypatch.setenv(name, value)
        set_hadoop_settings({})
        yield site
    finally:
        site.stop()


def appears(url: str, process: subprocess.Popen[str]) -> None:
    """Wait until `url` has entries."""
    fs = filesystem(url)
    until(lambda: process.poll() is not None or (fs.exists(url) and fs.list(url)), WAIT_S)
    assert process.poll() is None, process.communicate()[0][-6000:]


def check_run(run: str, dataset: str, epochs: int, global_batch: int) -> None:
    """The run ended in one generation, used each record once an epoch, and every byte of both is right."""
    result = find_result(filesystem(run), RunPaths(run))
    assert result is not None and result["restarts"] == 0
    records = load_dataset(dataset).splits["train"].records
    assert result["steps"] == epochs * records // global_batch
    report = check_run_audit(run)
    assert report.ok and len(report.left_over) == epochs * records % global_batch, report
    assert verify(run) == verify(dataset) == []


def test_namenode_dies_under_etl_and_freezes_under_training(site: Site, tmp_path: Path) -> None:
    """Both fail over to the other NameNode, at no cost but time."""
    root = f"{site.hdfs_url}/weblog"
    raw, dataset, run = f"{root}/raw", f"{root}/dataset", f"{root}/run"
    ended(job("upload", "--input", cut_log(tmp_path / "access.log", 8_000), "--output", raw, folder=tmp_path))

    etl = job("etl_logs", "--input", raw, "--output", dataset, "--split", "group:visitor:80/20",
              "--master", "local[2]", folder=tmp_path)  # fmt: skip
    fs = filesystem(root)
    until(lambda: etl.poll() is not None or len(fs.list(root)) > 1, WAIT_S)  # its staging folder
    assert etl.poll() is None, etl.communicate()[0][-6000:]
    site.kill(site.active())
    site.fail_over()
    assert "8000 read" in ended(etl)
    assert load_dataset(dataset).counts.read == 8_000
    site.heal()

    training = job("train", "--dataset", dataset, "--run", run, *TRAIN, folder=tmp_path)
    appears(RunPaths(run).checkpoints, training)
    site.pause(site.active())
    site.fail_over()
    ended(training)
    check_run(run, dataset, epochs=6, global_batch=16)


# Tokens end after 40 s unless they are renewed; tickets of clients after 60 s.
SHORT = {
    "dfs.namenode.delegation.token.renew-interval": "40000",
    "dfs.namenode.delegation.token.max-lifetime": "200000",
    "dfs.namenode.delegation.key.update-interval": "30000",
}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A name service with Kerberos, short tickets and short tokens."""
    site = Site(tmp_path_factory.mktemp("secure"), ticket_s=60, more=SHORT)
    try:
        yield site.start_hdfs()
    finally:
        site.stop()


@pytest.fixture
def spark_conf(secure: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a job on `secure`: Java logs in by a keytab, as by spark-submit's --keytab; Python has
    nothing. Returns the folder of the event log.
    """
    assert secure.realm is not None
    java = f"-Djava.security.krb5.conf={secure.env['KRB5_CONFIG']}"  # a site has it in /etc
    (tmp_path / "conf").mkdir()
    events = tmp_path / "events"
    events.mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text(
        (ROOT / "tests" / "spark" / "spark-defaults.conf").read_text()
        + f"""
spark.kerberos.principal {secure.realm.principal("alice")}
spark.kerberos.keytab {secure.realm.user_keytab}
spark.driver.extraJavaOptions {java}
spark.eventLog.enabled true
spark.eventLog.dir {events.as_uri()}
spark.eventLog.compress false
"""
    )
    (tmp_path / "tmp").mkdir()
    own = {"SPARK_CONF_DIR": str(tmp_path / "conf"), "SPARK_SUBMIT_OPTS": java, "TMPDIR": str(tmp_path / "tmp")}
    for name, value in {**secure.env, **own}.items():
        monkeypatch.setenv(name, value)
    set_hadoop_settings({})
    return events


def test_tickets_and_tokens_end_under_etl_and_under_training(
    secure: Site, spark_conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has a ticket only for the start, then Spark's tokens; after the first ones have ended, the NameNodes fail
    over, so that all must connect again. No token is anywhere where others may read it.
    """
    assert secure.realm is not None
    monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "ticket"))
    root = f"{secure.hdfs_url}/weblog"
    dataset, run = f"{root}/dataset", f"{root}/run"
    secure.realm.ticket(tmp_path / "ticket", 30)
    fs = filesystem(root)
    fs.mkdirs(root)
    raw = cut_log(tmp_path / "access.log", 8_000)
    etl = job("etl_logs", "--input", raw, "--output", dataset, "--split", "group:visitor:80/20", "--master", "local[2]",
              folder=tmp_path)  # fmt: skip
    until(lambda: etl.poll() is not None or fs.list(root), WAIT_S)  # its staging folder
    assert etl.poll() is None, etl.communicate()[0][-6000:]
    seen = Seen()
    etl.send_signal(signal.SIGSTOP)  # a driver with hours of work
    seen.look_for(50)
    secure.fail_over()
    etl.send_signal(signal.SIGCONT)
    output = ended(etl)
    assert "8000 read" in output

    secure.realm.ticket(tmp_path / "ticket", 30)
    epochs = "100"
    training = job("train", "--dataset", dataset, "--run", run, *TRAIN[:6], "--epochs", epochs, *TRAIN[8:],
                   folder=tmp_path)  # fmt: skip
    appears(RunPaths(run).checkpoints, training)
    seen.look_for(50)
    assert training.poll() is None, "it has ended before its first tokens"
    secure.fail_over()
    while training.poll() is None:
        seen.look_for(2)
    output += ended(training)
    (tmp_path / "tmp" / "output").write_text(output)

    secure.realm.ticket(tmp_path / "ticket")
    check_run(run, dataset, epochs=int(epochs), global_batch=16)
    assert len(seen.secrets) >= 3, "the tokens of ranks and drivers were not seen"
    files = {url: filesystem(url).read_bytes(url) for url in (entry.url for entry in walk(filesystem(root), root))}
    kept = [path for folder in (spark_conf, tmp_path / "tmp") for path in folder.rglob("*") if path.is_file()]
    assert any(path.is_relative_to(spark_conf) for path in kept)
    files |= {str(path): path.read_bytes() for path in kept} | {"a process": b"\0".join(seen.processes)}
    found = [where for where, text in files.items() if any(form in text for form in seen.forms())]
    assert not found


def test_a_secure_yarn_runs_jobs_longer_than_the_life_of_any_token(
    secure: Site, spark_conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In cluster mode: a token ends for good after 200 s, and a failover after that makes all connect again."""
    assert secure.realm is not None and spark_conf.exists()
    secure.start_yarn()
    given = [word.replace("=", " ", 1) for word in secure.submit_conf if "=" in word]
    given += [f"spark.yarn.appMasterEnv.{name} {secure.env[name]}" for name in ("JAVA_HOME", "HADOOP_CONF_DIR")]
    given += ["spark.driver.memoryOverhead 1g", f"spark.executor.extraJavaOptions {os.environ['SPARK_SUBMIT_OPTS']}"]
    with (tmp_path / "conf" / "spark-defaults.conf").open("a") as defaults:
        defaults.write("\n".join(given) + "\n")
    monkeypatch.setenv("KRB5_CLIENT_KTNAME", str(secure.realm.user_keytab))
    monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "cache"))
    root = f"{secure.hdfs_url}/on-yarn"
    dataset, run = f"{root}/dataset", f"{root}/run"
    ended(job("upload", "--input", cut_log(tmp_path / "access.log", 8_000), "--output", f"{root}/raw", folder=tmp_path))
    checks = ended(job("doctor", "--master", "yarn", "--hdfs", f"{root}/doctor", folder=tmp_path))
    assert re.search("^OK   spark: .*a dataset was written and verified$", checks, re.MULTILINE)

    etl = submit(secure, 1, "etl_logs", "--input", f"{root}/raw", "--output", dataset, "--split", "group:visitor:80/20")
    ended(etl)
    assert load_dataset(dataset).counts.read == 8_000
    (secure.folder / "slow.py").write_text(SLOW)
    flags = ["--dataset", dataset, "--run", run, "--model", "slow:slow", *TRAIN[2:6], "--epochs", "40", *TRAIN[8:-4]]
    training = submit(secure, 2, "train", *flags, modules=",slow.py")
    appears(RunPaths(run).checkpoints, training)
    time.sleep(215)
    assert training.poll() is None, "it has ended before its first tokens"
    secure.fail_over()
    ended(training)
    check_run(run, dataset, epochs=40, global_batch=16)


SLOW = """
import time
import keras
from lockstep.training.models.logistic import logistic

class Sleeps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05)  # a fast machine trains for minutes too

def slow(signature, options):
    return logistic(signature, options), [Sleeps()]
"""


def submit(site: Site, executors: int, name: str, *flags: str, modules: str = "") -> subprocess.Popen[str]:
    """spark-submit of a job in cluster mode, by the keytab in spark-defaults.conf."""
    return subprocess.Popen(
        [Path(sys.executable).with_name("spark-submit"), "--master", "yarn", "--deploy-mode", "cluster",
         "--num-executors", str(executors), "--py-files", ship_rooms(str(site.folder)) + modules,
         str(ROOT / "jobs" / f"{name}.py"), *flags],
        cwd=site.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


class Seen:
    """Command lines and environments of all processes, and the secrets of the tokens that their environments name."""

    def __init__(self) -> None:
        self.processes: set[bytes] = set()
        self.secrets: set[bytes] = set()

    def look_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for process in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    with contextlib.suppress(OSError):  # it has ended
                        self._add((process / name).read_bytes())
            time.sleep(0.5)

    def _add(self, text: bytes) -> None:
        self.processes.add(text)
        for path in re.findall(rb"HADOOP_TOKEN_FILE_LOCATION=([^\0]+)", text):
            with contextlib.suppress(OSError):
                self.secrets |= set(passwords(Path(path.decode()).read_bytes()))

    def forms(self) -> list[bytes]:
        """Each secret as it may be written: raw, in hex, or within any base64."""
        coded = [base64.b64encode(secret[at : at + 15]) for secret in self.secrets for at in range(3)]
        return [*self.secrets, *(secret.hex().encode() for secret in self.secrets), *coded]


def passwords(tokens: bytes) -> list[bytes]:
    """Those of a token file: 20 bytes, whose number is in front of them, and then the kind of the token."""
    kinds = [found.start() for found in re.finditer(rb"\x15HDFS_DELEGATION_TOKEN", tokens)]
    return [tokens[at - 20 : at] for at in kinds if tokens[at - 21] == 20]


def test_ticket_keytab_and_token_on_each_way_in(secure: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hdfs://, WebHDFS with SPNEGO and with TLS: each by ticket and by keytab; what is refused is named."""
    assert secure.realm is not None
    for name, value in {**secure.env, "LOCKSTEP_STORAGE_GIVE_UP_S": "5"}.items():
        monkeypatch.setenv(name, value)
    set_hadoop_settings({})
    ways = [f"{scheme}://{SERVICE}" for scheme in ("hdfs", "webhdfs", "swebhdfs")]
    root = "/" + tmp_path.name

    def use(way: str) -> None:
        write_file(new(way), f"{way}{root}/file", way.encode(), exclusive=False)
        assert new(way).read_bytes(f"{way}{root}/file") == way.encode()

    def new(way: str) -> FileSystem:
        set_hadoop_settings({"lockstep.storage.of-a-test": uuid.uuid4().hex})  # no connection of an earlier use
        return filesystem(way)

    for way in ways:
        with pytest.raises(StorageError, match="Kerberos refused") as caught:
            use(way)
        assert ("kinit" in caught.value.next_step and "Kerberos" in caught.value.got) or "SPNEGO" in caught.value.got
    monkeypatch.setenv("KRB5_CLIENT_KTNAME", str(secure.realm.user_keytab))
    monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "cache"))
    with pytest.raises(StorageError, match="certificate is not trusted") as caught:
        use(ways[2])
    assert "SSL_CERT_FILE" in caught.value.next_step
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.ca))
    for way in ways:
        use(way)
    assert re.fullmatch(rf"alice@{REALM} until .* UTC, renewed by KRB5_CLIENT_KTNAME=.*", check_ticket())
    assert {"active", "standby"} == set(re.findall("is (active|standby)", check_namenodes(ways[0])))

    monkeypatch.delenv("KRB5_CLIENT_KTNAME")
    monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "none"))
    if secure.active() == "namenode":
        secure.fail_over()  # the NameNode that is asked first is the standby, which refuses tokens in words of its own
    fetch = "org.apache.hadoop.hdfs.tools.DelegationTokenFetcher"
    secure.admin("fetchdt", fetch, "--renewer", "alice", str(tmp_path / "token"))
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "token"))
    fetched_at = time.monotonic()
    for way in ways:
        use(way)
    assert f"HDFS_DELEGATION_TOKEN of alice@{REALM} until" in check_tokens() and "no ticket" in check_ticket()
    time.sleep(fetched_at + 45 - time.monotonic())
    with pytest.raises(StorageError, match="did not serve") as ended:
        use(ways[0])
    assert "token is not valid any more" in ended.value.got and "docs/sites.md" in ended.value.next_step
    monkeypatch.delenv("HADOOP_TOKEN_FILE_LOCATION")

    monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "ticket"))
    secure.realm.ticket(tmp_path / "ticket", 15)
    for way in ways:
        use(way)
    time.sleep(25)  # and the clocks' skew
    for way in ways:
        with pytest.raises(StorageError, match="Kerberos refused"):
            use(way)
    with pytest.raises(CheckFailed) as failed:
        check_ticket()
    assert "expired" in failed.value.what + failed.value.got


def test_encryption_zone_erasure_coding_and_httpfs(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zone is written and read by both ways; what cannot be is refused by name, with the way that can."""
    site.start_gateways()
    for name in ("LOCKSTEP_STORAGE_GIVE_UP_S", "LOCKSTEP_STORAGE_WRITE_GIVE_UP_S"):
        monkeypatch.setenv(name, "5")
    ways = [f"{scheme}://{SERVICE}" for scheme in ("hdfs", "webhdfs")]
    for folder in ("zone", "coded", "plain"):
        filesystem(ways[0]).mkdirs(f"{ways[0]}/{folder}")
    site.admin("key", "org.apache.hadoop.crypto.key.KeyShell", "create", "k1", "-size", "128")
    crypto, ec = ("org.apache.hadoop.hdfs.tools." + name for name in ("CryptoAdmin", "ECAdmin"))
    site.admin("zone", crypto, "-createZone", "-keyName", "k1", "-path", "/zone")
    site.admin("policy", ec, "-enablePolicy", "-policy", "XOR-2-1-1024k")
    site.admin("coded", ec, "-setPolicy", "-path", "/coded", "-policy", "XOR-2-1-1024k")
    for way in ways:
        write_file(filesystem(way), f"{way}/zone/{way[:3]}", way.encode() * 10_000)
        with pytest.raises(StorageError, match="erasure-coded") as coded:
            write_file(filesystem(way), f"{way}/coded/file", b"x" * 10_000)
        assert "-replicate" in coded.value.next_step
    for way in ways:
        for other in ways:
            assert filesystem(way).read_bytes(f"{way}/zone/{other[:3]}") == other.encode() * 10_000
    gate = f"webhdfs://{HOST}:{site.ports['httpfs']}"
    write_file(filesystem(ways[0]), f"{ways[0]}/plain/file", b"plain")
    assert [entry.name for entry in filesystem(gate).list(f"{gate}/plain")] == ["file"]
    with pytest.raises(ConfigError, match="does not answer as WebHDFS") as read:
        filesystem(gate).read_bytes(f"{gate}/plain/file")
    assert "HttpFS" in read.value.got and "NameNodes' own addresses" in read.value.next_step
    with pytest.raises(StorageError, match="does not know renames that refuse a taken name"):
        write_file(filesystem(gate), f"{gate}/plain/other", b"x")  # it may have renamed, as the error says
    site.kill("kms")
    with pytest.raises(StorageError) as lost:
        filesystem(ways[0]).read_bytes(f"{ways[0]}/zone/hdf")
    assert "key server" in lost.value.got
    with pytest.raises(StorageError):
        filesystem(ways[1]).read_bytes(f"{ways[1]}/zone/hdf")
