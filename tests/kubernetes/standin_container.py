"""The stand-in for a container runtime: it becomes a container's first process, in namespaces that `command` makes.

    subprocess.Popen(command(SPEC, pause))     # SPEC: a file with a Container in JSON

There is no image: the root is this machine's, under an overlay that keeps what the container writes. Of the image's
recipe (conf/kubernetes/Dockerfile) only /opt is made, from this checkout, its .venv and its Java, and ENV and
ENTRYPOINT are read. The checkout itself is hidden, so that a job which needs a file the image lacks fails here too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "conf" / "kubernetes"
SCRIPTS = ("entrypoint.sh", "decom.sh")
SHM_BYTES = 64 << 20  # of a container, unless a volume is mounted there


@dataclass(frozen=True, kw_only=True)
class Container:
    """What the first process of a container needs."""

    folder: str
    """Where its root, its own files and its /tmp lie."""
    argv: list[str]
    env: dict[str, str]
    hostname: str
    workdir: str | None
    """Its working folder; None for the image's."""
    mounts: list[tuple[str, str]]
    """Files and folders of this machine, and where the container sees them."""
    cgroup: str | None
    """Its control group of memory; None for no limit."""
    java: str
    """Java's home on this machine."""


def image() -> tuple[dict[str, str], list[str]]:
    """ENV and ENTRYPOINT of the image's recipe."""
    text = (RECIPE / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    env: dict[str, str] = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    for line in re.findall(r"^ENV (.*)$", text, re.MULTILINE):
        for name, value in re.findall(r"(\w+)=(\S+)", line):
            env[name] = value.replace("$PATH", env["PATH"])
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    return env, json.loads(entry)


def write_spec(container: Container, path: Path) -> None:
    """Write what `command` starts."""
    path.touch(mode=0o600)  # it has secrets
    path.write_text(json.dumps(asdict(container)), encoding="utf-8")


def command(spec: Path, pause: int) -> list[str]:
    """Arguments that start a container in the network of the process `pause`. It dies with its parent."""
    inside = [sys.executable, "-m", "tests.kubernetes.standin_container", str(spec)]
    spaces = ["unshare", "--pid", "--fork", "--mount", "--uts", "--ipc", "--kill-child=SIGKILL"]
    return ["nsenter", f"--net=/proc/{pause}/ns/net", *spaces, *inside]


def main(spec: str) -> None:
    """Make the root, and become the container's command."""
    one = Container(**json.loads(Path(spec).read_text(encoding="utf-8")))
    if one.cgroup is not None:
        Path(one.cgroup, "cgroup.procs").write_text("0")
    root = _root(Path(one.folder), one.java)
    for source, target in one.mounts:
        _bind(source, _inside(root, target))
    subprocess.run(["hostname", one.hostname], check=True)
    os.chroot(root)
    os.chdir(one.workdir or "/opt/spark/work-dir")
    os.execvpe(one.argv[0], one.argv, one.env)


def _root(folder: Path, java: str) -> Path:
    for name in ("root", "upper", "work", "tmp", "hidden"):
        (folder / name).mkdir()
    root, tmp = folder / "root", folder / "tmp"
    venv, checkout = Path(sys.prefix).resolve(), ROOT.resolve()
    layers = f"lowerdir=/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
    _mount("-t", "overlay", "overlay", "-o", layers, str(root))
    _mount("-t", "proc", "proc", str(root / "proc"))
    _mount("--rbind", "/sys", str(root / "sys"))
    _mount("--rbind", "/dev", str(root / "dev"))
    _mount("-t", "tmpfs", "-o", f"size={SHM_BYTES}", "shm", str(root / "dev" / "shm"))
    _mount("-t", "tmpfs", "image", str(root / "opt"))
    _bind(str(venv), root / "opt" / "python")
    _bind(str(checkout), root / "opt" / "lockstep")
    _bind(java, root / "opt" / "java")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    spark = root / "opt" / "spark"
    for name in ("conf", "work-dir"):
        (spark / name).mkdir(parents=True)
    for name in ("bin", "jars"):
        (spark / name).symlink_to(f"/opt/python/lib/{version}/site-packages/pyspark/{name}")
    for name in SCRIPTS:
        shutil.copy(RECIPE / name, root / "opt" / name)
        (root / "opt" / name).chmod(0o755)
    for path in (venv, checkout):  # the inner one first, where one is in the other
        _mount("--bind", str(folder / "hidden"), f"{root}{path}")
    tmp.chmod(0o1777)
    _mount("--bind", str(tmp), str(root / "tmp"))
    return root


def _inside(root: Path, target: str) -> Path:
    """Where a path of the container lies: its links, such as /var/run, are followed within the root."""
    path = root
    for part in target.strip("/").split("/"):
        path /= part
        if path.is_symlink():
            link = os.readlink(path)
            path = root / link.lstrip("/") if link.startswith("/") else path.parent / link
    return path


def _bind(source: str, target: Path) -> None:
    if os.path.isdir(source):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount("--rbind", source, str(target))


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
