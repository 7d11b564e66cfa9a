"""A real control plane (etcd, kube-apiserver, kube-scheduler, kube-controller-manager) with a stand-in for kubelets.

    plane = ControlPlane(folder)
    plane.start()                                  # returns when both nodes are ready
    plane.api.get("/api/v1/nodes")
    subprocess.run([...], env=os.environ | plane.env)   # kubectl and spark-submit find it by KUBECONFIG
    plane.stop()

The API server listens on port 443 of a bridge of its own, as pods reach it there. Needs root.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests

from lockstep.storage.errors import LockstepError
from tests.cluster.process import Process, last_lines, spawn
from tests.kubernetes.binaries import binary, cache_folder

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = "127.0.0.1"
START_LIMIT_S = 240.0  # 20 s on an idle machine with 2 cores
CALL_LIMIT_S = 30.0
NODES = ("node-1", "node-2")
SUBNETS = "10.213.0.0/16"  # one /24 of it for a control plane
KUBELET = "standin-kubelet"
PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", KUBELET)


class PlaneError(LockstepError):
    """The control plane could not be started, or the API server refused a call."""


class Api:
    """Calls of the API server, as its administrator."""

    def __init__(self, url: str, token: str, authority: Path) -> None:
        self._url, self._session = url, requests.Session()
        self._session.headers["Authorization"] = f"Bearer {token}"
        self._session.verify = str(authority)
        self._session.trust_env = False  # a bundle of the environment would come before it

    def call(self, verb: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """One call; None for what is not there, else the answer. Raises PlaneError for a refusal."""
        answer = self._session.request(
            verb, self._url + path, data=None if body is None else json.dumps(body), headers={"Content-Type": kind},
            timeout=CALL_LIMIT_S,
        )  # fmt: skip
        if answer.status_code == requests.codes.not_found:
            return None
        if not answer.ok:
            raise PlaneError(f"{verb} {path} was refused", got=answer.text[:1000], next_step="Look at the API's words.")
        return answer.json() if "json" in answer.headers.get("Content-Type", "") else answer.text

    def get(self, path: str) -> Any:
        """The answer to GET; None if there is no such object."""
        return self.call("GET", path)

    def patch(self, path: str, body: Any) -> Any:
        """Merge fields into an object; None if there is no such object."""
        return self.call("PATCH", path, body, "application/merge-patch+json")

    def pods(self, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """The pods of a namespace with such labels."""
        found: list[dict[str, Any]] = self.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")["items"]
        return found

    def delete_pod(self, namespace: str, name: str, grace_s: int | None = None) -> None:
        """Delete a pod, with its own grace period unless `grace_s` says otherwise."""
        query = "" if grace_s is None else f"?gracePeriodSeconds={grace_s}"
        self.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}{query}")


class ControlPlane:
    """The programs under one folder; `keep` lets them outlive this process (`make kubernetes`)."""

    def __init__(self, folder: Path, *, keep: bool = False) -> None:
        self.folder, self.keep = folder.resolve(), keep
        self.processes: dict[str, Process] = {}
        self.bridge = self.address = ""

    @property
    def url(self) -> str:
        """The API server's address."""
        return f"https://{self.address}:443"

    @property
    def config(self) -> Path:
        """The file that KUBECONFIG names."""
        return self.folder / "config"

    @property
    def authority(self) -> Path:
        """The certificate with which clients check the API server."""
        return self.folder / "certificates" / "apiserver.crt"

    @property
    def api(self) -> Api:
        """Calls as administrator."""
        return Api(self.url, (self.folder / "token").read_text(), self.authority)

    @property
    def env(self) -> dict[str, str]:
        """Variables with which kubectl and spark-submit find this control plane; add them to yours."""
        path = f"{cache_folder()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"KUBECONFIG": str(self.config), "PATH": path}

    def log(self, name: str) -> Path:
        """What a program has printed."""
        return self.folder / "logs" / f"{name}.log"

    def start(self) -> ControlPlane:
        """Start all; raises PlaneError with the last log lines of what did not start."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        (self.folder / "certificates").mkdir(exist_ok=True)
        self._lay_bridge()
        try:
            self._write_keys()
            client, peer = (f"http://{LOOPBACK}:{port}" for port in free_ports(2))
            self._spawn("etcd", *_etcd(self.folder / "etcd", client, peer))
            self._spawn("kube-apiserver", *self._apiserver(client))
            self._wait("kube-apiserver", lambda: self.authority.is_file() and self.api.get("/readyz") == "ok")
            self._write_config()
            own = f"--kubeconfig={self.config}"
            self._spawn(
                "kube-controller-manager", own, "--leader-elect=false", "--secure-port=0",
                f"--root-ca-file={self.authority}", f"--service-account-private-key-file={self._key}",
            )  # fmt: skip
            self._spawn("kube-scheduler", own, "--leader-elect=false", "--secure-port=0")
            self.start_kubelet()
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            self._wait("kube-controller-manager", lambda: self.api.get(account) is not None)
        except BaseException:
            self.stop()
            raise
        return self

    def start_kubelet(self) -> None:
        """Start the stand-in for the kubelet, and wait until its nodes can take pods."""
        module = f"tests.kubernetes.{KUBELET.replace('-', '_')}"
        command = [sys.executable, "-m", module, str(self.folder), self.bridge, self.address, *NODES]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.processes[KUBELET] = spawn(KUBELET, command, environment, self.log(KUBELET), keep=self.keep)
        self._wait(KUBELET, self._nodes_ready)

    def stop(self) -> None:
        """End all; the stand-in first, which ends its pods, and then the bridge."""
        for name in reversed(list(self.processes)):
            self.processes[name].end(grace_s=10.0)
        self.processes.clear()
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)

    def _nodes_ready(self) -> bool:
        nodes = self.api.get("/api/v1/nodes")["items"]
        return len(nodes) == len(NODES) and not any(node["spec"].get("taints") for node in nodes)

    def _lay_bridge(self) -> None:
        """A bridge with an address in a subnet that no interface of this machine has yet."""
        used = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
        free = [net for net in ipaddress.ip_network(SUBNETS).subnets(new_prefix=24) if f" {net[1]}/" not in used]
        net = free[secrets.randbelow(len(free))]
        self.address, self.bridge = str(net[1]), f"lk{str(net[1]).split('.')[2]}"
        for words in (
            ["link", "add", self.bridge, "type", "bridge"],
            ["addr", "add", f"{self.address}/24", "dev", self.bridge],
            ["link", "set", self.bridge, "up"],
        ):
            subprocess.run(["ip", *words], check=True, capture_output=True)

    @property
    def _key(self) -> Path:
        return self.folder / "certificates" / "accounts.key"

    def _write_keys(self) -> None:
        subprocess.run(["openssl", "genrsa", "-out", str(self._key), "2048"], check=True, capture_output=True)
        token = secrets.token_hex(16)
        for name, text in (("token", token), ("tokens.csv", f'{token},admin,admin,"system:masters"\n')):
            (self.folder / name).touch(mode=0o600)
            (self.folder / name).write_text(text)

    def _apiserver(self, etcd: str) -> list[str]:
        issuer = "https://kubernetes.default.svc.cluster.local"
        return [
            f"--etcd-servers={etcd}", f"--bind-address={self.address}", "--secure-port=443",
            f"--advertise-address={self.address}", f"--cert-dir={self.authority.parent}",
            f"--service-account-key-file={self._key}", f"--service-account-signing-key-file={self._key}",
            f"--service-account-issuer={issuer}", "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder / 'tokens.csv'}", "--service-cluster-ip-range=10.96.0.0/24",
            "--kubelet-preferred-address-types=InternalIP",
        ]  # fmt: skip

    def _write_config(self) -> None:
        """The kubeconfig, in JSON, which is YAML too."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": self.url, "certificate-authority": str(self.authority)}}
            ],
            "users": [{"name": "admin", "user": {"token": (self.folder / "token").read_text()}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": "default"}}],
            "current-context": "test",
        }
        self.config.touch(mode=0o600)
        self.config.write_text(json.dumps(document, indent=1))

    def _spawn(self, name: str, *arguments: str) -> None:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        self.processes[name] = spawn(name, [binary(name), *arguments], environment, self.log(name), keep=self.keep)

    def _wait(self, name: str, ready: Any) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                if ready():
                    return
            except (requests.RequestException, OSError, PlaneError, TypeError):
                pass  # not yet
            if not self.processes[name].alive or time.monotonic() > deadline:
                what = "ended while it was starting" if not self.processes[name].alive else "is not ready in time"
                raise PlaneError(f"{name} {what}", got=last_lines(self.log(name)), next_step=f"Read {self.log(name)}.")
            time.sleep(0.2)


def _etcd(folder: Path, client: str, peer: str) -> Sequence[str]:
    """Arguments of etcd; a test's data need no sync to disk."""
    urls = [f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}"]
    urls += [f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"]
    return [f"--data-dir={folder}", "--unsafe-no-fsync", *urls]


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that are free now."""
    probes = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
