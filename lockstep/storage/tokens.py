"""Delegation tokens of HDFS and their renewals, from Spark's Java process to every process of a job (decision 098).

Spark fetches tokens, and new ones before they end, but gives them to Java processes only. Here the driver reads them
from its own; tasks get them with their function, ranks through their supervisors. Each process keeps them in memory
that has a path and no name on a disk, in HADOOP_TOKEN_FILE_LOCATION: hdfs-native reads it whenever it connects, so new
tokens count from the next connection on.
"""

from __future__ import annotations

import base64
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
VARIABLE = "HADOOP_TOKEN_FILE_LOCATION"
KINDS = ("HDFS_DELEGATION_TOKEN", "kms-dt")  # no rank needs those of YARN
LOOK_EVERY_S, FIRST_LOOKS = 5.0, 25

_lock = threading.Lock()
_held = ""
_file = -1
_source: Callable[[], str] | None = None  # in a driver: its Java process
_lives: Callable[[], bool] | None = None  # and whether its session does


def held() -> str:
    """The tokens of this process, in a driver those that Java has now, as text; "" for none. A secret: send it, never
    store or log it.
    """
    source = _source
    if source is not None:
        try:
            hold(source())
        except Exception as error:  # py4j's, which storage does not import: Java has ended, or is ending
            log.debug("Spark's delegation tokens cannot be read: %s", type(error).__name__)
    return _held


def hold(tokens: str) -> None:
    """Use these tokens from now on, in this process and those that it starts."""
    global _held, _file
    with _lock:
        if not tokens or tokens == _held:
            return
        new = os.memfd_create("lockstep-tokens")
        with os.fdopen(os.dup(new), "wb") as file:
            file.write(base64.b64decode(tokens))
        if _file < 0:
            _file = new
        else:
            os.dup2(new, _file, inheritable=False)  # at once: a reader has all of the old tokens, or all of the new
            os.close(new)
        os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{_file}"
        _held = tokens


def of_session(jvm: Any) -> str:
    """The tokens of the driver's Java process `jvm`, by py4j, as text for `hold`; "" if it has none."""
    security = jvm.org.apache.hadoop.security
    found = security.Credentials()
    tokens = security.UserGroupInformation.getCurrentUser().getCredentials().getAllTokens()
    for token in jvm.java.util.ArrayList(tokens):
        if token.getKind().toString() in KINDS:
            found.addToken(token.getService(), token)
    if not found.numberOfTokens():
        return ""
    stream = jvm.java.io.ByteArrayOutputStream()
    found.writeTokenStorageToStream(jvm.java.io.DataOutputStream(stream))
    return base64.b64encode(bytes(stream.toByteArray())).decode()


def follow(jvm: Any, lives: Callable[[], bool]) -> None:
    """Hold the tokens of a driver's Java process, and its new ones while the session `lives()`, or the next one that
    this is called for; does nothing without Kerberos.
    """
    global _source, _lives
    if not jvm.org.apache.hadoop.security.UserGroupInformation.isSecurityEnabled():
        return
    with _lock:
        begun = _lives is not None
        _source, _lives = partial(of_session, jvm), lives
    if not begun:
        threading.Thread(target=_look, name="tokens", daemon=True).start()
    held()


def _look() -> None:
    global _source, _lives
    for looks in itertools.count():
        with _lock:
            if _lives is None or not _lives():
                _source = _lives = None
                return
        # Spark fetches the first ones while the session begins, and may not be done.
        time.sleep(LOOK_EVERY_S if held() or looks > FIRST_LOOKS else LOOK_EVERY_S / FIRST_LOOKS)


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """What may be shown of a token: its kind, and for those of HDFS its owner and its last second (seconds of 1970)."""

    kind: str
    owner: str = ""
    until_s: float | None = None


def shown(data: bytes) -> list[TokenInfo]:
    """What may be shown of the tokens in a file of Hadoop's. Raises ValueError for another kind of file."""
    try:
        if data[:5] == b"HDTS\0":
            return [_info(kind, identifier) for identifier, _, kind, _ in map(_parts, _writable(data))]
        if data[:5] == b"HDTS\1":
            length, begin = _varint(data, 5)
            entries = _fields(data[begin : begin + length]).get(1, [])
            tokens = [_fields(_fields(entry)[2][0]) for entry in entries]
            return [_info(token[3][0], token[1][0]) for token in tokens]
    except (IndexError, KeyError) as error:
        raise ValueError("it ends too soon") from error
    raise ValueError("it does not begin as Hadoop's token files do")


def for_web(service: str) -> str | None:
    """The token of a name service in HADOOP_TOKEN_FILE_LOCATION, as WebHDFS takes it in a URL; None without one."""
    try:
        data = Path(os.environ[VARIABLE]).read_bytes()
        for token in _writable(data) if data[:5] == b"HDTS\0" else []:
            if _parts(token)[2:] == [KINDS[0].encode(), f"ha-hdfs:{service}".encode()]:
                return base64.urlsafe_b64encode(token).decode().rstrip("=")
    except (KeyError, OSError, IndexError):
        pass  # no file, or none of Hadoop's: hdfs:// goes by the ticket then, too
    return None


def _writable(data: bytes) -> list[bytes]:
    """The tokens in a file of Hadoop's own form, each as its Token.write makes it."""
    count, at = _vlong(data, 5)
    found = []
    for _ in range(count):
        length, at = _vlong(data, at)
        at = begin = at + length  # after the alias
        for _ in range(4):
            length, at = _vlong(data, at)
            at += length
        found.append(data[begin:at])
    return found


def _parts(token: bytes) -> list[bytes]:
    """Split a token into identifier, password, kind and service."""
    parts, at = [], 0
    for _ in range(4):
        length, at = _vlong(token, at)
        parts.append(token[at : at + length])
        at += length
    return parts


def _info(kind: bytes, identifier: bytes) -> TokenInfo:
    name = kind.decode(errors="replace")
    if name not in KINDS or identifier[:1] != b"\0":
        return TokenInfo(name)
    owner, at = b"", 1
    for number in range(3):  # owner, renewer, real user
        length, at = _vlong(identifier, at)
        owner = identifier[at : at + length] if number == 0 else owner
        at += length
    _, at = _vlong(identifier, at)  # when it was issued
    return TokenInfo(name, owner.decode(errors="replace"), _vlong(identifier, at)[0] / 1000)


def _vlong(data: bytes, at: int) -> tuple[int, int]:
    """A number as Hadoop's WritableUtils write it, not below 0, and where it ends."""
    first = data[at] - 256 if data[at] > 127 else data[at]
    length = 0 if first >= -112 else -112 - first
    if not length:
        return first, at + 1
    return int.from_bytes(data[at + 1 : at + 1 + length], "big"), at + 1 + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def _fields(data: bytes) -> dict[int, list[bytes]]:
    """The fields of a protobuf message, all of which have a length."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        length, at = _varint(data, at)
        found.setdefault(key >> 3, []).append(data[at : at + length])
        at += length
    return found
