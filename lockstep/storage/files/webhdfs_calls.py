"""Requests to one HDFS over HTTP: each ends, is tried again where that helps, and fails with an error of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPException
from typing import Any, TypeVar

from hdfs.util import HdfsError
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from lockstep.storage.errors import LockstepError
from lockstep.storage.files.deadlines import call_with_deadline
from lockstep.storage.files.retry import with_retries
from lockstep.storage.files.webhdfs_client import RefusedError, checked, make_client
from lockstep.storage.files.webhdfs_errors import OTHER_FORM, translate
from lockstep.storage.files.webhdfs_http import http_addresses
from lockstep.storage.settings import seconds

T = TypeVar("T")

_CONNECT_S = 10.0
_BELOW = (HdfsError, RefusedError, RequestException, HTTPError, HTTPException, OSError, *OTHER_FORM)


class WebHdfsCalls:
    """What every operation goes through. Attributes: `whom` and `whom_data` for errors, `call_deadline_s` and
    `data_deadline_s` for one attempt at the NameNode and at a DataNode, `give_up_s` for all of one call, in seconds.
    """

    def __init__(self, authority: str, settings: Mapping[str, str], *, user: str, token: str | None) -> None:
        addresses = http_addresses(authority, settings)
        hosts = ", ".join(address.removeprefix("http://") for address in addresses)
        self.whom = f"the NameNode{'s' if len(addresses) > 1 else ''} at {hosts}"
        self.whom_data = f"{self.whom} or a DataNode"
        self.call_deadline_s = seconds(settings, "lockstep.storage.call-deadline-s")
        self.data_deadline_s = seconds(settings, "lockstep.storage.data-deadline-s")
        self.give_up_s = seconds(settings, "lockstep.storage.give-up-s")
        # Each address gets its turn within the deadline of a call: a frozen NameNode must not use up the other's.
        each_s = 0.9 * self.call_deadline_s / len(addresses)
        who: dict[str, Any] = {"user": user, "token": token}
        self._names = make_client(addresses, **who, connect_s=min(_CONNECT_S, each_s), read_s=each_s)
        # The connect limit is also that of each send, which waits for the slowest DataNode of the pipeline.
        self._data = make_client(addresses, **who, connect_s=self.call_deadline_s, read_s=self.data_deadline_s)

    def call(self, fn: Callable[[Any], T], verb: str, url: str) -> T:
        """Ask the NameNode by `fn(client)` until it succeeds, fails for good, or the total time is over."""
        return self._retried(self._names, fn, verb, url, self.call_deadline_s)

    def call_data(self, fn: Callable[[Any], T], verb: str, url: str) -> T:
        """The same for what also asks DataNodes."""
        return self._retried(self._data, fn, verb, url, self.data_deadline_s)

    def once(self, fn: Callable[[Any], T], verb: str, url: str, deadline_s: float) -> T:
        """One attempt at the NameNode, ended at its deadline."""
        return self._once(self._names, fn, verb, url, deadline_s)

    def send(
        self, method: str, where: str, body: bytes | Iterable[bytes], verb: str, url: str, deadline_s: float = 0.0
    ) -> None:
        """Send `body` to a DataNode, on a thread that is left behind after `deadline_s`; 0: on this one."""

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
