"""Authenticated frames between the driver and its ranks.

Handshake (fixed sizes, so that a stranger cannot cause an allocation):

    driver -> peer   magic 8 | nonce 32
    peer -> driver   magic 8 | generation u32 | role u8 | rank u32 | nonce 32 | HMAC-SHA256 32
    driver -> peer   HMAC-SHA256 32

Both prove the key of the generation over both nonces; each direction then has a key derived from them, so that a frame
of another connection, direction or position in the sequence is refused:

    length u32 | tag u8 | sequence u64 | body (JSON, UTF-8) | HMAC-SHA256 32 over all before it
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from lockstep.storage import errors
from lockstep.storage.errors import CommunicationError, ConfigError, DataError, LockstepError
from lockstep.storage.typed_json import MismatchError, fields_from_json, fields_to_json

MAGIC = b"LKSTCTL1"
NONCE_BYTES = 32
MAC_BYTES = 32
HELLO = struct.Struct(">8sIBI32s32s")  # magic, generation, role, rank, nonce, proof
HEADER = struct.Struct(">IBQ")  # body length, tag, sequence
MAX_BODY_BYTES = 4 << 20  # the largest valid body is a part of a result
HELLO_DEADLINE_S = 10.0
STARTING = "start"  # a rank's phase until it reports another
OPENING = "open the dataset"  # after that; it loads compiled kernels
SCRIPT = "script"  # a user's script that has not called other ranks: it makes no steps, and may be silent for hours
HOROVOD = "horovod"  # a user's script that calls other ranks: each call is a step
SERVER = "server"  # the beginning of a parameter server's phase: it waits for ranks, which are watched themselves
SESSION = 0  # in place of a generation, in the handshake of a supervisor with the roster
_PLAIN = (str, int, float, bool, type(None))
MAX_PART_CHARS = 20_000  # of one part of an error: all of it must fit into a frame
RESULT_PART_CHARS = 512 << 10  # all ASCII, in a frame two bytes each at the most


class ConnectionLostError(CommunicationError):
    """The peer's end, a reset, or a silence longer than the socket's timeout."""


def new_key() -> bytes:
    """The secret of one launch of one generation."""
    return secrets.token_bytes(32)


class Role(IntEnum):
    """The kind of peer: a rank, or the supervisor that started it."""

    RANK = 1
    SUPERVISOR = 2


class Tag(IntEnum):
    """What a frame is."""

    BEAT = 1  # rank -> driver: step, phase
    NOTICE = 2  # rank -> driver: no reply
    REQUEST = 3  # rank -> driver: id, kind, fields
    REPLY = 4  # driver -> rank: id, reply or error
    RESULT = 5  # rank -> driver: a part of the text of what its entry returned, and whether more follow
    ERROR = 6  # rank -> driver: the error that its entry raised
    STARTED = 7  # supervisor -> driver: host, pid
    EXIT = 8  # supervisor -> driver: exit code, last log lines
    STOP = 9  # driver -> supervisor: end your rank
    PING = 10  # driver -> supervisor: the driver lives
    OUTPUT = 11  # supervisor -> driver: lines that its rank printed
    STOPPED = 12  # supervisor -> driver: whether its rank's process is stopped by a signal
    ORDER = 13  # roster -> supervisor: a sealed order for one generation
    IDLE = 14  # supervisor -> roster: the order is done, all processes of its rank have ended
    END = 15  # roster -> supervisor: no order follows
    LEAVE = 16  # driver -> rank: write a checkpoint and end; supervisor -> driver: it was asked to end
    SAVE = 17  # driver -> rank: write a checkpoint and train on
    STACKS = 18  # driver -> supervisor: where are your rank's threads; supervisor -> driver: their stacks
    TOKENS = 19  # roster -> supervisor: sealed delegation tokens, newer ones


class Channel:
    """One authenticated connection; `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket, whom: str, send_key: bytes, receive_key: bytes) -> None:
        self.whom = whom
        self._sock, self._send_key, self._receive_key = sock, send_key, receive_key
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def send(self, tag: Tag, document: dict[str, Any]) -> None:
        """Send one frame. Raises CommunicationError when the peer has ended or does not read for long."""
        body = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        if len(body) > MAX_BODY_BYTES:
            raise CommunicationError(
                f"a control message to {self.whom} is too large",
                got=f"{len(body)} bytes",
                allowed=f"up to {MAX_BODY_BYTES}",
                next_step="Write large content to storage and send its name.",
            )
        with self._lock:
            head = HEADER.pack(len(body), tag, self._sent)
            self._sent += 1
            try:
                self._sock.sendall(head + body + _mac(self._send_key, head, body))
            except OSError as error:
                raise _gone(self.whom, error) from error

    def receive(self) -> tuple[Tag, dict[str, Any]]:
        """Wait for the next frame. Raises CommunicationError at the end, at a silence longer than the socket's
        timeout, and for a frame that is too large, out of order or not from the peer."""
        head = self._exactly(HEADER.size)
        length, tag, sequence = HEADER.unpack(head)
        if length > MAX_BODY_BYTES or sequence != self._received:
            allowed = f"length up to {MAX_BODY_BYTES}, sequence {self._received}"
            raise self._refused(f"length {length}, sequence {sequence}", allowed)
        body = self._exactly(length)
        if not hmac.compare_digest(self._exactly(MAC_BYTES), _mac(self._receive_key, head, body)):
            raise self._refused("a wrong authentication code", "the code of this connection's key")
        self._received += 1
        try:
            document = json.loads(body)
            if not isinstance(document, dict):
                raise ValueError(f"a JSON {type(document).__name__}, not an object")
            return Tag(tag), document
        except ValueError as error:
            raise self._refused(str(error), "a known tag and a JSON object") from None

    def close(self) -> None:
        """End the connection at once; a thread that waits in `receive` is woken."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _exactly(self, count: int) -> bytes:
        return read_exactly(self._sock, count, self.whom)

    def _refused(self, got: str, allowed: str) -> CommunicationError:
        return CommunicationError(
            f"a control frame from {self.whom} was refused",
            got=got,
            allowed=allowed,
            next_step="Ship one version to ranks and driver; if they have one, someone tampers with the network.",
        )


@dataclass(frozen=True, kw_only=True)
class Message:
    """What driver and ranks say to each other, as a type; subclasses list what it says."""

    def to_json(self) -> dict[str, Any]:
        """The message as a JSON object."""
        return fields_to_json(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises CommunicationError for a missing or an unknown part, and for one of another type.
        """
        try:
            return fields_from_json(cls, document)
        except MismatchError as error:
            raise CommunicationError(
                f"a message {error.what}",
                got=error.got,
                allowed=error.allowed,
                next_step="Ship one version to ranks and driver.",
            ) from None


def try_send(channel: Channel, tag: Tag, document: dict[str, Any]) -> None:
    """Call `channel.send` to a peer that may have ended: the thread that reads from this channel sees the same end."""
    with contextlib.suppress(CommunicationError):
        channel.send(tag, document)


def read_exactly(sock: socket.socket, count: int, whom: str) -> bytes:
    """Read `count` bytes; raises CommunicationError when the peer ends or stays silent."""
    buffer = bytearray()
    while len(buffer) < count:
        try:
            piece = sock.recv(min(count - len(buffer), 1 << 16))
        except OSError as error:
            raise _gone(whom, error) from error
        if not piece:
            raise _gone(whom, None)
        buffer += piece
    return bytes(buffer)


def greet(sock: socket.socket, key: bytes, generation: int, num_ranks: int, whom: str) -> tuple[Role, int, Channel]:
    """The driver's half of the handshake: role and rank of the peer, and a channel. Raises CommunicationError for a
    stranger."""
    sock.settimeout(HELLO_DEADLINE_S)
    ours = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(MAGIC + ours)
    hello = read_exactly(sock, HELLO.size, whom)
    magic, their_generation, role, rank, theirs, proof = HELLO.unpack(hello)
    claim = HELLO.pack(magic, their_generation, role, rank, theirs, b"")[:-MAC_BYTES]
    # The proof is checked first: an unproven handshake says nothing that could be trusted.
    if magic != MAGIC or not hmac.compare_digest(proof, _mac(key, b"peer", ours, claim)):
        raise _stranger(whom, f"no proof of the key (it says generation {their_generation})", generation)
    if their_generation != generation or rank >= num_ranks or role not in (Role.RANK, Role.SUPERVISOR):
        raise _stranger(whom, f"generation {their_generation}, role {role}, rank {rank}", generation)
    sock.sendall(_mac(key, b"driver", ours, claim))
    to_driver, to_peer = _mac(key, b"to driver", ours, claim), _mac(key, b"to peer", ours, claim)
    name = "rank" if role == Role.RANK else "the supervisor of rank"
    return Role(role), rank, Channel(sock, f"{name} {rank}", to_peer, to_driver)


def present(sock: socket.socket, key: bytes, generation: int, role: Role, rank: int, whom: str) -> Channel:
    """A rank's or supervisor's half of the handshake. Raises CommunicationError when `whom` does not know the key."""
    sock.settimeout(HELLO_DEADLINE_S)
    greeting = read_exactly(sock, len(MAGIC) + NONCE_BYTES, whom)
    magic, theirs = greeting[: len(MAGIC)], greeting[len(MAGIC) :]
    if magic != MAGIC:
        raise _stranger(whom, f"greeting {magic!r}", generation)
    ours = secrets.token_bytes(NONCE_BYTES)
    claim = HELLO.pack(MAGIC, generation, role, rank, ours, b"")[:-MAC_BYTES]
    sock.sendall(claim + _mac(key, b"peer", theirs, claim))
    if not hmac.compare_digest(read_exactly(sock, MAC_BYTES, whom), _mac(key, b"driver", theirs, claim)):
        raise _stranger(whom, "no proof of the key", generation)
    to_driver, to_peer = _mac(key, b"to driver", theirs, claim), _mac(key, b"to peer", theirs, claim)
    return Channel(sock, whom, to_driver, to_peer)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _gone(whom: str, error: OSError | None) -> ConnectionLostError:
    return ConnectionLostError(
        f"the connection to {whom} is lost",
        got=f"{type(error).__name__}: {error}" if error else "its end",
        allowed="an open connection",
        next_step="Look at the log of that process for why it ended.",
    )


def _stranger(whom: str, got: str, generation: int) -> CommunicationError:
    return CommunicationError(
        f"{whom} does not belong to this generation and was refused",
        got=got,
        allowed=f"a proof of the key of generation {generation}",
        next_step="Nothing, if it remains from an earlier generation; else find out what connects to this port.",
    )


def error_to_json(error: BaseException) -> dict[str, Any]:
    """The class and four parts of a LockstepError; any other error becomes a LockstepError naming its class."""
    if not isinstance(error, LockstepError):
        first = (str(error).strip() or repr(error)).splitlines()[0][:MAX_PART_CHARS]
        return {"class": "LockstepError", "parts": [f"{type(error).__name__}: {first}", "", "", ""], "more": {}}
    names = ("what", "got", "allowed", "next_step")
    more = {k: v for k, v in vars(error).items() if isinstance(v, _PLAIN) and k not in names}
    kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
    return {"class": kind, "parts": [getattr(error, name)[:MAX_PART_CHARS] for name in names], "more": more}


def error_from_json(document: Mapping[str, Any]) -> LockstepError:
    """The inverse of `error_to_json`; an unknown class becomes a LockstepError."""
    kind = getattr(errors, str(document.get("class")), None)
    if not (isinstance(kind, type) and issubclass(kind, LockstepError)):
        kind = LockstepError
    what, got, allowed, next_step = (str(part) for part in document["parts"])
    error: LockstepError = kind.__new__(kind)  # not every class is built from the four parts alone
    LockstepError.__init__(error, what, got=got, allowed=allowed, next_step=next_step)
    vars(error).update(document.get("more", {}))
    return error


def json_safe(value: Any) -> Any:
    """Return `value` with infinities and NaN, which JSON cannot hold, as the strings "inf", "-inf" and "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def result_parts(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a rank's entry returned, as documents for one frame each: it may list as many left-over samples as a global
    batch has.
    """
    text = json.dumps(json_safe(result), allow_nan=False)
    for start in range(0, len(text), RESULT_PART_CHARS):
        stop = start + RESULT_PART_CHARS
        yield {"part": text[start:stop], "more": stop < len(text)}


def is_final(error: BaseException) -> bool:
    """True for an error that a restart cannot fix: the configuration or the data is at fault."""
    return isinstance(error, ConfigError | DataError)
