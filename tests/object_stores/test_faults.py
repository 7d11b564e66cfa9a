"""Publications, datasets, runs and reads through a store that fails at random: the bits of an undisturbed one, or one
clear error with nothing half published, after which the same call succeeds.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from lockstep.etl.logs import job as logs
from lockstep.etl.logs.config import LogsConfig
from lockstep.storage.errors import DeniedError, ExistsError, LockstepError, StorageAwayError
from lockstep.storage.files.interface import FileSystem, Writer
from lockstep.storage.fs import filesystem
from lockstep.storage.publish import CLAIM_NAME, MANIFEST_NAME, publish_directory, write_file, write_stream
from lockstep.storage.settings import set_hadoop_settings
from lockstep.storage.urls import join
from lockstep.storage.verify import verify
from lockstep.training.batches.feed import RankFeed, eval_batches
from lockstep.training.config import TrainConfig
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.world import World
from tests.cluster.test_jobs import cut_log
from tests.fs_contract import put
from tests.object_stores.faulty_proxy import FATAL, FITS, Faults, FaultyProxy, Link, faulty
from tests.object_stores.server import ObjectServer
from tests.object_stores.test_publication import found
from tests.object_stores.test_run import weights
from tests.object_stores.writing import build, content
from tests.training._driver_alone import drive
from tests.training._ranks import rank_path
from tests.training._tiny import write_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
REQUESTS = 42  # of a publication and what reads it afterwards, in pages of two names
LATE_S, DEADLINE_S = 4.5, 3.0
MOST = 5  # faults of one job
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 8))]  # some 110 faults
pytestmark = pytest.mark.slow


@pytest.fixture
def proxy(s3: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the store, which this process, its tasks and its ranks ask from now on."""
    with faulty(s3.endpoint, FaultyProxy(late_s=LATE_S, outage_s=1.0, page_keys=2)) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", made.endpoint)
        monkeypatch.setenv("LOCKSTEP_STORAGE_DATA_DEADLINE_S", str(DEADLINE_S))
        # The session's workers have the environment of before, so the keys are among Spark's settings.
        names = {"fs.s3a.access.key": "AWS_ACCESS_KEY_ID", "fs.s3a.secret.key": "AWS_SECRET_ACCESS_KEY"}
        set_hadoop_settings({key: s3.environment[name] for key, name in names.items()})
        yield made
        set_hadoop_settings({})


def until_it_succeeds(work: Callable[[], T], half_done: Callable[[], object]) -> T:
    """What `work` returns at last. Each error before has four parts, and leaves nothing half done."""
    for _ in range(MOST):
        try:
            return work()
        except LockstepError as error:
            assert error.what and error.got and error.allowed and error.next_step, str(error)
            assert not half_done(), str(error)
    return work()


def publish(fs: FileSystem, root: str, name: str) -> None:
    """Build and publish a directory, and read it back."""
    publish_directory(fs, build(join(root, name), name), join(root, "out"))
    assert found(fs, join(root, "out")).items() >= content(name).items()


def publish_with_a_fault(proxy: FaultyProxy, root: str, kind: str, begin: int) -> None:
    """Publish while the first request that fits, from number `begin` on, fails."""
    proxy.begin(Faults(kinds=(kind,), always=range(begin, 3 * REQUESTS), most=1))
    fs, out, name = filesystem(root), join(root, "out"), "one"
    try:
        publish(fs, root, name)
    except LockstepError as error:
        assert kind in FATAL, f"{kind} from {begin} on: {error}"
        code = "InvalidAccessKeyId" if isinstance(error, DeniedError) else "RequestTimeTooSkewed"
        assert code in error.got and ("clock" in error.next_step) == (kind == "clock"), str(error)
        assert error.what and error.got and error.allowed and error.next_step, str(error)
        if MANIFEST_NAME not in found(fs, out):
            name = "two"
            publish(fs, root, name)
    there = found(fs, out)
    assert there.items() >= content(name).items() and there.keys() <= {*content(name), CLAIM_NAME}
    assert CLAIM_NAME not in there or kind in (*FATAL, "late")


@pytest.mark.parametrize(("number", "kind"), list(enumerate(FITS)))
def test_a_publication_survives_each_kind_of_fault(proxy: FaultyProxy, root: str, number: int, kind: str) -> None:
    publish_with_a_fault(proxy, root, kind, 8 + number)
    assert [name for name, _ in proxy.struck] == [kind]


@pytest.mark.soak
@pytest.mark.parametrize("kind", FITS)
def test_a_publication_survives_each_kind_of_fault_at_each_request(proxy: FaultyProxy, root: str, kind: str) -> None:
    struck = 0
    for begin in range(1, REQUESTS + 1):
        publish_with_a_fault(proxy, join(root, str(begin)), kind, begin)
        struck += len(proxy.struck)
    assert struck, "a fault that struck at no request proves nothing"


def test_a_copy_that_failed_is_not_taken_for_another_writers_of_the_same_length(
    proxy: FaultyProxy, fs: FileSystem, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore

    fs, real_copy, tries = filesystem(root), obstore.copy, list[int]()
    mine = put(fs, join(root, "mine"), b"mine")

    def overtaken(*call: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:  # it fails, and meanwhile the other writer is faster
            put(fs, join(root, "out"), b"hers")
            proxy.begin(Faults(kinds=("slow down",), always=(1,)))
        return real_copy(*call, **options)

    monkeypatch.setattr(obstore, "copy", overtaken)
    with pytest.raises(ExistsError):
        fs.rename_new(mine, join(root, "out"))
    assert len(tries) == 2 and fs.read_bytes(join(root, "out")) == b"hers" and fs.read_bytes(mine) == b"mine"


def test_a_store_that_stays_away_is_named_when_the_time_is_over(
    proxy: FaultyProxy, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_STORAGE_GIVE_UP_S", "3")
    fs = filesystem(root)

    def produce(writer: Writer) -> None:
        writer.write(bytes(40 << 20))  # in parts, the first of which are already there

    put(fs, join(root, "before"))
    proxy.outage_s = 3600.0
    proxy.begin(Faults(kinds=("outage",), always=range(4, 99), most=1))
    began = time.monotonic()
    with pytest.raises(StorageAwayError, match=re.escape(proxy.endpoint)) as raised:
        write_stream(fs, join(root, "f"), produce)
    assert time.monotonic() - began < 60 and raised.value.next_step
    proxy.end_outage()
    assert [entry.name for entry in fs.list(root)] == ["before"]


def test_shards_of_a_distant_store_are_opened_and_read_many_at_once(proxy: FaultyProxy, root: str) -> None:
    write_table(root, records={"train": 960}, shards=24)
    proxy.link = Link(round_trip_s=0.1)
    proxy.begin(Faults())
    split = OpenSplit.at(root, "train")
    opening = proxy.most_at_once
    proxy.begin(Faults())
    plan = EpochPlan.for_dataset(split.manifest, "train", seed=0, global_batch=64)
    feed = RankFeed(plan, split.reader, split.encoder, World.local(0, 1))
    ids = [number for batch in feed.batches(0, plan.steps(1)) for number in batch.sample_ids.tolist()]
    split.reader.close()
    assert len(set(ids)) == len(ids) == 960
    assert opening > 8 and proxy.most_at_once > 8


@pytest.fixture(scope="session")
def log_lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cut_log(tmp_path_factory.mktemp("lines") / "access.log", 1_000)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dataset_made_under_random_faults_has_the_digest_of_a_disk(
    spark: SparkSession, proxy: FaultyProxy, root: str, log_lines: str, tmp_path: Path, seed: int
) -> None:
    fs, out = filesystem(root), join(root, "dataset")
    write_file(fs, join(root, "raw", "access.log"), Path(log_lines).read_bytes())
    config = LogsConfig(inputs=(log_lines,), output=str(tmp_path / "dataset"), split="group:visitor:80/20")
    wanted = logs.run(spark, config).digest
    there = LogsConfig(inputs=(join(root, "raw", "access.log"),), output=out, split="group:visitor:80/20")
    proxy.begin(Faults(seed, 25, tuple(FITS), most=MOST))
    made = until_it_succeeds(lambda: logs.run(spark, there), lambda: fs.exists(join(out, MANIFEST_NAME)))
    struck = list(proxy.struck)
    proxy.begin(Faults())
    assert made.digest == wanted and verify(out) == [] and len(struck) >= MOST - 2, struck


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of the run on a disk."""
    folder = tmp_path_factory.mktemp("whole")
    write_table(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        rank_path(patch)
        drive(config_of(str(folder)))
    return weights(str(folder / "run"))


def config_of(root: str) -> TrainConfig:
    """Two ranks, a checkpoint every five steps."""
    return TrainConfig(
        datasets=(join(root, "data"),), run=join(root, "run"), model="tiny", num_ranks=2, global_batch=8, epochs=2,
        checkpoint_every=5, keep_checkpoints=2, launcher="local",
    )  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_of_two_ranks_under_random_faults_has_the_weights_of_a_disk(
    proxy: FaultyProxy, root: str, whole_run: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rank_path(monkeypatch)
    config = config_of(root)
    write_table(join(root, "data"))
    proxy.begin(Faults(seed, 60, tuple(FITS), most=MOST))
    result = until_it_succeeds(lambda: drive(config), lambda: False)
    struck = list(proxy.struck)
    proxy.begin(Faults())
    assert result.steps == 25 and weights(config.run) == whole_run and verify(config.run) == []
    assert len(struck) == MOST, struck


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_read_under_random_faults_are_those_without(proxy: FaultyProxy, root: str, seed: int) -> None:
    write_table(root, shards=6)

    def digest() -> str:
        split = OpenSplit.at(root, "train")
        try:
            read = hashlib.sha256()
            for batch in eval_batches(split.reader, split.encoder, 0, 1, 16):
                read.update(batch.sample_id.tobytes() + batch.x["a"].tobytes() + batch.x["b"].tobytes())
            return read.hexdigest()
        finally:
            split.reader.close()

    wanted = digest()
    proxy.begin(Faults(seed, 4, tuple(FITS), most=MOST))
    while len(proxy.struck) < MOST:
        assert until_it_succeeds(digest, lambda: False) == wanted
