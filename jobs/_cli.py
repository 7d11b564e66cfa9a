"""The command line of all jobs: TOML files below flags, four-part errors, exit codes."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import re
import select
import sys
import tomllib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NoReturn, TextIO

from lockstep.jobs._yarn import report_failure
from lockstep.process.installed import JOBS, ROOT
from lockstep.process.own_code import CodeFolder
from lockstep.storage.errors import ConfigError, LockstepError, NotFoundError, nearest, require
from lockstep.storage.files.deadlines import end_process

INTERRUPTED = 130  # as a shell reports for a process that Ctrl-C ended
PIPE_CLOSED = 141  # and for one that wrote to a pipe without a reader
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class JobParser(argparse.ArgumentParser):
    """An argument parser whose values may also come from TOML files, table `table`; flags win over files.

    Entries of a file are parsed as if they came first on the command line, so both pass the same checks. Keys are the
    flags' long names with `_` or `-`; a list gives several values to a flag that takes several, as words or separated
    by commas (`names`, `joined`); `true` is a flag without a value. The file may have tables of other jobs too, and in
    its table one for each of `parts`, with some keys.
    """

    def __init__(self, job: str, description: str, table: str) -> None:
        super().__init__(prog=f"lockstep {job}", description=description, allow_abbrev=False)
        self.table = table
        self.parts: dict[str, set[str]] = {}
        """The flags of each part of the table that may be a table of its own."""
        self._given: list[str] = []
        self._imports_code = False
        text = f"TOML files, table [{table}]; later files and flags win"
        self.add_argument("--config", nargs="+", default=[], metavar="FILE.toml", help=text)
        self.add_argument("--debug", action="store_true", help="show the stack trace of an error")

    def add_code_flag(self) -> None:
        """Add --code, whose folder (by default the current one) `parse` makes importable: `args.code`."""
        text = "folder of your own modules, for this process and all ranks (default: the current folder)"
        self.add_argument("--code", metavar="DIR", help=text)
        self._imports_code = True

    def add_json_flag(self) -> None:
        """Add --json, for `print_result`."""
        text = "print the result as one line of JSON, and nothing else on standard output"
        self.add_argument("--json", action="store_true", help=text)

    def error(self, message: str) -> NoReturn:
        flags = [option for action in self._actions for option in action.option_strings]
        given = self._given[: self._given.index("--")] if "--" in self._given else self._given
        words = (word.partition("=")[0] for word in given)
        # First, since a misspelled flag that is required is also a missing one.
        unknown = [f"{word}{nearest(word, flags)}" for word in words if word[:2] == "--" and word not in flags]
        raise ConfigError(
            f"{self.prog}: invalid arguments",
            got=f"unknown flag {', '.join(unknown)}" if unknown else message,
            allowed="the flags that --help lists",
            next_step=f"Run `{self.prog} --help`.",
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse files, then flags. Raises ConfigError for unknown keys, invalid values and files that are not TOML."""
        # `*` and not `+`: the parser below, whose errors have four parts, refuses a bare --config.
        files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        files.add_argument("--config", nargs="*", default=[])
        known, _ = files.parse_known_args(list(argv))
        from_files = [flag for path in known.config for flag in self._flags_of(path)]
        self._given = list(argv)
        args = self.parse_args([*from_files, *argv])
        if self._imports_code:
            args.code = CodeFolder.of_call(args.code)
            if args.code is not None:
                args.code.use()
        return args

    def given(self, argv: Sequence[str]) -> set[str]:
        """The names of the values that flags or files give, and not defaults. Raises what `parse` raises."""
        defaults = [(action, action.default) for action in self._actions]
        try:
            for action, _ in defaults:
                action.default = argparse.SUPPRESS
            return set(vars(self.parse(argv)))
        finally:
            for action, default in defaults:
                action.default = default

    def _flags_of(self, path: str) -> list[str]:
        document = read_toml(path)
        # By pkgutil, since the folder may be in a zip.
        jobs = (module.name for module in pkgutil.iter_modules([str(JOBS)]))
        tables = {*(name for name in jobs if not name.startswith("_")), self.table}
        for name, found in document.items():
            if name not in tables or not isinstance(found, dict):
                raise ConfigError(
                    f"{path}: `{name}` is not the table of a job",
                    got=f"[{name}]{nearest(name, tables)}" if isinstance(found, dict) else f"{name} = {found!r}"[:200],
                    allowed=f"keys below [{self.table}], and tables of other jobs",
                    next_step="Correct the table's name, or put the key below the table that it belongs to.",
                )
        known = {option: action for action in self._actions for option in action.option_strings if option[:2] == "--"}
        for option in ("--config", "--help", "--debug"):
            del known[option]
        table = document.get(self.table, {})
        assert isinstance(table, dict), "checked above"
        parts = {name: table.pop(name) for name in self.parts if isinstance(table.get(name), dict)}
        flags = _flags_of_table(table, known, path, self.table)
        for name, part in parts.items():
            own = {flag: action for flag, action in known.items() if flag in self.parts[name]}
            flags += _flags_of_table(part, own, path, f"{self.table}.{name}")
        return flags


def _flags_of_table(table: dict[str, object], known: dict[str, argparse.Action], path: str, name: str) -> list[str]:
    """The words of a command line that a table `name` gives. Raises ConfigError for a key that is not `known`."""
    flags: list[str] = []
    for key, value in table.items():
        flag = "--" + key.replace("_", "-")
        if flag not in known:
            keys = [option[2:].replace("-", "_") for option in known]
            raise ConfigError(
                f"{path}: unknown key `{key}` in [{name}]",
                got=f"{key} = {value!r}"[:200] + nearest(key.replace("-", "_"), keys),
                allowed=", ".join(sorted(keys)),
                next_step="Correct the key or remove it.",
            )
        flags += _words(flag, known[flag], value, f"{path}: `{key}` in [{name}]")
    return flags


def _words(flag: str, action: argparse.Action, value: object, where: str) -> list[str]:
    """A key's value as words of a command line."""
    values = value if isinstance(value, list) else [value]
    several, listed = action.nargs in ("+", "*"), action.type in (names, joined)
    allowed = "a list of values, or one" if several or listed else "true or false" if action.nargs == 0 else "one value"
    good = not any(isinstance(one, list | dict) or (isinstance(one, bool) and action.nargs != 0) for one in values)
    if listed and isinstance(value, list) and any("," in str(one) for one in value):
        good, allowed = False, "values without `,`, which separates them on the command line"
    right = good and bool(values) and (len(values) == 1 or several or listed)
    require(right, where, f"{value!r}"[:200], allowed, "Correct the value.")
    if value is True or value is False:
        return [flag] if value else []
    if several and isinstance(value, list):
        return [flag, *map(str, values)]
    return [f"{flag}={','.join(map(str, values))}"]


def names(text: str) -> tuple[str, ...]:
    """The type of a flag that takes names separated by commas; in a file, also a list."""
    return tuple(text.split(",")) if text else ()


def joined(text: str) -> str:
    """The type of a flag whose text may have several parts separated by commas; in a file, also a list."""
    return text


def size(text: str) -> int:
    """The type of a flag that takes bytes as `4096`, `4K`, `1M` or `1G` (powers of two)."""
    match = re.fullmatch(r"([0-9]{1,10})([KMG]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4096, 4K, 1M or 1G")
    return int(match[1]) * UNITS[match[2]]


def which(text: str) -> int | Literal["last", "best"]:
    """The type of a flag that names a checkpoint: last, best or a step."""
    if text == "last":
        return "last"
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither last, best nor a step such as 400")
    return int(text)


def refuse_idle(flag: str, idle: bool, without: str) -> None:
    """Raise ConfigError if `flag` was given but does nothing without another one, named by `without`."""
    if idle:
        raise ConfigError(
            f"{flag} does nothing here",
            got=f"{flag} without {without}",
            allowed=f"{flag} with {without}",
            next_step=f"Leave {flag} out, or give {without}.",
        )


def check_master(args: argparse.Namespace) -> None:
    """Raise ConfigError for a Spark master if the ranks are processes of this host."""
    refuse_idle("--master", args.master is not None and args.launcher == "local", "--launcher barrier")


def print_result(text: str, document: object, as_json: bool) -> None:
    """Print a result: a text for people or, with --json, the document for programs."""
    print(json.dumps(document, sort_keys=True) if as_json else text)


def read_toml(path: str, flag: str = "--config") -> dict[str, object]:
    """Read the TOML file that `flag` names. Raises NotFoundError or ConfigError naming the file and the line."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFoundError(
            f"configuration file {path} cannot be opened",
            got=error.strerror or type(error).__name__,
            allowed="a TOML file",
            next_step=f"Check {flag}.",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration file {path} is not TOML",
            got=str(error),
            allowed="TOML 1.0, UTF-8",
            next_step="Correct the file.",
        ) from None


def run_job(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Run `main` and end the process with its exit code; a LockstepError is printed in four parts, without a trace.

    If the reader of our output has ended (`| head`), a job that still prints ends silently with PIPE_CLOSED; a job that
    has finished its work ends with its own code.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    _leave_first_folder()
    try:
        code = _code_of(main, args)
    except BrokenPipeError:
        code = PIPE_CLOSED
    finally:  # also where --help ends the process
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:  # else Python reports it again at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    end_process(code)


def _leave_first_folder() -> None:
    """Take the folder of the job's file, or that of a `python -m` call, off the front of the import path, where its
    modules would hide those of Python and of packages; `--code` puts it at the end.
    """
    if sys.flags.safe_path or not sys.path:
        return
    first = Path(sys.path[0]).resolve()
    if first in (Path.cwd(), JOBS.resolve()) and first != ROOT:
        del sys.path[0]


def _code_of(main: Callable[[Sequence[str]], int], args: list[str]) -> int:
    """The exit code of `main`, whose errors are printed. Raises BrokenPipeError if no process reads our output."""
    try:
        return main(args)
    except LockstepError as error:
        if "--debug" in args:
            traceback.print_exc()
        return _failed(f"error: {error}", error.exit_code)
    except KeyboardInterrupt as stop:
        if (code := getattr(stop, "exit_code", None)) is not None:  # in good order (lockstep.training.driver.stop)
            return int(code)
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # an unexpected failure also ends with a sentence and exit code 1
        if isinstance(error, BrokenPipeError) and any(map(_has_no_reader, (sys.stdout, sys.stderr))):
            raise  # of our output, not of a socket
        if "--debug" in args:
            traceback.print_exc()
        first = (str(error).strip() or repr(error)).splitlines()[0]
        next_step = "Run again with --debug for the stack trace; if this is a bug, report it with that trace."
        return _failed(f"error: unexpected {type(error).__name__}: {first}\n  next: {next_step}", 1)


def _failed(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    report_failure(text, code)
    return code


def _has_no_reader(stream: TextIO) -> bool:
    """Whether a stream is a pipe whose other end is closed."""
    poll = select.poll()
    try:
        poll.register(stream, 0)  # poll reports a closed pipe without being asked
    except (OSError, ValueError):  # not a file, as in a test or a notebook
        return False
    return bool(poll.poll(0))
