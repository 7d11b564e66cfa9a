"""What an HDFS says that means the same by both ways to it, as errors of ours."""

from __future__ import annotations

from lockstep.storage.errors import ExistsError, LockstepError, NotFoundError, RetryableStorageError, StorageError

RETRYABLE_JAVA = ("RetriableException", "SafeModeException", "StandbyException", "NotReplicatedYetException")


def not_there(what: str, verb: str, text: str) -> LockstepError:
    """A path that is missing: of a file being written it may come back under another name."""
    if verb in ("write", "sync", "close"):
        return taken_away(what, text)
    return NotFoundError(
        f"{what}: not there", got=text, allowed="an existing path", next_step="Check the path and its host."
    )


def taken_away(what: str, text: str) -> RetryableStorageError:
    """A file being written that is no longer there, or is another's."""
    return RetryableStorageError(
        f"{what}: the file was taken away from its writer",
        got=text,
        allowed="a file that nobody else deletes, renames or writes",
        next_step="Look for another run or a cleaning job at work there, then run again.",
    )


def below_a_file(what: str, verb: str, text: str) -> LockstepError:
    """A path whose parent is no directory."""
    if verb in ("create", "make"):
        return StorageError(what, got=text, allowed="directories above it", next_step="Check the path.")
    return NotFoundError(f"{what}: not there", got=text, allowed="an existing path", next_step="Check the path.")


def taken(what: str, text: str) -> ExistsError:
    """A name that must be free and is not."""
    return ExistsError(
        f"{what}: the name is taken",
        got=text,
        allowed="a name that is free",
        next_step="Choose another name, or delete what is there.",
    )


def not_in_service(what: str, text: str, whom: str) -> RetryableStorageError:
    """A state that passes."""
    return RetryableStorageError(what, got=text, allowed="an HDFS in service", next_step=check(whom))


def check(whom: str) -> str:
    """The next step where `whom` does not serve."""
    return f"Check that {whom} runs, has left safe mode and has live DataNodes (`hdfs dfsadmin -report`)."
