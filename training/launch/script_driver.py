"""Launch a user's script on N ranks, for the job `launch`."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.process.signals import ended_in_order
from lockstep.storage.errors import CommunicationError, ConfigError, NotFoundError, require
from lockstep.storage.urls import join, several
from lockstep.training.comm.options import Algorithm, Backend, CommOptions
from lockstep.training.control.failures import MemoryKillError, RankFailedError, Weight
from lockstep.training.control.server import Handler
from lockstep.training.control.task import CommOrder, Limits, RankTask
from lockstep.training.launch.output import OutputPrinter, Which
from lockstep.training.launch.script_rank import ScriptOrder
from lockstep.training.launch.session import Launch, Launches

log = logging.getLogger(__name__)

MAX_SCRIPT_BYTES = 1 << 20  # a script is text; data goes by --files
FILES = "LOCKSTEP_FILES"
# A script may import libraries that block Python's interpreter, and so the heartbeats, for tens of seconds. The
# supervisor notices a process that is stopped by a signal within `Limits.stopped_s`.
SILENT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptConfig:
    """One launch of a script."""

    script: str
    """Path of the script, on this host."""
    arguments: tuple[str, ...] = ()
    """The script's arguments, unchanged."""
    num_ranks: int
    launcher: Literal["barrier", "local"] = "barrier"
    """A Spark barrier stage, or processes of this host."""
    files: tuple[str, ...] = ()
    """Files of this host that ranks find in the folder $LOCKSTEP_FILES, which is on their import path."""
    output: Which = "all"
    """Whose lines are printed while the script runs."""
    logs: str | None = None
    """URL of a folder for the complete output of each rank; None keeps only the last lines."""
    start_limit_s: float = 300.0
    stall_limit_s: float = 600.0
    """Seconds that a call may wait for other ranks; and that a rank which has made such calls may take until its next
    call or line."""
    tls: Literal["on", "off"] = "off"
    """Whether ranks on different hosts encrypt their connections."""
    backend: Backend = "auto"
    """What carries them; `nccl` and `tensorflow` must be joined before the script's first tensor (docs/gpu.md)."""
    algorithm: Algorithm = "auto"
    """The algorithm of all_reduce."""
    trust_network: str | None = None
    """An interface that may carry what cannot be authenticated."""
    max_restarts: int = 0
    """How often all ranks are started again after one has failed."""

    def __post_init__(self) -> None:
        for name in ("arguments", "files"):
            object.__setattr__(self, name, several(getattr(self, name)))
        for flag, count, least in (("--num-ranks", self.num_ranks, 1), ("--max-restarts", self.max_restarts, 0)):
            require(count >= least, flag, str(count), f"{least} or more", f"Correct {flag}.")
        for flag, value in (("--start-limit", self.start_limit_s), ("--stall-limit", self.stall_limit_s)):
            require(0 < value < float("inf"), flag, f"{value:g}", "seconds, above 0", f"Correct {flag}.")
        for path in (self.script, *self.files):
            if not Path(path).is_file():
                raise NotFoundError(
                    f"there is no file {path}",
                    got="a folder" if Path(path).is_dir() else "nothing at this path",
                    allowed="the script after the flags, and files of this host after --files",
                    next_step="Correct the path; flags of lockstep launch precede the script, its arguments follow it.",
                )
        names = [Path(path).name for path in self.files]
        allowed = "files of different names: they come into one folder"
        require(len(set(names)) == len(names), "--files", ", ".join(names), allowed, "Correct --files.")
        compile_script(self.script)
        self.comm  # noqa: B018 - its own checks

    @property
    def comm(self) -> CommOptions:
        """The communicator's options, for when the script first uses it."""
        return CommOptions(backend=self.backend, algorithm=self.algorithm, trust_network=self.trust_network)

    @property
    def limits(self) -> Limits:
        """Deadlines of the ranks."""
        return Limits(start_s=self.start_limit_s, stall_s=self.stall_limit_s, silent_s=SILENT_S)


def compile_script(path: str) -> bytes:
    """Read a script and check that it is Python. Raises ConfigError naming the line."""
    text = Path(path).read_bytes()
    allowed = f"a script of up to {MAX_SCRIPT_BYTES} bytes; data go by --files"
    require(len(text) <= MAX_SCRIPT_BYTES, path, f"{len(text)} bytes", allowed, f"Correct {path}.")
    try:
        compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a Python script",
            got=str(error),
            allowed="a script that this Python compiles",
            next_step="Correct the script.",
        ) from None
    return text


class ScriptHandler(Handler):
    """The driver's side of a launched script: it prints the ranks' output, and answers nothing."""

    def __init__(self, printer: OutputPrinter) -> None:
        super().__init__()
        self._printer = printer

    def on_output(self, rank: int, lines: list[str]) -> None:
        """Print the lines."""
        self._printer.take(rank, lines)

    def answer(self, rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Refuse: a script asks the driver nothing."""
        raise CommunicationError(
            f"rank {rank} asked for `{kind}`",
            got=kind,
            allowed="rendezvous",
            next_step="Start a training of Lockstep by lockstep train.",
        )


def launch_script(config: ScriptConfig, launch: Launch, hadoop: dict[str, str] | None = None) -> None:
    """Run the script on all ranks by `launch` (run_local or OnSpark) and print their output.

    Raises what `ControlServer.wait` raises: after the allowed restarts; before them for an error of configuration or
    data, and for the same error twice in a row, since what progress a script has made is unknown here. The caller has
    made the files available.
    """
    here = config.launcher == "local"
    text = None if here else compile_script(config.script).decode("latin-1")
    path = str(Path(config.script).resolve()) if here else None
    order = ScriptOrder(
        name=config.script, arguments=config.arguments, path=path, text=text,
        start_s=config.start_limit_s, comm=CommOrder(options=config.comm),
    ).to_json()  # fmt: skip
    last = ""  # the error of the last generation, if it was the script's own
    with ended_in_order(), Launches(launch, config.num_ranks, config.limits) as launches:
        for generation in range(1, config.max_restarts + 2):
            logs = join(config.logs, f"g{generation:04d}") if config.logs else None
            task = RankTask(
                "lockstep.training.launch.script_rank:main", order, hadoop or {}, logs, True, config.tls == "on"
            )
            try:
                with OutputPrinter(config.output) as printer:
                    launches.run(task, generation, ScriptHandler(printer))
                return
            except (RankFailedError, MemoryKillError) as error:
                own = isinstance(error, RankFailedError) and error.of_its_own
                incurable = isinstance(error, RankFailedError) and error.weight is Weight.FINAL
                if own and error.got == last:
                    error.what += ", with the same error twice in a row, which no restart cures"
                if generation > config.max_restarts or incurable or (own and error.got == last):
                    raise
                last = error.got if own else ""
                log.warning("start %d of %d follows: %s", generation + 1, config.max_restarts + 1, error)


@contextmanager
def local_files(paths: tuple[str, ...]) -> Iterator[None]:
    """A folder of links to the files for ranks of this host, named by $LOCKSTEP_FILES."""
    if not paths:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-files-") as folder:
        for path in paths:
            Path(folder, Path(path).name).symlink_to(Path(path).resolve())
        os.environ[FILES] = folder
        try:
            yield
        finally:
            del os.environ[FILES]
