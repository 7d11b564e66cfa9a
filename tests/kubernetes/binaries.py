"""Kubernetes' own programs: built once from the Go module proxy into a user cache, with Debian's etcd beside them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from lockstep.storage.errors import ConfigError

MODULE, VERSION = "k8s.io/kubernetes", "1.37.2"
BUILT = ("kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubectl")
STAGED = re.compile(r"^\s*(k8s\.io/\S+) => \./staging/", re.MULTILINE)
STAMPED = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
VERSION_FLAGS = "-s -w " + " ".join(f"-X {package}.gitVersion=v{VERSION}" for package in STAMPED)
LIMIT_S = 7200.0  # 20 minutes of two idle cores


def cache_folder() -> Path:
    """Where the programs lie, and where `build` puts them."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "lockstep" / f"kubernetes-{VERSION}"


def binary(name: str) -> str:
    """The path of a program. Raises ConfigError if it was not built."""
    path = cache_folder() / name
    if not path.is_file():
        raise ConfigError(
            f"{name} is not there",
            got=f"no file {path}",
            allowed=f"etcd and {', '.join(BUILT)} of Kubernetes {VERSION}",
            next_step="Run `scripts/setup.sh kubernetes`: it builds them once, in 20 to 40 minutes of two cores.",
        )
    return str(path)


def build() -> None:
    """Build what is missing; says nothing where all is there. Raises ConfigError where it cannot."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "etcd").is_file():
        _fetch_etcd(folder)
    missing = [name for name in BUILT if not (folder / name).is_file()]
    if not missing:
        return
    go = shutil.which("go")
    if go is None:
        raise ConfigError(
            "Kubernetes' programs cannot be built",
            got="no `go` on the PATH",
            allowed="Go 1.26 or later (go.dev/dl)",
            next_step="Install it, put its `bin` on the PATH, and run `scripts/setup.sh kubernetes` again.",
        )
    source = folder / "source"
    source.mkdir(exist_ok=True)
    _write_module(go, source)
    for name in missing:
        print(f"Building {name} {VERSION} ...", flush=True)
        made = folder / f"_{name}"
        _go(go, source, "build", "-ldflags", VERSION_FLAGS, "-o", str(made), f"{MODULE}/cmd/{name}")
        made.replace(folder / name)


def _write_module(go: str, source: Path) -> None:
    """A module that imports the programs. Kubernetes' go.mod takes its parts from folders; each is a module too."""
    found = json.loads(_go(go, source.parent, "mod", "download", "-json", f"{MODULE}@v{VERSION}"))
    parts = STAGED.findall(Path(found["GoMod"]).read_text(encoding="utf-8"))
    of_parts = f"v0.{VERSION.partition('.')[2]}"
    lines = ["module programs", "", "go 1.26.0", "", f"require {MODULE} v{VERSION}", ""]
    lines += [f"replace {part} => {part} {of_parts}" for part in parts]
    (source / "go.mod").write_text("\n".join(lines) + "\n", encoding="utf-8")
    imports = "\n".join(f'import _ "{MODULE}/cmd/{name}"' for name in BUILT)
    (source / "programs.go").write_text(f"//go:build programs\n\npackage programs\n\n{imports}\n", encoding="utf-8")
    _go(go, source, "mod", "tidy")


def _go(go: str, folder: Path, *words: str) -> str:
    environment = {**os.environ, "GOFLAGS": "-mod=mod"}
    done = subprocess.run(
        [go, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise ConfigError(
            f"`go {' '.join(words[:2])}` failed",
            got=done.stderr[-2000:],
            allowed="modules from the Go module proxy",
            next_step="Look at what Go says; GOPROXY names the proxy.",
        )
    return done.stdout


def _fetch_etcd(folder: Path) -> None:
    """Take etcd from Debian's package without installing it: no service starts."""
    if (installed := shutil.which("etcd")) is not None:
        shutil.copy(installed, folder / "etcd")
        return
    work = folder / "_etcd"
    work.mkdir(exist_ok=True)
    fetch = "apt-get -qq download etcd-server && dpkg -x etcd-server_*.deb . && mv usr/bin/etcd ../etcd"
    done = subprocess.run(["bash", "-c", fetch], cwd=work, capture_output=True, text=True, timeout=600, check=False)
    shutil.rmtree(work)
    if done.returncode != 0:
        raise ConfigError(
            "etcd is not there",
            got=done.stderr[-1000:],
            allowed="`etcd` on the PATH, or Debian's package etcd-server",
            next_step="Install etcd, and run `scripts/setup.sh kubernetes` again.",
        )


if __name__ == "__main__":
    from lockstep.jobs._cli import run_job

    def main(argv: object) -> int:
        """Run `build`."""
        build()
        return 0

    run_job(main)
