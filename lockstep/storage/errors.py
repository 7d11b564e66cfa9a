"""Errors in four parts: what happened, what was found, what is allowed, what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


class LockstepError(Exception):
    """Base of every error that a user may see; `exit_code` is the exit code of a job.

    Its parts are `what`, `got`, `allowed` and `next_step`; its text has all four.

    >>> import lockstep
    >>> try:
    ...     lockstep.read_manifest("nowhere")
    ... except lockstep.LockstepError as error:
    ...     print(error.what, error.exit_code)
    no dataset at nowhere 2
    """

    exit_code = 1

    def __init__(self, what: str, *, got: str = "", allowed: str = "", next_step: str = "") -> None:
        super().__init__(what, got, allowed, next_step)
        self.what, self.got, self.allowed, self.next_step = what, got, allowed, next_step

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross processes, and pickle rebuilds an exception from its args, which cannot hold keyword-only parts.
        return _rebuild, (type(self), self.what, self.got, self.allowed, self.next_step, self.__dict__)

    def __str__(self) -> str:
        parts = [("got", self.got), ("allowed", self.allowed), ("next", self.next_step)]
        return "\n".join([self.what, *(f"  {name}: {text}" for name, text in parts if text)])


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: " (perhaps `x`)" with the most similar known one, or nothing if none is similar."""
    found = get_close_matches(name, list(known), 1)
    return f" (perhaps `{found[0]}`)" if found else ""


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any], within: str = "") -> list[str]:
    """The differences of one JSON object from another, by key: "seed = 1 (not 2)", "no mix", "a = 3 (not there)"."""
    found_differences = []
    for key in [*wanted, *(key for key in found if key not in wanted)]:
        mine, other = found.get(key), wanted.get(key)
        if key not in found:
            found_differences.append(f"no {within}{key}")
        elif key not in wanted:
            found_differences.append(f"{within}{key} = {mine!r} (not there)")
        elif isinstance(mine, Mapping) and isinstance(other, Mapping):
            found_differences += differences(mine, other, f"{within}{key}.")
        elif mine != other:
            found_differences.append(f"{within}{key} = {mine!r} (not {other!r})")
    return found_differences


def _rebuild(
    cls: type[LockstepError], what: str, got: str, allowed: str, next_step: str, state: dict[str, object]
) -> LockstepError:
    error = cls.__new__(cls)
    LockstepError.__init__(error, what, got=got, allowed=allowed, next_step=next_step)
    error.__dict__.update(state)
    return error


class ConfigError(LockstepError):
    """An invalid argument: a flag, a path, a combination."""

    exit_code = 2


class NotFoundError(ConfigError):
    """A path that must exist does not."""


class ExistsError(ConfigError):
    """A target that must be new exists already."""


class DataError(LockstepError):
    """The content of an input, dataset or run is not acceptable."""

    exit_code = 2


class CorruptionError(DataError):
    """Bytes do not match their digest, checksum or length."""

    def __init__(
        self,
        what: str,
        *,
        file: str,
        record: int | None = None,
        offset: int | None = None,
        got: str = "",
        allowed: str = "",
        next_step: str = "",
    ) -> None:
        place = file + (f", record {record}" if record is not None else "")
        place += f", offset {offset}" if offset is not None else ""
        super().__init__(
            f"{what}: {place}",
            got=got,
            allowed=allowed,
            next_step=next_step
            or "Run `lockstep verify URL` for the extent, then restore the file or build the dataset again.",
        )
        self.file, self.record, self.offset = file, record, offset


class StorageError(LockstepError):
    """A file system refused or failed an operation."""


class DiskFullError(StorageError):
    """A disk or folder has no room left, or a quota is used up."""


class DeniedError(StorageError):
    """A file system does not let this user do it: permissions, or something that is read-only."""


class LostWriteError(StorageError):
    """What was just written is not there, or reads back as other bytes: it is to be written again."""


class StorageTimeoutError(StorageError):
    """A file system did not answer within the deadline of the call."""


class StorageAwayError(StorageError):
    """A file system has served none of a call's attempts in the whole time that there is for them."""

    whom = "the storage"
    """Which storage it is, with its address."""
    away_s = 0.0
    """Seconds in which it has answered no call of this process, this one included; 0 if it has answered others
    meanwhile.
    """


class RetryableStorageError(StorageError):
    """A file system failed in a way that may be temporary: dead DataNode, safe mode, failover, lost connection."""


class CommunicationError(LockstepError):
    """A rank, supervisor or driver could not be reached, failed authentication, or sent an invalid message."""

    left: int | None = None
    """The rank that has left the other ranks in order, if a call waited for it."""
    of_another: bool = False
    """Whether the end or the error of another rank is the cause, so that where this rank was says nothing."""


class TrainingFailedError(LockstepError):
    """A run ended without its result; `what` names rank, host, step and phase."""


def require(right: bool, what: str, got: str, allowed: str, next_step: str = "") -> None:
    """Raise ConfigError unless the value of `what`, such as a flag, is `right`."""
    if not right:
        next_step = next_step or "Correct it; --help lists the flags."
        raise ConfigError(f"{what} is invalid", got=got or "nothing", allowed=allowed, next_step=next_step)
