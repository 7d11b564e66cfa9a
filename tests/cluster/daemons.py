"""A real HDFS and YARN: NameNode, two DataNodes, ResourceManager and NodeManager, each a process of its own."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.storage.errors import LockstepError
from tests.cluster.conf import HOST, ROLES, free_ports, write_conf
from tests.cluster.jars import GATEWAYS, POM, hadoop_jars, java_home
from tests.cluster.process import Process, last_lines, spawn

HDFS = ("namenode", "datanode-1", "datanode-2")
YARN = ("resourcemanager", "nodemanager")
START_LIMIT_S = 240.0  # 7 s for HDFS and 6 s for YARN on an idle machine with 2 cores
ATTEMPTS = 3  # each with other ports

SERVER = "org.apache.hadoop.hdfs.server"
RESOURCES = "org.apache.hadoop.yarn.server"
MAIN = {
    "namenode": f"{SERVER}.namenode.NameNode",
    "namenode-2": f"{SERVER}.namenode.NameNode",
    "journalnode": "org.apache.hadoop.hdfs.qjournal.server.JournalNode",
    "kms": "org.apache.hadoop.crypto.key.kms.server.KMSWebServer",
    "httpfs": "org.apache.hadoop.fs.http.server.HttpFSServerWebServer",
    "datanode-1": f"{SERVER}.datanode.DataNode",
    "datanode-2": f"{SERVER}.datanode.DataNode",
    "resourcemanager": f"{RESOURCES}.resourcemanager.ResourceManager",
    "nodemanager": f"{RESOURCES}.nodemanager.NodeManager",
    "nodemanager-2": f"{RESOURCES}.nodemanager.NodeManager",
}
GATEWAY = (MAIN["kms"], MAIN["httpfs"])
HEAP_MB = {
    "namenode": 96, "namenode-2": 96, "journalnode": 64, "kms": 96, "httpfs": 96, "datanode-1": 64, "datanode-2": 64,
    "resourcemanager": 128, "nodemanager": 96, "nodemanager-2": 96,
}  # fmt: skip
JVM = (
    "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=48m", "-Xss512k", "-XX:-UsePerfData",
    "-Djava.net.preferIPv4Stack=true",
)  # fmt: skip
# Hadoop's daemons reach into these packages of the JDK by reflection.
OPENS = ("java.base/java.lang=ALL-UNNAMED", "java.base/java.util=ALL-UNNAMED")


class ClusterError(LockstepError):
    """The test cluster could not be started, or a daemon is not there in time."""


class Cluster:
    """The daemons under one folder. `start_hdfs()` and `start_yarn()` return when they serve; `stop()` ends them.

    Names: namenode, datanode-1, datanode-2, resourcemanager, nodemanager.
    """

    def __init__(self, folder: Path, *, keep: bool = False) -> None:
        self.folder = folder.resolve()
        self.conf_dir = str(self.folder / "conf")
        self.ports: dict[str, int] = {}
        self.processes: dict[str, Process] = {}
        self.keep = keep
        self._paused: set[str] = set()
        self._spawned_at: dict[str, float] = {}

    # what tests and shells need to know

    @property
    def hdfs_url(self) -> str:
        return f"hdfs://{HOST}:{self.ports['namenode']}"

    @property
    def yarn_url(self) -> str:
        return f"http://{HOST}:{self.ports['resourcemanager-http']}"

    @property
    def env(self) -> dict[str, str]:
        """Variables with which `spark-submit --master yarn` and hdfs-native find this cluster; add them to yours."""
        return {
            "HADOOP_CONF_DIR": self.conf_dir,
            "YARN_CONF_DIR": self.conf_dir,
            "JAVA_HOME": str(java_home()),
            "PYSPARK_PYTHON": sys.executable,
        }

    @property
    def submit_conf(self) -> list[str]:
        """Arguments for spark-submit. Spark's jars are on each node already, so none is uploaded (460 MB otherwise); so
        are compiled kernels, which a container would look for in another home.

        The driver's page stays off: under YARN Spark 4.3 now and then fails at its start, when the page's handlers and
        YARN's filter for it are added at the same moment (ConcurrentModificationException in Jetty).
        """
        import importlib.util

        from lockstep.storage.kernels.jit import cache_folder

        spec = importlib.util.find_spec("pyspark")
        assert spec is not None and spec.origin is not None
        jars = f"spark.yarn.jars=local:{Path(spec.origin).parent}/jars/*"
        # A rank is no part of Java's heap: by default a container has 384 MiB for all that is not.
        settings = [jars, "spark.log.level=WARN", "spark.ui.enabled=false", "spark.executor.memoryOverhead=1536m"]
        folder = cache_folder()
        if folder is not None:
            settings.append(f"spark.executorEnv.NUMBA_CACHE_DIR={folder}")
        return ["--master", "yarn", *(word for setting in settings for word in ("--conf", setting))]

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    # a whole cluster

    def start_hdfs(self) -> Cluster:
        """An empty HDFS with both DataNodes. Raises ClusterError with the last log lines of what did not start."""
        self._start_on_free_ports(HDFS)
        return self

    def start_yarn(self) -> Cluster:
        """ResourceManager and NodeManager beside HDFS; nothing happens where they run."""
        missing = [name for name in YARN if not self.running(name)]
        if len(missing) == len(YARN):
            self._start_on_free_ports(YARN)  # of now: what was free when HDFS started may be another cluster's
        else:
            self._start_all(missing)
        return self

    def stop(self) -> None:
        """End every daemon; NodeManagers first and with a grace, since they end their containers."""
        for name in reversed(list(self.processes)):
            self.processes[name].end(grace_s=5.0 if name.startswith("nodemanager") else 0.0)
        self.processes.clear()
        self._paused.clear()

    # one daemon

    def running(self, name: str) -> bool:
        return name in self.processes and self.processes[name].alive

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.processes[name].end()
        self._paused.discard(name)

    def pause(self, name: str) -> None:
        """SIGSTOP: the daemon keeps its sockets and answers nothing."""
        if not self.processes[name].pause():
            raise ClusterError(f"{name} does not run or does not stop", next_step="start() it before pause().")
        self._paused.add(name)

    def resume(self, name: str) -> None:
        self.processes[name].signal(signal.SIGCONT)
        self._paused.discard(name)

    def start(self, name: str) -> None:
        """Start a daemon that was killed, on its old ports and data, and wait until it serves."""
        if self.running(name):
            raise ClusterError(f"{name} runs already", next_step="kill() it before start().")
        self._start_all([name])

    def heal(self) -> None:
        """Resume what is paused and start what is dead: the next test finds every daemon serving."""
        for name in list(self._paused):
            self.resume(name)
        dead = [name for name in self.processes if not self.running(name)]
        if dead:
            self._start_all(dead)
        self._wait([name for name in self.processes if name not in dead])

    # how

    def _start_on_free_ports(self, names: Sequence[str]) -> None:
        """Start daemons none of which runs, anew on other ports where another process was faster."""
        for attempt in range(1, ATTEMPTS + 1):
            found = free_ports()
            self.ports = found if not self.ports else self.ports | {r: found[r] for r in ROLES if _of(r, names)}
            self._configure()
            if "namenode" in names:
                self._format()
            try:
                self._start_all(names)
                return
            except ClusterError as error:
                clash = any("BindException" in last_lines(self.log(name), 200) for name in names)
                for name in names:
                    if name in self.processes:
                        self.processes.pop(name).end()
                if attempt == ATTEMPTS or not clash:
                    raise error
                for name in names:
                    self.log(name).unlink(missing_ok=True)

    def _configure(self) -> None:
        write_conf(Path(self.conf_dir), self.folder, self.ports)

    def _format(self) -> None:
        for name in ("namenode", "datanode-1", "datanode-2"):
            subprocess.run(["rm", "-rf", str(self.folder / name)], check=True)
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self._run("namenode-format", [*self._java("namenode"), "-format", "-nonInteractive"])

    def _run(self, name: str, command: Sequence[str]) -> None:
        """Run a command of Hadoop to its end, with its output in the log `name`."""
        with self.log(name).open("wb") as output:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=self._environment(), timeout=START_LIMIT_S
            )
        if done.returncode != 0:
            raise ClusterError(f"{name} failed", got=last_lines(self.log(name)))

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "JAVA_HOME": str(java_home()), "HADOOP_CONF_DIR": self.conf_dir}

    def _java(self, name: str) -> list[str]:
        return self._jvm(HEAP_MB[name], MAIN[name], *self._settings(name))

    def _jvm(self, heap_mb: int, main: str, *arguments: str) -> list[str]:
        classpath = os.pathsep.join([self.conf_dir, *map(str, hadoop_jars(GATEWAYS if main in GATEWAY else POM))])
        options = [f"-Xmx{heap_mb}m", *JVM, *self._options(), f"-Djava.io.tmpdir={self.folder / 'tmp'}"]
        options += [f"--add-opens={package}" for package in OPENS]
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        return [str(java_home() / "bin" / "java"), *options, "-cp", classpath, main, *arguments]

    def _options(self) -> list[str]:
        """More options of each Java."""
        return []

    def _settings(self, name: str) -> list[str]:
        if not name.startswith("datanode"):
            return []
        settings = {
            "dfs.datanode.data.dir": (self.folder / name).as_uri(),
            "dfs.datanode.address": f"{HOST}:{self.ports[name]}",
            "dfs.datanode.http.address": f"{HOST}:{self.ports[name + '-http']}",
            "dfs.datanode.ipc.address": f"{HOST}:{self.ports[name + '-ipc']}",
            "dfs.datanode.hostname": HOST,
            # a DataNode notices a frozen one behind it in a pipeline after 3 s, not after 60 s
            "dfs.client.socket-timeout": "3000",
        }
        return [part for key, value in settings.items() for part in ("-D", f"{key}={value}")]

    def _start_all(self, names: Sequence[str]) -> None:
        for name in names:
            self._spawned_at[name] = time.monotonic()
            self.processes[name] = spawn(name, self._java(name), self._environment(), self.log(name), keep=self.keep)
        self._wait(names)

    def _wait(self, names: Sequence[str]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        for name in names:
            while not self._serves(name):
                if not self.running(name):
                    self._fail(name, "ended while it was starting")
                if time.monotonic() > deadline:
                    self._fail(name, f"does not serve within {START_LIMIT_S:.0f} s")
                time.sleep(0.1)

    def _fail(self, name: str, what: str) -> None:
        log = self.log(name)
        raise ClusterError(f"{name} {what}", got=f"the end of {log}:\n{last_lines(log)}", next_step="Read the log.")

    def _serves(self, name: str) -> bool:
        try:
            return READY[name](self)
        except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError):
            return False  # not yet: no socket, half an answer, or a bean that is not registered so far

    def _get(self, role: str, path: str) -> dict[str, object]:
        url = f"http://{HOST}:{self.ports[role]}{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)

    def missing_replicas(self, folder: str = "/") -> int:
        """How many replicas of closed blocks below a folder are in no DataNode that lives; fsck looks at each block.

        The NameNode's own counts are 0 while it starts and has not looked yet.
        """
        url = f"http://{HOST}:{self.ports['namenode-http']}/fsck?ugi={getpass.getuser()}&path={folder}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = re.search(r"Missing replicas:\s+(\d+)", said := answer.read().decode())
        if found is None:
            raise ClusterError("fsck counts no replicas", got=said[-500:])
        return int(found[1])

    def _bean(self, role: str, query: str) -> dict[str, object]:
        beans = self._get(role, f"/jmx?qry=Hadoop:{query}")["beans"]
        assert isinstance(beans, list)
        if not beans:
            raise KeyError(query)
        return beans[0]


def _of(role: str, names: Sequence[str]) -> bool:
    """Whether one of these daemons has the port of this role: `nodemanager-http` is the NodeManager's."""
    return any(role == name or role.startswith(f"{name}-") for name in names)


def _namenode_serves(cluster: Cluster) -> bool:
    """Out of safe mode; with both DataNodes where both run."""
    state = cluster._bean("namenode-http", "service=NameNode,name=FSNamesystemState")
    wanted = sum(cluster.running(name) for name in ("datanode-1", "datanode-2"))
    live = state["NumLiveDataNodes"]
    return state["FSState"] == "Operational" and isinstance(live, int) and live >= wanted


def _datanode_serves(name: str) -> Callable[[Cluster], bool]:
    """Registered, and its block report is in: only then do reads find its replicas."""

    def serves(cluster: Cluster) -> bool:
        info = cluster._bean(f"{name}-http", "service=DataNode,name=DataNodeInfo")["BPServiceActorInfo"]
        actors = json.loads(str(info))
        # Before the first report the bean gives the time since the machine's start.
        age_s = time.monotonic() - cluster._spawned_at[name]
        return bool(actors) and all(
            actor["ActorState"] == "RUNNING" and int(actor["LastBlockReport"]) <= age_s for actor in actors
        )

    return serves


def _resourcemanager_serves(cluster: Cluster) -> bool:
    info = cluster._get("resourcemanager-http", "/ws/v1/cluster/info")["clusterInfo"]
    return isinstance(info, dict) and info["state"] == "STARTED"


def _nodemanager_serves(cluster: Cluster) -> bool:
    metrics = cluster._get("resourcemanager-http", "/ws/v1/cluster/metrics")["clusterMetrics"]
    wanted = sum(cluster.running(name) for name in ("nodemanager", "nodemanager-2"))
    return isinstance(metrics, dict) and metrics["activeNodes"] >= wanted


READY: dict[str, Callable[[Cluster], bool]] = {
    "namenode": _namenode_serves,
    "datanode-1": _datanode_serves("datanode-1"),
    "datanode-2": _datanode_serves("datanode-2"),
    "resourcemanager": _resourcemanager_serves,
    "nodemanager": _nodemanager_serves,
    "nodemanager-2": _nodemanager_serves,
}
