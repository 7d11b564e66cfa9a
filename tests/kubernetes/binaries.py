"""Kubernetes' own programs and etcd, built once from the Go module proxy into a user cache."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from lockstep.storage.errors import ConfigError

MODULE, VERSION = "k8s.io/kubernetes", "1.37.2"
# Spark's client watches by lists that stream, which etcd 3.4, Debian's, cannot serve.
ETCD, ETCD_VERSION = "go.etcd.io/etcd/server/v3", "3.7.0"
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
            allowed=f"etcd {ETCD_VERSION}, and {', '.join(BUILT)} of Kubernetes {VERSION}",
            next_step="Run `scripts/setup.sh kubernetes`: it builds them once, in 20 to 40 minutes of two cores.",
        )
    return str(path)


def build() -> None:
    """Build what is missing; says nothing where all is there. Raises ConfigError where Go is missing or fails."""
    folder = cache_folder()
    missing = [name for name in ("etcd", *BUILT) if not (folder / name).is_file()]
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
    if "etcd" in missing:
        _build(go, folder / "etcd-source", {"etcd": ETCD}, [f"require {ETCD} v{ETCD_VERSION}"])
        missing.remove("etcd")
    if missing:
        packages = {name: f"{MODULE}/cmd/{name}" for name in missing}
        _build(go, folder / "source", packages, [f"require {MODULE} v{VERSION}", *_parts(go, folder)])


def _parts(go: str, folder: Path) -> list[str]:
    """Kubernetes' go.mod takes its parts from folders; each is a module too, of a version that follows."""
    found = json.loads(_go(go, folder, "mod", "download", "-json", f"{MODULE}@v{VERSION}"))
    parts = STAGED.findall(Path(found["GoMod"]).read_text(encoding="utf-8"))
    return [f"replace {part} => {part} v0.{VERSION.partition('.')[2]}" for part in parts]


def _build(go: str, source: Path, packages: dict[str, str], needs: list[str]) -> None:
    """Build programs, {name: package}, into the folder above that of a module which imports them."""
    source.mkdir(parents=True, exist_ok=True)
    (source / "go.mod").write_text("\n".join(["module programs", "", "go 1.26.0", "", *needs, ""]), encoding="utf-8")
    imports = "\n".join(f'import _ "{package}"' for package in packages.values())
    (source / "programs.go").write_text(f"//go:build programs\n\npackage programs\n\n{imports}\n", encoding="utf-8")
    _go(go, source, "mod", "tidy")
    for name, package in packages.items():
        print(f"Building {name} ...", flush=True)
        made = source.parent / f"_{name}"
        _go(go, source, "build", "-ldflags", VERSION_FLAGS, "-o", str(made), package)
        made.replace(source.parent / name)


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


if __name__ == "__main__":
    from lockstep.jobs._cli import run_job

    def main(argv: object) -> int:
        """Run `build`."""
        build()
        return 0

    run_job(main)
