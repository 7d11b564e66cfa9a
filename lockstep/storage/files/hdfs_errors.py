"""What hdfs-native raises, made into our errors: one class each, the Java stack cut to its first line."""

from __future__ import annotations

import re

from lockstep.storage.errors import ConfigError, LockstepError, RetryableStorageError, StorageError
from lockstep.storage.files.remote_errors import RETRYABLE_JAVA, below_a_file, check, not_in_service, not_there, taken

_RPC = re.compile(r'^RPCError\("(?P<java>[^"]+)", "(?P<text>.*)', re.DOTALL)
# What hdfs-native prints of a DataNode is twenty fields long; these two say which one it is.
_DATANODE = re.compile(r'DatanodeInfoProto \{ id: DatanodeIdProto \{ ip_addr: \\*"([^"\\]+)\\*".*?xfer_port: (\d+)')
_RETRYABLE_TEXT = ("could only be written to", "SafeModeException", "All DataNodes failed", "No new datanode found")


def translate(error: BaseException, *, verb: str, place: str, whom: str) -> LockstepError:
    """Our error for one of hdfs-native's, raised while `verb`-ing `place` on `whom`."""
    java, text = _parts(error)
    what = f"cannot {verb} {place}"
    if isinstance(error, FileNotFoundError):
        return not_there(what, verb, text)
    if isinstance(error, FileExistsError) or "must both be directories" in text or "directory is not empty" in text:
        return taken(what, text)
    if java == "ParentNotDirectoryException" or "(is not a directory" in text:
        return below_a_file(what, verb, text)
    if java == "AccessControlException":
        return StorageError(
            f"{what}: permission denied",
            got=text,
            allowed="a user with the right to do so",
            next_step="Set HADOOP_USER_NAME, or ask for the permission; under Kerberos run kinit.",
        )
    if java in RETRYABLE_JAVA or any(mark in text for mark in _RETRYABLE_TEXT):
        return not_in_service(what, text, whom)
    if "No NameNode hosts found" in text:
        return ConfigError(
            f"{what}: no NameNode is known for this name service",
            got=text,
            allowed="hdfs://HOST:PORT, or a name service that HADOOP_CONF_DIR or Spark's settings define",
            next_step="Set HADOOP_CONF_DIR, or write the NameNode's host and port.",
        )
    if "UrlParseError" in text or "No fs.defaultFS" in text:
        return ConfigError(
            f"{what}: it names no NameNode",
            got=text,
            allowed="hdfs://HOST:PORT/PATH, or a name service that HADOOP_CONF_DIR or Spark's settings define",
            next_step="Correct the URL, or set HADOOP_CONF_DIR.",
        )
    if "Name or service not known" in text:
        return StorageError(
            f"{what}: {whom} has no address",
            got=text,
            allowed="a host name that resolves",
            next_step="Check the host in the URL.",
        )
    if "GSSAPIError" in text:
        return StorageError(f"{what}: Kerberos refused", got=text, allowed="a valid ticket", next_step="Run kinit.")
    if isinstance(error, OSError):
        # Its OSErrors are lost or refused connections; errno is never set, so the text is all there is.
        return RetryableStorageError(what, got=text, allowed="a connection", next_step=check(whom))
    if isinstance(error, (ValueError, TypeError)):
        return StorageError(what, got=text, allowed="a valid call", next_step="Check the path and the settings.")
    return StorageError(
        what, got=f"{java}: {text}" if java else text, allowed="success", next_step="See the NameNode's log."
    )


def _parts(error: BaseException) -> tuple[str, str]:
    """(Java class without its package or "", first line of the message)."""
    message = str(error) or repr(error)
    found = _RPC.match(message)
    java, text = (found["java"].rpartition(".")[2], found["text"]) if found else ("", message)
    if "All DataNodes failed" in text and (tried := _DATANODE.findall(text)):
        text = f"All DataNodes failed: {', '.join(f'{host}:{port}' for host, port in tried)}"
    # Inside RPCError the text is a Rust literal, so its line ends are written out.
    return java, re.split(r"\\n|\n|\\t|\t", text)[0].strip().removesuffix('")')
