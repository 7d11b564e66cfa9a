"""The cluster's configuration: ports, and one HADOOP_CONF_DIR that serves every daemon and every client."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

HOST = "127.0.0.1"
ROLES = (
    "namenode", "namenode-http",
    "datanode-1", "datanode-1-http", "datanode-1-ipc",
    "datanode-2", "datanode-2-http", "datanode-2-ipc",
    "resourcemanager", "resourcemanager-scheduler", "resourcemanager-tracker", "resourcemanager-admin",
    "resourcemanager-http", "nodemanager", "nodemanager-localizer", "nodemanager-http",
    # of tests/cluster/sites
    "namenode-2", "namenode-2-http", "journalnode", "journalnode-http", "kdc", "kms", "httpfs",
    "nodemanager-2", "nodemanager-2-localizer", "nodemanager-2-http",
    "journalnode-https", "namenode-https", "namenode-2-https", "datanode-1-https", "datanode-2-https",
)  # fmt: skip

# Below the range from which Linux takes ports for outgoing connections, so that a client's socket cannot take one
# between our look and the daemon's bind.
PORTS = range(15000, 32000)

LOG4J = """\
log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""

CAPACITY = {
    "yarn.scheduler.capacity.root.queues": "default",
    "yarn.scheduler.capacity.root.default.capacity": "100",
    "yarn.scheduler.capacity.root.default.maximum-capacity": "100",
    # Half a laptop's memory goes to application masters before a second application waits for the first.
    "yarn.scheduler.capacity.maximum-am-resource-percent": "0.5",
    "yarn.scheduler.capacity.resource-calculator": "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator",
}


def free_ports() -> dict[str, int]:
    """One free port a role. A port may be taken again before its daemon binds it: the caller then starts anew."""
    found: dict[str, int] = {}
    for port in random.SystemRandom().sample(PORTS, 400):  # of no seed that two workers could share
        if len(found) == len(ROLES):
            break
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        found[ROLES[len(found)]] = port
    return found


def core_site(ports: dict[str, int], folder: Path) -> dict[str, str]:
    return {"fs.defaultFS": f"hdfs://{HOST}:{ports['namenode']}", "hadoop.tmp.dir": str(folder / "tmp")}


def hdfs_site(ports: dict[str, int], folder: Path) -> dict[str, str]:
    return {
        "dfs.namenode.rpc-address": f"{HOST}:{ports['namenode']}",
        "dfs.namenode.http-address": f"{HOST}:{ports['namenode-http']}",
        "dfs.namenode.name.dir": (folder / "namenode").as_uri(),
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.replication": "2",
        "dfs.blocksize": str(32 << 20),
        "dfs.namenode.fs-limits.min-block-size": "1024",
        "dfs.permissions.superusergroup": "root",
        # start-up: leave safe mode as soon as both DataNodes are there
        "dfs.heartbeat.interval": "1",
        "dfs.namenode.safemode.extension": "0",
        "dfs.namenode.safemode.min.datanodes": "2",
        # a DataNode is dead after 2 * 2 s + 10 * 1 s = 14 s, not after the stock 630 s
        "dfs.namenode.heartbeat.recheck-interval": "2000",
        # small processes
        "dfs.namenode.handler.count": "4",
        "dfs.datanode.handler.count": "3",
        "dfs.datanode.directoryscan.interval": "-1",
        "dfs.block.scanner.volume.bytes.per.second": "-1",
        # tests need no edit log that survives a power cut
        "dfs.namenode.edits.noeditlogchannelflush": "true",
    }


def yarn_site(ports: dict[str, int], folder: Path) -> dict[str, str]:
    return {
        "yarn.resourcemanager.hostname": HOST,
        "yarn.resourcemanager.address": f"{HOST}:{ports['resourcemanager']}",
        "yarn.resourcemanager.scheduler.address": f"{HOST}:{ports['resourcemanager-scheduler']}",
        "yarn.resourcemanager.resource-tracker.address": f"{HOST}:{ports['resourcemanager-tracker']}",
        "yarn.resourcemanager.admin.address": f"{HOST}:{ports['resourcemanager-admin']}",
        "yarn.resourcemanager.webapp.address": f"{HOST}:{ports['resourcemanager-http']}",
        "yarn.resourcemanager.scheduler.class": (
            "org.apache.hadoop.yarn.server.resourcemanager.scheduler.capacity.CapacityScheduler"
        ),
        "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "200",
        "yarn.nodemanager.address": f"{HOST}:{ports['nodemanager']}",
        "yarn.nodemanager.localizer.address": f"{HOST}:{ports['nodemanager-localizer']}",
        "yarn.nodemanager.webapp.address": f"{HOST}:{ports['nodemanager-http']}",
        "yarn.nodemanager.local-dirs": str(folder / "yarn-local"),
        "yarn.nodemanager.log-dirs": str(folder / "yarn-logs"),
        "yarn.nodemanager.delete.debug-delay-sec": "600",
        "yarn.nodemanager.disk-health-checker.enable": "false",
        # A container above its memory is killed. Hadoop 3.5.0 checks nothing while `enforced` has its default, true
        # (YARN-11967). The check of virtual memory stays off: Spark's application master on JDK 17 dies of it.
        "yarn.nodemanager.pmem-check-enabled": "true",
        "yarn.nodemanager.resource.memory.enforced": "false",
        "yarn.nodemanager.vmem-check-enabled": "false",
        "yarn.nodemanager.container-monitor.interval-ms": "1000",
        # room for a driver's application master and a few executors, whatever the machine has
        "yarn.nodemanager.resource.memory-mb": "8192",
        "yarn.nodemanager.resource.cpu-vcores": "8",
        "yarn.scheduler.minimum-allocation-mb": "256",
        "yarn.nodemanager.resourcemanager.connect.max-wait.ms": "60000",
    }


def write_conf(
    conf_dir: Path,
    folder: Path,
    ports: dict[str, int],
    core: Mapping[str, str] = {},
    hdfs: Mapping[str, str] = {},
    yarn: Mapping[str, str] = {},
) -> None:
    """Write `conf_dir`, a HADOOP_CONF_DIR, for daemons that keep their data under `folder`; `core`, `hdfs` and `yarn`
    are more properties of these files, or other values.
    """
    conf_dir.mkdir(parents=True, exist_ok=True)
    for name, entries in (
        ("core-site", {**core_site(ports, folder), **core}),
        ("hdfs-site", {**hdfs_site(ports, folder), **hdfs}),
        ("yarn-site", {**yarn_site(ports, folder), **yarn}),
        ("capacity-scheduler", CAPACITY),
    ):
        write_properties(conf_dir / f"{name}.xml", entries)
    (conf_dir / "log4j.properties").write_text(LOG4J, encoding="utf-8")


def write_properties(path: Path, entries: Mapping[str, str]) -> None:
    """Write one of Hadoop's XML files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(
        f"  <property><name>{escape(key)}</name><value>{escape(value)}</value></property>\n"
        for key, value in entries.items()
    )
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<configuration>\n{rows}</configuration>\n'
    path.write_text(text, encoding="utf-8")
