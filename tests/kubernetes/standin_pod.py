"""One pod of the stand-in kubelet: its network, volumes and containers, its status, and its end."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.jars import java_home
from tests.cluster.process import LIBC, PR_SET_PDEATHSIG
from tests.kubernetes.standin_container import Container, command, image, write_spec

if TYPE_CHECKING:
    from tests.kubernetes.standin_kubelet import Kubelet

log = logging.getLogger("kubelet")
LOOK_S = 0.05
AGAIN_S = 0.3  # while a volume's source is not there yet
TOKEN_S = 3600
SIZE = re.compile(r"(\d+)(Ki|Mi|Gi|k|M|G)?")
UNITS = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9}


class Pod(threading.Thread):
    """Runs one pod to its end; `delete` and `kill` come from the kubelet's thread."""

    def __init__(self, kubelet: Kubelet, document: dict[str, Any], number: int) -> None:
        super().__init__(name=document["metadata"]["name"], daemon=True)
        self._kubelet, self._document = kubelet, document
        self._spec, meta = document["spec"], document["metadata"]
        self._space, self._uid = meta["namespace"], meta["uid"]
        self._path = f"/api/v1/namespaces/{self._space}/pods/{self.name}"
        self._folder = kubelet.folder / "pods" / self._uid
        self._folder.mkdir(parents=True)
        self.address = f"{kubelet.address.rpartition('.')[0]}.{number}"
        self._link = f"{kubelet.bridge}p{number}"
        self._hosts = ""
        self._env: dict[str, str] = {}
        self._grace_s: float | None = None
        self._asked = threading.Event()
        self._killed = threading.Event()
        self._cgroup: Path | None = None

    def delete(self, grace_s: float) -> None:
        """End the pod: preStop, SIGTERM, and SIGKILL after `grace_s` seconds."""
        self._grace_s = grace_s if self._grace_s is None else min(grace_s, self._grace_s)
        self._asked.set()

    def kill(self) -> None:
        """End the pod at once."""
        self._killed.set()

    def write_hosts(self, names: str) -> None:
        """Write /etc/hosts of the pod, in place, as containers have the file mounted."""
        if names != self._hosts:
            own = f"127.0.0.1 localhost\n{self.address} {self._hostname}\n"
            (self._folder / "hosts").write_text(own + names)
            self._hosts = names

    def clean(self) -> None:
        """Remove what is left of it but its logs."""
        subprocess.run(["ip", "link", "del", self._link], capture_output=True, check=False)
        if self._cgroup is not None:
            with contextlib.suppress(OSError):
                self._cgroup.rmdir()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _hostname(self) -> str:
        return str(self._spec.get("hostname") or self.name)[:63]

    def run(self) -> None:
        """Run the containers, report the end, and have a deleted pod forgotten."""
        pause = None
        try:
            pause = self._network()
            statuses = []
            for one in [*self._spec.get("initContainers", ()), *self._spec["containers"]]:
                statuses.append(self._run_container(one, pause))
                if statuses[-1]["state"]["terminated"]["exitCode"]:
                    break
            self._report_end(statuses)
        except Exception:
            log.exception("%s failed", self.name)
            self._set_status({"phase": "Failed", "reason": "StandInFailed"})
        finally:
            if pause is not None:
                pause.kill()
                pause.wait()
        while not self._killed.wait(LOOK_S):
            if self._asked.is_set():
                self._kubelet.api.delete_pod(self._space, self.name, 0)
                return

    def _network(self) -> subprocess.Popen[bytes]:
        """A process that keeps the pod's network namespace, joined to the bridge."""
        pause = spawn(["unshare", "--net", "sleep", "infinity"])
        own, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + 10.0
        while os.readlink(f"/proc/{pause.pid}/ns/net") == own and time.monotonic() < deadline:
            time.sleep(0.01)
        subprocess.run(["ip", "link", "del", self._link], capture_output=True, check=False)
        ends = f"link add {self._link} type veth peer name eth0 netns {pause.pid}"
        _ip(ends, f"link set {self._link} master {self._kubelet.bridge}", f"link set {self._link} up")
        inside = ["nsenter", f"--net=/proc/{pause.pid}/ns/net"]
        mine = (f"addr add {self.address}/24 dev eth0", "link set lo up", "link set eth0 up")
        _ip(*mine, f"route add default via {self._kubelet.address}", inside=inside)
        return pause

    def _run_container(self, one: dict[str, Any], pause: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Run a container to its end; returns its status."""
        folder = self._folder / one["name"]
        folder.mkdir()
        volumes = {volume["name"]: self._volume(volume) for volume in self._spec.get("volumes", ())}
        mounts = [(str(self._folder / "hosts"), "/etc/hosts")]
        for mount in one.get("volumeMounts", ()):
            mounts.append((str(volumes[mount["name"]] / mount.get("subPath", "")), mount["mountPath"]))
        env, entry = image()
        env |= {"KUBERNETES_SERVICE_HOST": self._kubelet.address, "KUBERNETES_SERVICE_PORT": "443"}
        env |= {"HOSTNAME": self._hostname} | self._environment(one)
        self._env = env
        argv = [*(one.get("command") or entry), *one.get("args", ())]
        self._make_cgroup(one)
        spec = Container(
            folder=str(folder), argv=[_expand(word, env) for word in argv], env=env, hostname=self._hostname,
            workdir=one.get("workingDir"),
            mounts=mounts, cgroup=str(self._cgroup) if self._cgroup else None, java=str(java_home()),
        )  # fmt: skip
        write_spec(spec, folder / "spec.json")
        logs = self._kubelet.folder / "pod-logs" / self._space / self.name
        logs.mkdir(parents=True, exist_ok=True)
        began = _now()
        with (logs / f"{one['name']}.log").open("ab") as output:
            process = spawn(command(folder / "spec.json", pause.pid), output)
        status = {"name": one["name"], "image": one.get("image", ""), "imageID": "", "restartCount": 0}
        running = {**status, "ready": True, "started": True, "state": {"running": {"startedAt": began}}}
        self._set_status({"phase": "Running", "containerStatuses": [running]}, ready=True)
        try:
            code = self._watch(process, one)
        finally:
            process.kill()
            process.wait()
        reason = "Completed" if code == 0 else "OOMKilled" if self._memory_kills() else "Error"
        ended = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": _now()}
        return {**status, "ready": False, "started": False, "state": {"terminated": ended}}

    def _watch(self, process: subprocess.Popen[bytes], one: dict[str, Any]) -> int:
        """Wait for the end of a container, and bring it about if the pod is deleted; returns its exit code."""
        end_at: float | None = None
        hook, killed = None, False
        while process.poll() is None:
            out_of_memory = self._memory_kills() > 0  # it ends the whole container, as with memory.oom.group
            if self._asked.is_set() and end_at is None:
                end_at = time.monotonic() + float(self._grace_s or 0)
                hook = self._pre_stop(process, one)
                if hook is None:
                    _signal(process, signal.SIGTERM)
            if hook is not None and hook.poll() is not None:
                hook = None
                _signal(process, signal.SIGTERM)
            if self._killed.is_set() or out_of_memory or (end_at is not None and time.monotonic() >= end_at):
                _signal(process, signal.SIGKILL)
                killed = True
            time.sleep(LOOK_S)
        code = 128 + signal.SIGKILL if killed else int(process.returncode)  # unshare does not pass SIGKILL on
        return 128 - code if code < 0 else code

    def _pre_stop(self, process: subprocess.Popen[bytes], one: dict[str, Any]) -> subprocess.Popen[bytes] | None:
        words = one.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        first = _first(process)
        if not words or first is None:
            return None
        log.info("%s: preStop %s", self.name, words)
        inside = ["nsenter", "-t", str(first), "-m", "-p", "-n", "-u", "-i", "-r", "-w"]
        return spawn([*inside, *words], env=self._env)

    def _report_end(self, statuses: list[dict[str, Any]]) -> None:
        failed = any(status["state"]["terminated"]["exitCode"] for status in statuses)
        self._set_status({"phase": "Failed" if failed else "Succeeded", "containerStatuses": statuses})
        log.info("%s: ended, %s", self.name, [status["state"]["terminated"]["exitCode"] for status in statuses])

    def _set_status(self, fields: dict[str, Any], *, ready: bool = False) -> None:
        state = "True" if ready else "False"
        kinds = {"PodScheduled": "True", "Initialized": "True", "ContainersReady": state, "Ready": state}
        conditions = [{"type": kind, "status": value, "lastTransitionTime": _now()} for kind, value in kinds.items()]
        where = {"podIP": self.address, "podIPs": [{"ip": self.address}], "hostIP": self._kubelet.address}
        started = {"startTime": self._document["metadata"]["creationTimestamp"]}
        status = {**fields, **where, **started, "conditions": conditions}
        self._kubelet.api.patch(f"{self._path}/status", {"status": status})

    # memory

    def _make_cgroup(self, one: dict[str, Any]) -> None:
        limit = one.get("resources", {}).get("limits", {}).get("memory")
        if limit is None or self._kubelet.cgroups is None:
            return
        found = SIZE.fullmatch(limit)
        assert found is not None, limit
        self._cgroup = self._kubelet.cgroups / self._uid
        self._cgroup.mkdir(exist_ok=True)
        (self._cgroup / "memory.limit_in_bytes").write_text(str(int(found[1]) * UNITS[found[2]]))

    def _memory_kills(self) -> int:
        """How many processes of the container the kernel has killed for their memory."""
        if self._cgroup is None:
            return 0
        found = re.search(r"^oom_kill (\d+)", (self._cgroup / "memory.oom_control").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    # env and volumes

    def _environment(self, one: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in one.get("envFrom", ()):
            kind = "configMap" if "configMapRef" in source else "secret"
            found |= {k: v.decode() for k, v in self._data(kind, source[f"{kind}Ref"]["name"]).items()}
        for entry in one.get("env", ()):
            source = entry.get("valueFrom")
            if source is None:
                found[entry["name"]] = _expand(entry.get("value", ""), found)
            elif "fieldRef" in source:
                found[entry["name"]] = self._field(source["fieldRef"]["fieldPath"])
            else:
                kind = "configMap" if "configMapKeyRef" in source else "secret"
                key = source[f"{kind}KeyRef"]
                found[entry["name"]] = self._data(kind, key["name"])[key["key"]].decode()
        return found

    def _field(self, path: str) -> str:
        if (key := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path)) is not None:
            return str(self._document["metadata"].get(key[1], {}).get(key[2], ""))
        if path in ("status.podIP", "status.hostIP"):
            return self.address if path == "status.podIP" else self._kubelet.address
        found: Any = self._document
        for name in path.split("."):
            found = found.get(name, "")
        return str(found)

    def _data(self, kind: str, name: str, *, optional: bool = False) -> dict[str, bytes]:
        """The entries of a config map or secret; waits until there is one, as a kubelet does."""
        while not self._asked.is_set() and not self._killed.is_set():
            found = self._kubelet.api.get(f"/api/v1/namespaces/{self._space}/{kind.lower()}s/{name}")
            if found is not None:
                data = found.get("data") or {}
                texts = {key: value.encode() for key, value in data.items()}
                return texts if kind == "configMap" else {key: base64.b64decode(value) for key, value in data.items()}
            if optional:
                return {}
            time.sleep(AGAIN_S)
        return {}

    def _volume(self, volume: dict[str, Any]) -> Path:
        """The file or folder of this machine that a volume is."""
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        folder = self._folder / "volumes" / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            folder.chmod(0o777)
            return folder
        known = {"configMap", "secret", "projected", "downwardAPI"} & volume.keys()
        assert known, f"a kind of volume that the stand-in does not know: {volume}"
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        for source in sources:
            for path, content in self._files(source):
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        return folder

    def _files(self, source: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
        if "serviceAccountToken" in source:
            yield source["serviceAccountToken"]["path"], self._token().encode()
        elif "downwardAPI" in source:
            for item in source["downwardAPI"]["items"]:
                yield item["path"], self._field(item["fieldRef"]["fieldPath"]).encode()
        else:
            kind = "configMap" if "configMap" in source else "secret"
            one = source[kind]
            name = one.get("name") or one["secretName"]
            data = self._data(kind, name, optional=bool(one.get("optional")))
            items = {item["key"]: item["path"] for item in one.get("items", ())} or {key: key for key in data}
            for key, path in items.items():
                if key in data:
                    yield path, data[key]

    def _token(self) -> str:
        account = self._spec.get("serviceAccountName", "default")
        path = f"/api/v1/namespaces/{self._space}/serviceaccounts/{account}/token"
        bound = {"kind": "Pod", "apiVersion": "v1", "name": self.name, "uid": self._uid}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        wanted = {"expirationSeconds": TOKEN_S, "boundObjectRef": bound}
        return str(self._kubelet.api.call("POST", path, {**request, "spec": wanted})["status"]["token"])


def spawn(
    argv: list[str], output: Any = subprocess.DEVNULL, env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that dies with the thread that starts it."""

    def die_with_parent() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        preexec_fn=die_with_parent, env=env,
    )  # fmt: skip


def _ip(*commands: str, inside: list[str] | None = None) -> None:
    text = "\n".join(commands) + "\n"
    words = [*(inside or []), "ip", "-batch", "-"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _first(process: subprocess.Popen[bytes]) -> int | None:
    """The first process of the container that `unshare` has started."""
    with contextlib.suppress(OSError, IndexError):  # it has ended
        return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    return None


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    first = _first(process)
    if first is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, number)
    elif number == signal.SIGKILL:
        process.kill()


def _expand(word: str, env: dict[str, str]) -> str:
    """Put variables into a word, as $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
