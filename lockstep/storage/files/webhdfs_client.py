"""The clients of the `hdfs` package, as the backend needs them: names as they are, every request with a time-out."""

from __future__ import annotations

import copy
import io
import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
from hdfs.client import InsecureClient, TokenClient, _Request
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

CONNECTIONS = 32  # kept open for each host; more threads than that only lose the reuse
_CHUNK_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 16  # Java's stack among them
_MAX_LIST_BYTES = 1 << 28  # half a million entries of a directory
_LISTS = ("LISTSTATUS", "GETFILEBLOCKLOCATIONS")


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
        """`client`, counted here: the package asks the next NameNode by itself, so calls are no count of requests."""
        counted = copy.copy(client)
        counted._sent = self
        return counted

    def leaves(self, url: str) -> None:
        self._urls.append(url)

    def refused(self) -> None:
        self._urls.pop()


class _Exact:
    """What both clients are given besides."""

    # `read` of the package lets requests follow the redirect, and takes a dead DataNode for a dead NameNode.
    _locate_open = _Request("GET", allow_redirects=False).to_method("OPEN")
    _locate_checksum = _Request("GET", allow_redirects=False).to_method("GETFILECHECKSUM")
    _get_file_block_locations = _Request("GET").to_method("GETFILEBLOCKLOCATIONS")
    # Not among the documented operations, but older than those: it alone tells of a DataNode each of its ports.
    _get_block_locations = _Request("GET").to_method("GET_BLOCK_LOCATIONS")

    _sent: Sent | None = None

    def _request(self, method: str, url: str, **kwargs: Any) -> Any:
        sent = self._sent
        if sent is not None:
            sent.leaves(url)
        # Only the requests that ask where data lies say so themselves. A redirect of any other (to a login page, to a
        # stranger) would turn a PUT into a GET of something else, whose success tells nothing.
        asks_where = "allow_redirects" in kwargs
        kwargs["allow_redirects"] = False
        as_stream = kwargs.get("stream", False)
        kwargs["stream"] = True  # else requests reads whatever comes, however much that is
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
    """By user name."""


class _Token(_Exact, TokenClient):
    """By delegation token."""


def make_client(addresses: Sequence[str], *, user: str, token: str | None, connect_s: float, read_s: float) -> Any:
    """A client of the NameNodes at `addresses` ("http://host:port"), tried in turn where one does not serve.

    It says who it is by `token`, a delegation token, or, where that is None, by `user`, whom an HDFS without Kerberos
    believes. `connect_s` limits connecting and each send, `read_s` each wait for an answer, in seconds.
    """
    session = requests.Session()
    # Proxies and passwords of the environment (HTTP_PROXY, .netrc) are meant for the web, not for the cluster.
    session.trust_env = False
    session.headers["Accept-Encoding"] = "identity"  # what a proxy packs would be taken for the file's own bytes
    session.mount("http://", HTTPAdapter(pool_connections=CONNECTIONS, pool_maxsize=CONNECTIONS))
    kind = {"session": session, "timeout": (connect_s, read_s)}
    if token is not None:
        return _Token(";".join(addresses), token, **kind)
    return _Insecure(";".join(addresses), user=user, **kind)


def location(answer: Any) -> str:
    """Where the NameNode sends the client for the data: the URL of a DataNode. Raises RefusedError without one."""
    found = answer.headers.get("location")
    if not found:
        raise RefusedError("", "the NameNode named no DataNode (a gateway such as HttpFS?)", answer.status_code)
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
        told = json.loads(body)["RemoteException"]
        java, text = str(told["exception"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        java, text = "", body[:500].decode(errors="replace")
    raise RefusedError(java, text, answer.status_code, host_of(answer))


def _read_whole(answer: Any, most_bytes: int, limit_s: float, data_host: str) -> None:
    """Read the body of an answer, so that no more of it comes from the network.

    Raises RefusedError for one of more than `most_bytes` or a packed one, requests' errors for one that breaks off or
    is not all there after `limit_s`: a caller that has given up must not leave a thread that reads on.
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
    except HTTPError as error:  # in the form at which the package asks the next NameNode
        answer.close()
        raise requests.exceptions.ConnectionError(error, request=answer.request) from None
    except (RefusedError, requests.exceptions.ReadTimeout):
        answer.close()
        raise
    answer.raw = io.BytesIO(body)  # where `content` and `json` look
