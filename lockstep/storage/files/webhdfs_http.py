"""WebHDFS over HTTP: addresses of NameNodes, requests and their errors, and hdfs:// URLs as webhdfs:// and back."""

from __future__ import annotations

import copy
import io
import json
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
from hdfs.client import Client, InsecureClient, TokenClient, _Request
from hdfs.util import HdfsError
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from lockstep.storage.errors import ConfigError, LockstepError, RetryableStorageError, StorageError
from lockstep.storage.files.deadlines import call_with_deadline, with_retries
from lockstep.storage.files.hdfs_cures import cured, first_line
from lockstep.storage.files.remote import (
    RETRYABLE_JAVA,
    below_a_file,
    check,
    erasure_coded,
    no_ticket,
    not_in_service,
    not_there,
    taken,
    without_secrets,
)
from lockstep.storage.files.spnego import Negotiate, NoTicketError
from lockstep.storage.settings import seconds, with_kerberos
from lockstep.storage.urls import split_url

_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):([0-9]{1,5})")
_HTTP, _HTTPS, _RPC = "dfs.namenode.http-address", "dfs.namenode.https-address", "dfs.namenode.rpc-address"
CONNECTIONS = 32  # kept open for each host; more threads than that only lose the reuse
_CHUNK_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 16  # Java's stack among them
_MAX_LIST_BYTES = 1 << 28  # half a million entries of a directory
_LISTS = ("LISTSTATUS", "GETFILEBLOCKLOCATIONS")
# How a standby NameNode refuses a delegation token, and what the package reads as "ask the other one".
_TOKEN_ON_STANDBY = b"InvalidToken: StandbyException"
_STANDBY = b'{"RemoteException": {"exception": "StandbyException", "message": "it is a standby NameNode"}}'
# What parsing raises for an answer that is not WebHDFS's JSON; requests' error for invalid JSON is a ValueError too.
OTHER_FORM = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
_RETRYABLE_TEXT = (
    "could only be written to", "SafeModeException", "StandbyException", "nodes contain this block",
    "Failed to find datanode", "All datanodes", "Could not obtain block", "Blocklist for", "Filesystem closed",
)  # fmt: skip
T = TypeVar("T")
_CONNECT_S = 10.0


def http_addresses(authority: str, settings: Mapping[str, str], scheme: str = "webhdfs") -> tuple[str, ...]:
    """ "http://host:port" of each NameNode, for swebhdfs "https://host:port": "host:port[,host:port]" as written, or
    those of a name service by the settings. Raises ConfigError for anything else.
    """
    key, protocol, usual = (_HTTP, "http", 9870) if scheme == "webhdfs" else (_HTTPS, "https", 9871)
    parts = authority.split(",")
    nodes = parts if all(_valid(part) for part in parts) else _of_service(authority, key, settings)
    if nodes:
        return tuple(f"{protocol}://{node}" for node in nodes)
    raise ConfigError(
        f"a {scheme}:// URL names no NameNode",
        got=f"{scheme}://{authority}",
        allowed=f"{scheme}://HOST:HTTP_PORT/PATH, {scheme}://HOST:PORT,HOST2:PORT2/PATH, or a name service whose"
        f" {key} HADOOP_CONF_DIR or Spark's settings give",
        next_step=f"Write the NameNode's host and {protocol.upper()} port ({usual} unless configured).",
    )


def as_webhdfs(url: str, settings: Mapping[str, str]) -> str:
    """The webhdfs:// URL of the same path; an hdfs:// URL's NameNode is looked up in the settings (ConfigError)."""
    return _converted(url, "webhdfs", _RPC, _HTTP, settings)


def as_hdfs(url: str, settings: Mapping[str, str]) -> str:
    """The hdfs:// URL of the same path; a webhdfs:// URL's NameNode is looked up in the settings (ConfigError)."""
    return _converted(url, "hdfs", _HTTP, _RPC, settings)


def path_of(url: str) -> str:
    """The path on HDFS. Raises ConfigError for `.` and `..`, which an HTTP client would resolve by itself."""
    path = re.sub("/+", "/", split_url(url)[2]).rstrip("/") or "/"
    if any(part in (".", "..") for part in path.split("/")):
        raise ConfigError(
            f"{url} is not a plain path",
            got="`.` or `..` in it",
            allowed="names",
            next_step="Write the path that is meant.",
        )
    return path


def _converted(url: str, scheme: str, have: str, want: str, settings: Mapping[str, str]) -> str:
    known, authority, path = split_url(url)
    if known == scheme:
        return url
    if not authority:
        authority = split_url(settings.get("fs.defaultFS", ""))[1] if settings.get("fs.defaultFS") else ""
    if f"dfs.ha.namenodes.{authority}" in settings:
        return f"{scheme}://{authority}{path}"  # a name service has the same name in both
    nodes = set(authority.split(","))
    for key, value in sorted(settings.items()):
        suffix = key.removeprefix(have)
        if (key == have or key.startswith(have + ".")) and value in nodes:
            service = suffix[1:].partition(".")[0]
            if service and f"dfs.ha.namenodes.{service}" in settings:
                return f"{scheme}://{service}{path}"
            if want + suffix in settings:
                return f"{scheme}://{settings[want + suffix]}{path}"
    raise ConfigError(
        f"{url} cannot be reached by {scheme}: the NameNode's address for it is not known",
        got=f"{have} = {authority or '(none)'} without a {want}",
        allowed=f"{scheme}://HOST:PORT/PATH, or both addresses in the files of HADOOP_CONF_DIR",
        next_step=f"Write --output {scheme}://HOST:PORT{path}, or set HADOOP_CONF_DIR.",
    )


def _of_service(service: str, key: str, settings: Mapping[str, str]) -> list[str]:
    names = [name.strip() for name in settings.get(f"dfs.ha.namenodes.{service}", "").split(",")]
    found = [settings.get(f"{key}.{service}.{name}", "") for name in names if name]
    return [node for node in found if _valid(node)]


def _valid(address: str) -> bool:
    found = _ADDRESS.fullmatch(address)
    return found is not None and 0 < int(found.group(2)) < 1 << 16


class RefusedError(Exception):
    """A server's answer that is no success, or none of WebHDFS.

    Attributes: `java`, the short class name ("" where none came), its message `text`, the HTTP `status`, and
    `data_host`, the host and port that the NameNode named for the data, or "" where the NameNode itself spoke.
    """

    def __init__(self, java: str, text: str, status: int, data_host: str = "") -> None:
        super().__init__(text)
        self.java, self.text, self.status, self.data_host = java, text, status, data_host


class Sent:
    """The requests of one operation that may have happened: those that reached a server and were not refused."""

    def __init__(self) -> None:
        self._urls: list[str] = []  # append and pop are atomic: an attempt that was given up still runs

    def __len__(self) -> int:
        return len(self._urls)

    def over(self, client: Any) -> Any:
        """Return `client`, counted here: the package asks the next NameNode by itself, so calls are no count of
        requests.
        """
        counted = copy.copy(client)
        counted._sent = self
        return counted

    def leaves(self, url: str) -> None:
        self._urls.append(url)

    def refused(self) -> None:
        self._urls.pop()


class _Exact:
    """What all three clients have in common: requests end after one answer, of limited length, without a redirect."""

    # `read` of the package lets requests follow the redirect, and takes a dead DataNode for a dead NameNode.
    _locate_open = _Request("GET", allow_redirects=False).to_method("OPEN")
    _locate_checksum = _Request("GET", allow_redirects=False).to_method("GETFILECHECKSUM")
    # Undocumented, but older than the documented operations, and the only one that lists all ports of a DataNode.
    _get_block_locations = _Request("GET").to_method("GET_BLOCK_LOCATIONS")

    _sent: Sent | None = None

    def _request(self, method: str, url: str, **kwargs: Any) -> Any:
        sent = self._sent
        if sent is not None:
            sent.leaves(url)
        # Only requests for the location of data expect a redirect. Following another one (to a login page, to a foreign
        # server) would turn a PUT into a GET of something else, whose success means nothing.
        asks_where = "allow_redirects" in kwargs
        kwargs["allow_redirects"] = False
        as_stream = kwargs.get("stream", False)
        kwargs["stream"] = True  # else requests would read a body of any length
        try:
            # the package has no types, so mypy sees no such method above a mixin
            answer = super()._request(method, url, **kwargs)  # type: ignore[misc]
        except requests.exceptions.ConnectionError as error:
            reason = getattr(error.args[0], "reason", None) if error.args else None
            if sent is not None and isinstance(reason, (NewConnectionError, ConnectTimeoutError)):
                sent.refused()
            raise
        elsewhere = not asks_where and 300 <= answer.status_code < 400
        if sent is not None and (elsewhere or not answer.ok):
            sent.refused()
        operation = kwargs.get("params", {}).get("op", "")  # only what the package asks a NameNode has parameters
        data_host = "" if operation else host_of(answer)
        if elsewhere:
            answer.close()
            there = urlsplit(answer.headers.get("location", "")).netloc or "nowhere"
            raise RefusedError("", f"a redirect to {there}", answer.status_code, data_host)
        if not (as_stream and answer.ok):
            most = _MAX_LIST_BYTES if answer.ok and operation in _LISTS else _MAX_ANSWER_BYTES
            # the time-out is the attribute of the package, which has no types
            _read_whole(answer, most, self._timeout[1], data_host)  # type: ignore[attr-defined]
        return answer

    def resolve(self, hdfs_path: str) -> str:
        """The path itself: the package would drop `..` and put the newest entry for a part named `#LATEST`."""
        return hdfs_path


class _Insecure(_Exact, InsecureClient):
    """A client that sends a user's name."""


class _Token(_Exact, TokenClient):
    """A client that sends a delegation token."""


class _Kerberos(_Exact, Client):
    """A client that proves itself by a Kerberos ticket."""


def make_client(
    addresses: Sequence[str], *, user: str, token: str | None, kerberos: bool = False, connect_s: float, read_s: float
) -> Any:
    """A client of the NameNodes at `addresses` ("http://host:port"), tried in turn where one does not serve.

    It authenticates by `token`, a delegation token, or, if that is None, by a ticket (`kerberos`), or names `user`,
    which an HDFS without Kerberos accepts. Certificates are checked by the system's authorities, or those in the file
    SSL_CERT_FILE. `connect_s` limits connecting and each send, `read_s` each wait for an answer, in seconds.
    """
    session = requests.Session()
    # Proxies and passwords of the environment (HTTP_PROXY, .netrc) are meant for the web, not for the cluster.
    session.trust_env = False
    session.headers["Accept-Encoding"] = "identity"  # compressed by a proxy, a body would not be the file's bytes
    for protocol in ("http://", "https://"):
        session.mount(protocol, HTTPAdapter(pool_connections=CONNECTIONS, pool_maxsize=CONNECTIONS))
    authorities = ssl.get_default_verify_paths()
    session.verify = authorities.cafile or authorities.capath or True
    kind = {"session": session, "timeout": (connect_s, read_s)}
    if token is not None:
        return _Token(";".join(addresses), token, **kind)
    if kerberos:
        session.auth = Negotiate(frozenset(urlsplit(address).netloc for address in addresses))
        return _Kerberos(";".join(addresses), **kind)
    return _Insecure(";".join(addresses), user=user, **kind)


def location(answer: Any) -> str:
    """The URL of the DataNode to which the NameNode redirects for data. Raises RefusedError without one."""
    found = answer.headers.get("location")
    if not found:
        raise RefusedError("", "no DataNode was named (HttpFS?)", answer.status_code)
    # http.client reads headers as Latin-1; bytes beyond ASCII are put back and left for requests to quote.
    return str(found).encode("latin-1").decode("utf-8", errors="surrogateescape")


def host_of(answer: Any) -> str:
    """Host and port of the server that gave an answer."""
    return urlsplit(answer.url).netloc


def checked(answer: Any) -> Any:
    """The answer of a DataNode if it is a success. Raises RefusedError."""
    if 200 <= answer.status_code < 300:
        return answer
    body = answer.content
    try:
        found = json.loads(body)["RemoteException"]
        java, text = str(found["exception"]), str(found["message"])
    except (ValueError, KeyError, TypeError):
        java, text = "", body[:500].decode(errors="replace")
    raise RefusedError(java, text, answer.status_code, host_of(answer))


def _read_whole(answer: Any, most_bytes: int, limit_s: float, data_host: str) -> None:
    """Read the body of an answer, so that no more of it comes from the network.

    Raises RefusedError for one of more than `most_bytes` or a packed one, requests' errors for one that breaks off or
    is incomplete after `limit_s`: a caller that gave up must not leave a thread that keeps reading.
    """
    end, body = time.monotonic() + limit_s, bytearray()
    try:
        packed = answer.headers.get("Content-Encoding") or "identity"
        if packed != "identity":
            raise RefusedError("", f"a packed answer ({packed})", answer.status_code, data_host)
        while piece := answer.raw.read1(_CHUNK_BYTES, decode_content=False):
            body += piece
            if len(body) > most_bytes:
                raise RefusedError("", f"an answer of over {most_bytes} bytes", answer.status_code, data_host)
            if time.monotonic() > end:
                raise requests.exceptions.ReadTimeout(f"no whole answer in {limit_s:.3g} s", request=answer.request)
    except HTTPError as error:  # the error for which the package asks the next NameNode
        answer.close()
        raise requests.exceptions.ConnectionError(error, request=answer.request) from None
    except (RefusedError, requests.exceptions.ReadTimeout):
        answer.close()
        raise
    if answer.status_code == 403 and _TOKEN_ON_STANDBY in body:
        body = bytearray(_STANDBY)
    answer.raw = io.BytesIO(body)  # where `content` and `json` look


class LostAnswerError(RetryableStorageError):
    """A request was sent, or may have been, without a complete answer: it may have succeeded."""


def translate(error: BaseException, *, verb: str, place: str, whom: str) -> LockstepError:
    """Our error for one of the `hdfs` package or below it, raised while `verb`-ing `place` on `whom`."""
    what = f"cannot {verb} {place}"
    if isinstance(error, NoTicketError):
        return no_ticket(what, str(error))
    java, text, status = _parts(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return StorageError(
            f"{what}: the server's certificate is not trusted here",
            got=text,
            allowed="one that an authority of this system, or of the file SSL_CERT_FILE, has signed",
            next_step="Set SSL_CERT_FILE to a PEM file with the site's authority; for executors by"
            " --conf spark.executorEnv.SSL_CERT_FILE=FILE.",
        )
    if "WRONG_VERSION_NUMBER" in text or "BadStatusLine('\\x15\\x03" in text:  # an alert of TLS as an answer
        return ConfigError(
            f"{what}: one side speaks TLS and the other does not",
            got=text,
            allowed="swebhdfs:// with an HTTPS port (9871 unless configured), webhdfs:// with an HTTP port (9870)",
            next_step="Correct the scheme or the port of the URL.",
        )
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
    if (known := cured(what, java, text)) is not None:
        return known
    if java in ("SecurityException", "InvalidToken") or (status in (401, 403) and not java):
        return StorageError(  # not final: a newer token or ticket may be on its way
            f"{what}: permission denied",
            got=text,
            allowed="a user, or a delegation token, with the right to do so",
            next_step="Set HADOOP_USER_NAME, or ask for the permission; under Kerberos run kinit with"
            " hadoop.security.authentication=kerberos in core-site.xml, or set a new LOCKSTEP_WEBHDFS_TOKEN.",
        )
    if java in RETRYABLE_JAVA or any(mark in text for mark in _RETRYABLE_TEXT):
        return not_in_service(what, text, whom)
    if "Append on EC file" in text:
        return erasure_coded(what, text)
    if not java:
        return _no_webhdfs(what, text)
    return StorageError(what, got=f"{java}: {text}", allowed="success", next_step="See the NameNode's log.")


def _no_webhdfs(what: str, text: str) -> ConfigError:
    return ConfigError(
        f"{what}: the server does not answer as WebHDFS does",
        got=text,
        allowed="the NameNode's HTTP port (dfs.namenode.http-address, 9870 unless configured)",
        next_step="Write the NameNodes' own addresses, or hdfs://: docs/sites.md says why HttpFS does not do."
        if "HttpFS" in text
        else "Check the port in the URL.",
    )


def _parts(error: BaseException) -> tuple[str, str, int]:
    """Return (Java class or "", first line of the message without secrets, status of the answer or 0)."""
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
    return first_line(without_secrets(text))[:500] or "no message"


_BELOW = (HdfsError, RefusedError, NoTicketError, RequestException, HTTPError, HTTPException, OSError, *OTHER_FORM)


class WebHdfsCalls:
    """Sends every request. Attributes: `whom` and `whom_data` for errors, `call_deadline_s` and
    `data_deadline_s` for one attempt at the NameNode and at a DataNode, `give_up_s` for all of one call, in seconds.
    """

    def __init__(
        self, authority: str, settings: Mapping[str, str], *, user: str, token: str | None, scheme: str = "webhdfs"
    ) -> None:
        addresses = http_addresses(authority, settings, scheme)
        hosts = ", ".join(urlsplit(address).netloc for address in addresses)
        self.whom = f"the NameNode{'s' if len(addresses) > 1 else ''} at {hosts}"
        self.whom_data = f"{self.whom} or a DataNode"
        self.call_deadline_s = seconds(settings, "lockstep.storage.call-deadline-s")
        self.data_deadline_s = seconds(settings, "lockstep.storage.data-deadline-s")
        self.give_up_s = seconds(settings, "lockstep.storage.give-up-s")
        # Each address gets its share of a call's deadline: a frozen NameNode must not use up the other's time.
        each_s = 0.9 * self.call_deadline_s / len(addresses)
        who: dict[str, Any] = {"user": user, "token": token, "kerberos": with_kerberos(settings)}
        self._names = make_client(addresses, **who, connect_s=min(_CONNECT_S, each_s), read_s=each_s)
        # The connect limit is also that of each send, which waits for the slowest DataNode of the pipeline.
        self._data = make_client(addresses, **who, connect_s=self.call_deadline_s, read_s=self.data_deadline_s)

    def call(self, fn: Callable[[Any], T], verb: str, url: str) -> T:
        """Ask the NameNode by `fn(client)` until it succeeds, fails for good, or the total time is over."""
        return self._retried(self._names, fn, verb, url, self.call_deadline_s)

    def call_data(self, fn: Callable[[Any], T], verb: str, url: str) -> T:
        """Ask as `call` does where DataNodes answer too, within the deadline of data."""
        return self._retried(self._data, fn, verb, url, self.data_deadline_s)

    def once(self, fn: Callable[[Any], T], verb: str, url: str, deadline_s: float) -> T:
        """One attempt at the NameNode, ended at its deadline."""
        return self._once(self._names, fn, verb, url, deadline_s)

    def send(
        self, method: str, where: str, body: bytes | Iterable[bytes], verb: str, url: str, deadline_s: float = 0.0
    ) -> None:
        """Send `body` to a DataNode on a thread that is abandoned after `deadline_s`, or on this one if that is 0."""

        def run(client: Any) -> None:
            checked(client._request(method, url=where, data=body))

        if deadline_s:
            self._once(self._data, run, verb, url, deadline_s)
            return
        try:
            run(self._data)
        except _BELOW as error:
            raise translate(error, verb=verb, place=url, whom=self.whom) from None

    def _retried(self, client: Any, fn: Callable[[Any], T], verb: str, url: str, limit_s: float) -> T:
        return with_retries(
            lambda left_s: self._once(client, fn, verb, url, min(left_s, limit_s)),
            what=f"`{verb} {url}`",
            whom=self.whom,
            give_up_s=self.give_up_s,
        )

    def _once(self, client: Any, fn: Callable[[Any], T], verb: str, url: str, deadline_s: float) -> T:
        # The time-outs of sockets end most waits; the deadline also ends name look-ups and answers that trickle.
        whom = self.whom if client is self._names else self.whom_data
        try:
            return call_with_deadline(lambda: fn(client), deadline_s, what=f"cannot {verb} {url}", whom=whom)
        except LockstepError:
            raise
        except _BELOW as error:
            # Without its cause: requests puts whole URLs into messages, and a token is part of them.
            raise translate(error, verb=verb, place=url, whom=self.whom) from None
