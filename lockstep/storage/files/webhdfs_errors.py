"""What WebHDFS answers and what goes wrong on the way, made into our errors; a token is in none of them."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from hdfs.util import HdfsError

from lockstep.storage.errors import ConfigError, LockstepError, RetryableStorageError, StorageError
from lockstep.storage.files.remote_errors import RETRYABLE_JAVA, below_a_file, check, not_in_service, not_there, taken
from lockstep.storage.files.webhdfs_client import RefusedError


class LostAnswerError(RetryableStorageError):
    """A request was sent, or may have been, and no whole answer came: it may have happened."""


# What reading an answer raises that is not WebHDFS's JSON; requests' error for what is no JSON is a ValueError too.
OTHER_FORM = (ValueError, KeyError, TypeError, AttributeError, OverflowError)

_SECRET = re.compile(r"(delegation|user\.name|doas)=[^&\s'\"]+")
_RETRYABLE_TEXT = (
    "could only be written to", "SafeModeException", "StandbyException", "nodes contain this block",
    "Failed to find datanode", "All datanodes", "Could not obtain block", "Blocklist for", "Filesystem closed",
)  # fmt: skip


def translate(error: BaseException, *, verb: str, place: str, whom: str) -> LockstepError:
    """Our error for one of the `hdfs` package or below it, raised while `verb`-ing `place` on `whom`."""
    what = f"cannot {verb} {place}"
    java, text, status = _parts(error)
    if java or isinstance(error, (HdfsError, RefusedError)):
        return _answered(what, verb, java, text, status, whom, getattr(error, "data_host", ""))
    if "NameResolutionError" in text or "Name or service not known" in text:
        return StorageError(
            f"{what}: {whom} has no address",
            got=text,
            allowed="host names that resolve",
            next_step="Check the host in the URL; a DataNode's name must resolve here too.",
        )
    if isinstance(error, OTHER_FORM):
        return _no_webhdfs(what, text)
    unheard = any(mark in text for mark in ("NewConnectionError", "ConnectTimeoutError"))
    kind = RetryableStorageError if unheard else LostAnswerError
    return kind(what, got=text, allowed="a connection and a whole answer", next_step=check(whom))


def _answered(what: str, verb: str, java: str, text: str, status: int, whom: str, data_host: str) -> LockstepError:
    if data_host and not java and not any(mark in text for mark in _RETRYABLE_TEXT):
        return StorageError(  # the NameNode has just answered, so its port is right
            f"{what}: {data_host} does not answer as a DataNode does",
            got=f"{status}: {text}",
            allowed="what WebHDFS answers",
            next_step=f"Look at {data_host}, which the NameNode named: a DataNode or a proxy before it.",
        )
    if java == "FileNotFoundException":
        return not_there(what, verb, text)
    if java in ("ParentNotDirectoryException", "InvalidPathException") or "(is not a directory" in text:
        return below_a_file(what, verb, text)
    if java in ("FileAlreadyExistsException", "AlreadyBeingCreatedException") or (
        "must both be directories" in text or "directory is not empty" in text or "already exists" in text
    ):
        return taken(what, text)
    if java in ("AccessControlException", "SecurityException", "InvalidToken", "AuthorizationException") or (
        status in (401, 403) and not java
    ):
        return StorageError(
            f"{what}: permission denied",
            got=text,
            allowed="a user, or a delegation token, with the right to do so",
            next_step="Set HADOOP_USER_NAME; under Kerberos set LOCKSTEP_WEBHDFS_TOKEN to a delegation token.",
        )
    if java in RETRYABLE_JAVA or any(mark in text for mark in _RETRYABLE_TEXT):
        return not_in_service(what, text, whom)
    if not java:
        return _no_webhdfs(what, text)
    return StorageError(what, got=f"{java}: {text}", allowed="success", next_step="See the NameNode's log.")


def _no_webhdfs(what: str, text: str) -> ConfigError:
    return ConfigError(
        f"{what}: the server does not answer as WebHDFS does",
        got=text,
        allowed="the NameNode's HTTP port (dfs.namenode.http-address, 9870 unless configured)",
        next_step="Check the port in the URL.",
    )


def _parts(error: BaseException) -> tuple[str, str, int]:
    """(Java class or "", first line of the message without secrets, status of the answer or 0)."""
    if isinstance(error, RefusedError):
        return error.java, _clean(error.text), error.status
    if isinstance(error, HdfsError):
        message = error.message.decode(errors="replace") if isinstance(error.message, bytes) else str(error.message)
        return error.exception or "", _clean(message), 401 if message.startswith("Authentication failure") else 0
    cause = error.args[0] if error.args and isinstance(error.args[0], BaseException) else error
    cause = getattr(cause, "reason", None) or cause  # urllib3 hides what happened in its "max retries exceeded"
    url = getattr(getattr(error, "request", None), "url", None)
    at = f"{urlsplit(url).netloc}: " if url else ""
    return "", f"{at}{type(cause).__name__}: {_clean(str(cause))}", 0


def _clean(text: str) -> str:
    lines = _SECRET.sub(r"\1=...", text).strip().splitlines()
    return lines[0].strip()[:500] if lines else "no message"
