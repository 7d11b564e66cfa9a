"""The checks of lockstep doctor that concern Spark, its executors, and YARN's queue: one session and two small jobs."""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lockstep.jobs._checks import JAVA_MAJORS, CheckFailed, CheckSkipped, CheckWarned
from lockstep.process.installed import ROOMS, ROOT
from lockstep.spark.node_python import wrong_python
from lockstep.spark.session import hadoop_settings_of, java_options, spark_session
from lockstep.storage.errors import LockstepError, StorageTimeoutError
from lockstep.storage.files.deadlines import call_with_deadline
from lockstep.storage.settings import set_hadoop_settings
from lockstep.training.launch.barrier import check_slots, in_driver, slots_now
from lockstep.training.launch.executors import container_of, master_mib

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

LIMIT_S = 300.0  # for a session, and for its first job: a node may take minutes to unpack an archive
YARN_LIMIT_S = 20.0
SLOTS_WAIT_S = 30.0  # for executors that start later than the first one
MOST_TASKS = 64
SKEW_S = 2.0  # from which a clock is named
KERBEROS_SKEW_S = 300.0  # from which Kerberos refuses
MODULE_STEP = "Rename that package, or start the job from another folder and leave it out of PYTHONPATH, --files and "
MODULE_STEP += "--archives."


def check_modules() -> str:
    """No package on this process's path, or in the current folder, has the name of one of ours."""
    own = ROOT.resolve()
    entries = {str(Path(entry or ".").resolve()) for entry in ["", *sys.path]} - {str(own)}
    found = []
    for name in ROOMS:
        specs = (importlib.machinery.PathFinder.find_spec(name, [entry]) for entry in sorted(entries))
        # A folder without __init__.py has no origin, and never hides a package; a link may lead to ours.
        folders = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
        found += [f"{name} in {folder}" for folder in folders if folder.resolve() != own / name]
    if found:
        raise CheckWarned(f"the path has other packages of our names: {', '.join(found)}", next_step=MODULE_STEP)
    return f"{', '.join(ROOMS)} come from {own}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Executor:
    """What one task found out about its executor."""

    host: str
    java: str
    python: str
    prefix: str
    """The folder of its Python; in a virtual environment, of the Python that it was made from."""
    packed: bool
    """Whether that Python came with the job, in an archive."""
    glibc: str
    time_s: float
    modules: dict[str, str]
    """Our packages' names and the files that an import there finds."""
    given: list[str]
    """GPUs that Spark gave to the task."""
    gpus: int
    """GPUs that nvidia-smi lists there."""


def _probe(pause_s: float) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function of the tasks: nested, so that its code travels, and no foreign `jobs` there is imported for it."""
    names = ROOMS

    def probe(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import importlib.util
        import json
        import os
        import shutil
        import socket
        import subprocess
        import sys
        import time
        from pathlib import Path

        import pyarrow as pa
        from pyspark import TaskContext

        now = time.time()
        time.sleep(pause_s)  # so that no executor runs a second task while another one has none
        specs = {name: importlib.util.find_spec(name) for name in names}
        base = Path(sys.base_prefix).resolve()
        task = TaskContext.get()
        gpu = task.resources().get("gpu") if task is not None else None
        tool, listed = shutil.which("nvidia-smi"), ""
        if tool is not None:
            try:
                listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30).stdout
            except (OSError, subprocess.TimeoutExpired):
                listed = ""  # as on a host without a GPU, whose driver does not answer
        facts = {
            "host": socket.gethostname(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "prefix": sys.base_prefix,
            "packed": any(base.is_relative_to(child.resolve()) for child in Path.cwd().iterdir()),
            "glibc": (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")[2],
            "time_s": now,
            "modules": {name: str(spec.origin) if spec is not None else "" for name, spec in specs.items()},
            "given": list(gpu.addresses) if gpu is not None else [],
            "gpus": sum(line.startswith("GPU ") for line in listed.splitlines()),
        }
        for batch in batches:
            texts = [json.dumps({**facts, "java": java}) for java in batch.column(0).to_pylist()]
            yield pa.RecordBatch.from_pydict({"facts": texts})

    return probe


def _rank_probe(_: object) -> list[int]:
    """Run in each task of the barrier stage: wait for the other."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    context.barrier()
    return [context.partitionId()]


class SparkChecks:
    """The checks of one Spark session, which ends with `with`. `checks()` are to be run in their order."""

    def __init__(self, master: str | None, url: str | None) -> None:
        self._master, self._url = master, url
        self._stack = ExitStack()
        self._spark: SparkSession | None = None
        self._found: list[Executor] = []
        self._began_s = self._ended_s = 0.0

    def __enter__(self) -> SparkChecks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def checks(self) -> list[tuple[str, Callable[[], str]]]:
        yarn = [("yarn", check_yarn)] if self._master == "yarn" or submitted_to("yarn") else []
        of_executors = [
            ("executors", self.executors),
            ("java there", self.java),
            ("glibc there", self.glibc),
            ("modules there", self.modules),
            ("gpus there", self.gpus),
            ("clocks", self.clocks),
            ("slots", self.slots),
            ("barrier", self.barrier),
        ]
        return [*yarn, ("spark", self.start), *of_executors]

    def start(self) -> str:
        """Start a session, look at its executors, and write a dataset to `url`, or to the disk of a local master."""
        spark: SparkSession = self._within(
            lambda: self._stack.enter_context(spark_session("doctor", self._master, input_bytes=0)), "session"
        )
        set_hadoop_settings(hadoop_settings_of(spark))  # and its tokens: a task has no ticket
        master = str(spark.sparkContext.master)
        self._within(lambda: self._look(spark, 2, 0.0), "task slot")  # starts Python there
        self._spark = spark
        tasks = min(max(2, spark.sparkContext.defaultParallelism), MOST_TASKS)
        self._began_s = time.time()
        self._found = self._within(lambda: self._look(spark, tasks, 0.2), "second job")
        self._ended_s = time.time()
        local = in_driver(master)
        foreign = self._foreign()
        written = _write_probe(spark, self._url) if not foreign and (self._url or local) else ""
        return f"Spark {spark.version} on {master}{written}"

    def _within(self, call: Callable[[], Any], what: str) -> Any:
        master = self._master or "spark-submit's master"
        try:
            return call_with_deadline(call, LIMIT_S, what=what, whom=master)
        except StorageTimeoutError:
            next_step = "Look at the cluster's page: whether this application waits for slots or memory, and at the "
            next_step += "executors' logs. `yarn application -list`, or the page of the standalone master."
            raise CheckFailed(f"Spark on {master} gave no {what} within {LIMIT_S:.0f} s", next_step=next_step) from None
        except LockstepError:
            raise
        except Exception as error:  # py4j's and Spark's have no common class
            raise _explained(error) from None

    def _look(self, spark: SparkSession, tasks: int, pause_s: float) -> list[Executor]:
        import json

        # A function of Java that Spark cannot know beforehand, so the executors' Java answers.
        java = "java_method('java.lang.System', 'getProperty', 'java.version') AS java"
        rows = spark.range(0, tasks, 1, tasks).selectExpr(java).mapInArrow(_probe(pause_s), "facts string").collect()
        return [Executor(**json.loads(row[0])) for row in rows]

    def _executors(self) -> list[Executor]:
        if not self._found:
            raise CheckSkipped("Spark gave no executors to look at")
        return self._found

    def _session(self) -> SparkSession:
        if self._spark is None:
            raise CheckSkipped("Spark gave no executors to look at")
        return self._spark

    def executors(self) -> str:
        """The executors' Python: its version, and whether it came in an archive."""
        found = self._executors()
        hosts = sorted({each.host for each in found})
        local = in_driver(str(self._session().sparkContext.master))
        origin = {
            "from an archive of the job" if each.packed and not local else f"the node's, from {each.prefix}"
            for each in found
        }
        versions = sorted({each.python for each in found})
        where = f"{len(hosts)} hosts" if len(hosts) > 1 else hosts[0]
        return f"Python {', '.join(versions)} on {where}, {' and '.join(sorted(origin))}"

    def java(self) -> str:
        """The executors' Java is of the driver's major version."""
        # pyspark declares its JVM as optional; that of a session is there.
        ours = str(self._session()._jvm.java.lang.System.getProperty("java.version"))  # type: ignore[union-attr]
        found = {each.java: each.host for each in self._executors()}
        for version, host in found.items():
            if version.partition(".")[0] != ours.partition(".")[0]:
                raise CheckWarned(
                    f"Java {version} on {host}, the driver has {ours}",
                    next_step=f"Set spark.executorEnv.JAVA_HOME to a Java {' or '.join(JAVA_MAJORS)} as the driver's.",
                )
        return f"Java {', '.join(sorted(found))}, the driver has {ours}"

    def glibc(self) -> str:
        """The executors' glibc is not older than the one under which an archive was packed."""
        ours = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")[2]
        found = {each.glibc: each.host for each in self._executors()}
        for version, host in found.items():
            if _number(version) < _number(ours):
                raise CheckWarned(
                    f"glibc {version or 'unknown'} on {host}, the driver has {ours}",
                    next_step="Run `make package` on the oldest system: packages packed here may not load there.",
                )
        return f"glibc {', '.join(sorted(found))}, the driver has {ours}"

    def _foreign(self) -> dict[str, str]:
        """Where our packages are imported from on executors, if it is neither the job's zip nor this checkout."""
        own = str(ROOT.resolve())
        return {
            f"{name} on {each.host}": file or "nowhere"
            for each in self._found
            for name, file in each.modules.items()
            if not re.search(r"lockstep[^/]*\.zip", file) and not str(Path(file).resolve()).startswith(own)
        }

    def modules(self) -> str:
        """Executors import our packages, not others of the same names."""
        self._executors()
        if foreign := self._foreign():
            found = ", ".join(f"{name} comes from {file}" for name, file in foreign.items())
            raise CheckFailed(found, next_step=MODULE_STEP)
        return f"{', '.join(ROOMS)} come from the job"

    def gpus(self) -> str:
        """Spark gives tasks the GPUs that the executors' hosts have."""
        found = self._executors()
        hosts = {each.host: each.gpus for each in found if each.gpus}
        given = sorted({f"{each.host} {','.join(each.given)}" for each in found if each.given})
        if given:
            return f"GPUs by task: {' | '.join(given)}"
        settings = self._session().sparkContext.getConf()
        if asked := settings.get("spark.executor.resource.gpu.amount"):
            return f"{asked} GPUs an executor, which ranks take and ETL tasks do not (docs/gpu.md)"
        if hosts and not in_driver(str(self._session().sparkContext.master)):
            raise CheckWarned(
                f"Spark gives none of the GPUs of {', '.join(sorted(hosts))} to tasks",
                next_step="Set spark.executor.resource.gpu.amount and .discoveryScript (docs/gpu.md).",
            )
        return f"{sum(hosts.values())} GPUs on the executors' hosts" if hosts else "no GPU: ranks compute on the CPU"

    def clocks(self) -> str:
        """The executors' clocks show the driver's time; a reading is known to within the time of its job."""
        worst, at = 0.0, ""
        for each in self._executors():
            off_s = max(self._began_s - each.time_s, each.time_s - self._ended_s)
            if off_s > worst:
                worst, at = off_s, each.host
        if worst > SKEW_S:
            kind = CheckFailed if worst > KERBEROS_SKEW_S else CheckWarned
            raise kind(
                f"the clock of {at} differs from the driver's by {worst:.0f} s or more",
                next_step="Run NTP or chrony on all hosts. Kerberos refuses more than 5 minutes; times in logs and "
                "lockstep status are wrong by the difference.",
            )
        return f"within {self._ended_s - self._began_s + worst:.1f} s of the driver's, the time that asking took"

    def slots(self) -> str:
        """Two ranks have a slot each, and the number of executors is fixed."""
        context = self._session().sparkContext
        master = str(context.master)
        if in_driver(master) and context.defaultParallelism < 2:
            raise CheckFailed(
                f"{master} has one task slot; a barrier stage of 2 ranks needs two",
                next_step="Use --master 'local[2]'.",
            )
        check_slots(context, 2, SLOTS_WAIT_S)
        return f"{slots_now(context)} task slots, as many ranks at once"

    def barrier(self) -> str:
        """Check that two tasks meet in a barrier stage."""
        context = self._session().sparkContext
        try:
            check_slots(context, 2, 0.0)
        except LockstepError:
            raise CheckSkipped("two ranks have no slots") from None
        if self._foreign():
            raise CheckSkipped("foreign modules on executors")
        call = context.parallelize(range(2), 2).barrier().mapPartitions(_rank_probe).collect
        self._within(call, "barrier stage")
        return "2 tasks of a barrier stage met"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _explained(error: Exception) -> Exception:
    """An error of Spark's in our words, if it is one that names a wrong Python."""
    wrong = wrong_python(str(error))
    if wrong is not None:
        return CheckFailed(f"{wrong.what}: {wrong.got}", next_step=wrong.next_step)
    return error


def _write_probe(spark: SparkSession, url: str | None) -> str:
    from lockstep.etl.write.dataset import write_dataset
    from lockstep.storage.fs import filesystem
    from lockstep.storage.urls import join
    from lockstep.storage.verify import verify

    folder = join(url or tempfile.gettempdir(), f"_doctor-{uuid.uuid4().hex}")
    try:
        write_dataset(spark.range(20).toDF("n"), folder, id_columns=["n"], split="1/1")
        faults = verify(folder)
        if faults:
            raise CheckFailed(f"a dataset that was written is damaged: {faults[0]}", next_step="Check the disk.")
    finally:
        filesystem(folder).discard(folder)
    return ", a dataset was written and verified"


def submitted_to(master: str) -> bool:
    """Whether spark-submit started this process with a master that begins so."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return False
    return str(_jvm({}).java.lang.System.getProperty("spark.master")).startswith(master)


def _jvm(settings: dict[str, str]) -> Any:
    """The Java process that a session will use, started with these settings."""
    from pyspark import SparkConf, SparkContext

    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        java_options(os.environ, short=True)
    # pyspark has no public way to start Java without a session, which would wait for the queue.
    SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(list(settings.items())))
    return SparkContext._jvm


def check_yarn() -> str:
    """The ResourceManager answers; the queue's share and state, and what the nodes have free."""
    if not {"HADOOP_CONF_DIR", "YARN_CONF_DIR", "PYSPARK_GATEWAY_PORT"} & set(os.environ):
        raise CheckFailed("HADOOP_CONF_DIR is not set", next_step="Point it at the folder with yarn-site.xml.")
    from pyspark import SparkConf

    jvm = _jvm({"spark.master": "yarn"})
    system = jvm.java.lang.System
    queue = str(system.getProperty("spark.yarn.queue") or "default")
    conf = jvm.org.apache.hadoop.yarn.conf.YarnConfiguration()
    for key in ("yarn.resourcemanager.connect.max-wait.ms", "ipc.client.rpc-timeout.ms", "ipc.client.connect.timeout"):
        conf.set(key, str(int(YARN_LIMIT_S * 500)))
    conf.set("yarn.resourcemanager.connect.retry-interval.ms", "1000")
    conf.set("ipc.client.connect.max.retries", "2")
    address = str(conf.get("yarn.resourcemanager.ha.rm-ids") or conf.get("yarn.resourcemanager.address"))

    def ask() -> tuple[Any, list[Any]]:
        client = jvm.org.apache.hadoop.yarn.client.api.YarnClient.createYarnClient()
        client.init(conf)
        client.start()
        try:
            return client.getQueueInfo(queue), list(client.getNodeReports(_running(jvm)))
        finally:
            client.stop()

    try:
        info, nodes = call_with_deadline(ask, YARN_LIMIT_S, what="the queue", whom=f"YARN's ResourceManager {address}")
    except LockstepError:
        raise
    except Exception as error:  # any of Java's
        reason = str(getattr(error, "java_exception", error)).splitlines()[0]
        raise CheckFailed(
            f"YARN's ResourceManager {address} does not answer: {reason[:200]}",
            next_step="Check yarn.resourcemanager.address in HADOOP_CONF_DIR/yarn-site.xml, and that it runs.",
        ) from None
    if info is None:
        raise CheckFailed(f"YARN has no queue {queue!r}", next_step="Name one of `yarn queue -list` in --queue.")
    settings = SparkConf(_jvm=jvm)
    asked = int(settings.get("spark.executor.instances", "2"))
    least = conf.getInt("yarn.scheduler.minimum-allocation-mb", 1024)
    container = container_of("yarn", settings, asked, least)
    assert container is not None, "YARN has containers"
    free = [each.getCapability().getMemorySize() - each.getUsed().getMemorySize() for each in nodes]
    left = sorted(free)
    if left and settings.get("spark.submit.deployMode", "client") == "client":  # else it runs already
        left[-1] -= master_mib(settings, least)
    room = sum(max(0, mib) // container.container_mib for mib in left)
    cores = sum(each.getCapability().getVirtualCores() - each.getUsed().getVirtualCores() for each in nodes)
    share = f"{info.getCapacity():.0%} of the cluster, at most {info.getMaximumCapacity():.0%}"
    found = f"queue {queue} has {share}, {info.getCurrentCapacity():.0%} of it used; "
    found += f"{len(nodes)} nodes with {sum(free)} MiB and {cores} cores free"
    if str(info.getQueueState().toString()) != "RUNNING":
        raise CheckFailed(f"queue {queue} is {info.getQueueState().toString()}", next_step="Name another in --queue.")
    found += f", room for {room} executors of {container.container_mib} MiB next to the application master"
    if room < asked or cores < 1:
        next_step = "Wait for other applications, give another --queue, or lower --num-executors or --executor-memory."
        raise CheckWarned(f"{found}, of {asked} that a job with these flags asks for", next_step=next_step)
    return found


def _running(jvm: Any) -> Any:
    """The argument of `getNodeReports` for nodes that run."""
    state = jvm.org.apache.hadoop.yarn.api.records.NodeState
    from pyspark import SparkContext

    assert SparkContext._gateway is not None
    states = SparkContext._gateway.new_array(state, 1)
    states[0] = state.RUNNING
    return states
