"""Programs of Debian's packages in a user cache: unpacked, not installed, so that no service starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.storage.errors import ConfigError


@dataclass(frozen=True)
class Unpacked:
    """Packages below one root: `name` is that of the folder in the cache, `wanted` a pattern of packages to unpack."""

    name: str
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    wanted: str

    @property
    def cache(self) -> Path:
        """Where the packages are unpacked."""
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep" / self.name

    def root(self) -> Path | None:
        """The root below which `usr/bin` holds the programs: of this machine, or of the cache; None without any."""
        for root in (Path("/"), self.cache):
            if all((root / "usr" / "bin" / name).exists() for name in self.programs):
                return root
        return None

    def fetch(self) -> None:
        """Unpack the packages and the libraries that this machine lacks. Raises ConfigError where apt cannot."""
        if self.root() is not None:
            return
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            raise self._cannot("no apt-get")
        if not (packages := self._missing()) and os.geteuid() == 0:
            self._run(["apt-get", "-qq", "update"])
            packages = self._missing()
        if not packages:
            raise self._cannot(f"no package {self.packages[0]}")
        self.cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache.parent, prefix="_fetch-") as temporary:
            self._run(["apt-get", "-qq", "download", "-o", "APT::Sandbox::User=root", *packages], Path(temporary))
            staging = Path(temporary) / "root"
            for archive in sorted(Path(temporary).glob("*.deb")):
                self._run(["dpkg", "-x", str(archive), str(staging)])
            staging.rename(self.cache)

    def environment(self) -> dict[str, str]:
        """This process's environment, in which the programs find their libraries."""
        root = self.root()
        assert root is not None, f"fetch {self.name} first"
        if root == Path("/"):
            return dict(os.environ)
        below = root / "usr" / "lib" / "x86_64-linux-gnu"
        libraries = [below, *(folder for folder in below.iterdir() if folder.is_dir() and any(folder.glob("*.so*")))]
        libraries.append(root / "lib" / "x86_64-linux-gnu")
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))}

    def _missing(self) -> list[str]:
        """The packages that apt would install for these: they themselves, and libraries."""
        command = ["apt-get", "-s", "install", "--no-install-recommends", *self.packages]
        plan = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
        return re.findall(rf"^Inst ((?:{self.wanted})\S*)", plan, re.MULTILINE)

    def _run(self, command: Sequence[str], folder: Path | None = None) -> None:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise self._cannot(f"{' '.join(command)[:80]}: {done.stderr.strip()[-300:]}")

    def _cannot(self, got: str) -> ConfigError:
        return ConfigError(
            f"{self.name}: the programs cannot be fetched",
            got=got,
            allowed="a Debian whose packages apt can download",
            next_step=f"Leave the tests out that need them, or install {', '.join(self.packages)}.",
        )
