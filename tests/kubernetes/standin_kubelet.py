"""The stand-in for kubelets of several nodes: it runs the pods that the scheduler binds to them, as processes here.

    python -m tests.kubernetes.standin_kubelet FOLDER BRIDGE ADDRESS NODE...

It is true to a kubelet in what Spark and Lockstep meet: namespaces for network, processes, mounts and host name; an
address for each pod; a limit on memory, whose breach is OOMKilled; env, config maps, secrets, tokens of service
accounts, empty and host folders; preStop, SIGTERM, the grace period, SIGKILL; phases, exit codes and reasons; logs. It
runs no images (standin_container.py), restarts no containers, checks no probes, and limits no processors. /etc/hosts
stands in for the cluster's DNS, which there is not, nor kube-proxy.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import requests

from tests.kubernetes.control_plane import Api, PlaneError
from tests.kubernetes.standin_logs import serve_logs
from tests.kubernetes.standin_pod import Pod

LOOK_S = 0.2
BEAT_S = 10.0
CAPACITY = {"cpu": "32", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": "2"}
CGROUPS = Path("/sys/fs/cgroup/memory")

log = logging.getLogger("kubelet")


class Kubelet:
    """Nodes and their pods."""

    def __init__(self, api: Api, folder: Path, bridge: str, address: str, nodes: list[str]) -> None:
        self.api, self.folder, self.bridge, self.address, self.nodes = api, folder, bridge, address, nodes
        self.pods: dict[str, Pod] = {}
        self.numbers = itertools.cycle(range(10, 250))  # the last part of addresses
        self.port = serve_logs(address, folder)
        cgroups = CGROUPS / bridge
        self.cgroups = cgroups if _makes(cgroups) else None
        if self.cgroups is None:
            log.warning("no limits on memory: %s cannot be made", cgroups)

    def register(self) -> None:
        """Create the nodes."""
        for node in self.nodes:
            named = {"name": node, "labels": {"kubernetes.io/hostname": node}}
            body = {"apiVersion": "v1", "kind": "Node", "metadata": named}
            if self.api.get(f"/api/v1/nodes/{node}") is None:
                self.api.call("POST", "/api/v1/nodes", body)

    def beat(self) -> None:
        """Say that the nodes live."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "a stand-in"}
        for node in self.nodes:
            status = {
                "capacity": CAPACITY,
                "allocatable": CAPACITY,
                "conditions": [{**ready, "lastHeartbeatTime": now, "lastTransitionTime": now}],
                "addresses": [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": node}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
            }
            self.api.patch(f"/api/v1/nodes/{node}/status", {"status": status})

    def look(self) -> None:
        """Start new pods, end deleted ones, forget those that are gone."""
        listed = {
            pod["metadata"]["uid"]: pod
            for pod in self.api.get("/api/v1/pods")["items"]
            if pod["spec"].get("nodeName") in self.nodes
        }
        hosts = self._names(listed.values())
        for uid, document in listed.items():
            pod = self.pods.get(uid)
            deleted = document["metadata"].get("deletionTimestamp") is not None
            if pod is None and document["status"]["phase"] == "Pending" and not deleted:
                pod = self.pods[uid] = Pod(self, document, next(self.numbers))
                pod.write_hosts(hosts)
                pod.start()
            elif pod is None and deleted:
                self.api.delete_pod(document["metadata"]["namespace"], document["metadata"]["name"], 0)
            elif pod is not None:
                pod.write_hosts(hosts)
                if deleted:
                    pod.delete(float(document["metadata"].get("deletionGracePeriodSeconds") or 0))
        for uid in self.pods.keys() - listed.keys():  # deleted with a grace period of 0, or at their end
            pod = self.pods[uid]
            pod.kill()
            if not pod.is_alive():
                pod.clean()
                del self.pods[uid]

    def _names(self, pods: Any) -> str:
        """Lines of /etc/hosts: the API server, and each service by the first pod that it selects."""
        lines = [f"{self.address} kubernetes.default.svc kubernetes.default.svc.cluster.local kubernetes.default"]
        for service in self.api.get("/api/v1/services")["items"]:
            wanted, name = service["spec"].get("selector"), service["metadata"]["name"]
            space = service["metadata"]["namespace"]
            for pod in pods if wanted else ():
                labels, address = pod["metadata"].get("labels", {}), pod["status"].get("podIP")
                if pod["metadata"]["namespace"] == space and wanted.items() <= labels.items() and address:
                    names = f"{name}.{space}.svc"
                    lines.append(f"{address} {names} {names}.cluster.local {name}.{space} {name}")
                    break
        return "\n".join(lines) + "\n"

    def end(self) -> None:
        """Kill all pods."""
        for pod in self.pods.values():
            pod.kill()
        for pod in self.pods.values():
            pod.join(10.0)
            pod.clean()
        if self.cgroups is not None:
            self.cgroups.rmdir()


def _makes(folder: Path) -> bool:
    try:
        folder.mkdir(exist_ok=True)
        return (folder / "memory.limit_in_bytes").is_file()
    except OSError:
        return False


def main(folder: Path, bridge: str, address: str, nodes: list[str]) -> None:
    """Run until SIGTERM."""
    api = Api(f"https://{address}:443", (folder / "token").read_text(), folder / "certificates" / "apiserver.crt")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    shutil.rmtree(folder / "pods", ignore_errors=True)
    kubelet = Kubelet(api, folder, bridge, address, nodes)
    kubelet.register()
    beaten = 0.0
    while not ended.wait(LOOK_S):
        try:
            if time.monotonic() >= beaten + BEAT_S:
                kubelet.beat()
                beaten = time.monotonic()
            kubelet.look()
        except (requests.RequestException, PlaneError) as error:
            log.warning("%s", error)
    kubelet.end()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
