"""SPNEGO, Kerberos for HTTP, by the library that hdfs-native uses for it too: libgssapi_krb5 (decision 098).

Tickets are those of the environment: KRB5CCNAME, and KRB5_CLIENT_KTNAME, a keytab by which the library renews them.
"""

from __future__ import annotations

import base64
import ctypes
import functools
from typing import Any
from urllib.parse import urlsplit

from requests import PreparedRequest
from requests.auth import AuthBase

from lockstep.storage.errors import ConfigError

_LIBRARY = "libgssapi_krb5.so.2"
_ERRORS = 0xFFFF0000  # of a major status; the lower bits say such as "continue"
_GSS_CODE, _MECH_CODE = 1, 2
_ANY_TIME, _INITIATE = 0xFFFFFFFF, 1


class _Buffer(ctypes.Structure):
    _fields_ = (("length", ctypes.c_size_t), ("value", ctypes.c_void_p))

    def take(self) -> bytes:
        """The bytes, whose memory the library gets back."""
        found = ctypes.string_at(self.value, self.length) if self.value else b""
        _library().gss_release_buffer(ctypes.byref(ctypes.c_uint32()), ctypes.byref(self))
        return found


class _Oid(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint32), ("elements", ctypes.c_char_p))


_SPNEGO = _Oid(6, b"\x2b\x06\x01\x05\x05\x02")
_HOST_SERVICE = _Oid(10, b"\x2a\x86\x48\x86\xf7\x12\x01\x02\x01\x04")


class NoTicketError(Exception):
    """Kerberos gave no ticket for a server; the text is the library's."""


def token(host: str) -> bytes:
    """A token for the principal HTTP/`host`, for one request. Raises NoTicketError; ConfigError without the library."""
    gss, minor = _library(), ctypes.c_uint32()
    name, context, out = ctypes.c_void_p(), ctypes.c_void_p(), _Buffer()
    text = f"HTTP@{host}".encode()
    wanted = _Buffer(len(text), ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p))
    at = ctypes.byref
    major = gss.gss_import_name(at(minor), at(wanted), at(_HOST_SERVICE), at(name))
    try:
        if not major & _ERRORS:
            major = gss.gss_init_sec_context(
                at(minor), None, at(context), name, at(_SPNEGO), 0, 0, None, None, None, at(out), None, None
            )
        if major & _ERRORS:
            raise NoTicketError(_why(major, minor.value))
        return out.take()
    finally:
        if context.value:
            gss.gss_delete_sec_context(at(minor), at(context), None)
        if name.value:
            gss.gss_release_name(at(minor), at(name))


def ticket() -> tuple[str, int]:
    """The principal of the ticket (or keytab) in use, and for how many seconds it is valid. Raises NoTicketError."""
    gss, minor, at = _library(), ctypes.c_uint32(), ctypes.byref
    credential, name, left_s, out = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint32(), _Buffer()
    try:
        major = gss.gss_acquire_cred(at(minor), None, _ANY_TIME, None, _INITIATE, at(credential), None, None)
        if not major & _ERRORS:
            major = gss.gss_inquire_cred(at(minor), credential, at(name), at(left_s), None, None)
        if not major & _ERRORS:
            major = gss.gss_display_name(at(minor), name, at(out), None)
        if major & _ERRORS:
            raise NoTicketError(_why(major, minor.value))
        return out.take().decode(errors="replace"), left_s.value
    finally:
        if name.value:
            gss.gss_release_name(at(minor), at(name))
        if credential.value:
            gss.gss_release_cred(at(minor), at(credential))


class Negotiate(AuthBase):
    """Sends a token with each request to `hosts` ("host:port"), so that none needs two; others authorise by the URL
    that they were named by.
    """

    def __init__(self, hosts: frozenset[str]) -> None:
        self._hosts = hosts

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        where = urlsplit(str(request.url))
        if where.netloc in self._hosts and where.hostname:
            request.headers["Authorization"] = f"Negotiate {base64.b64encode(token(where.hostname)).decode()}"
        return request


@functools.cache
def _library() -> Any:
    try:
        gss = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConfigError(
            "Kerberos' library cannot be loaded",
            got=str(error),
            allowed=_LIBRARY,
            next_step="Install it (Debian: apt-get install libgssapi-krb5-2; RHEL: yum install krb5-libs).",
        ) from None
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    gss.gss_import_name.argtypes = [pointer] * 4
    gss.gss_init_sec_context.argtypes = [*[pointer] * 5, number, number, *[pointer] * 6]
    gss.gss_display_status.argtypes = [pointer, number, ctypes.c_int, *[pointer] * 3]
    gss.gss_acquire_cred.argtypes = [pointer, pointer, number, pointer, ctypes.c_int, *[pointer] * 3]
    gss.gss_inquire_cred.argtypes = [pointer] * 6
    gss.gss_display_name.argtypes = [pointer] * 4
    gss.gss_delete_sec_context.argtypes = [pointer] * 3
    gss.gss_release_cred.argtypes = gss.gss_release_name.argtypes = gss.gss_release_buffer.argtypes = [pointer] * 2
    return gss


def _why(major: int, minor: int) -> str:
    return ": ".join(filter(None, (_text(major, _GSS_CODE), _text(minor, _MECH_CODE))))


def _text(status: int, kind: int) -> str:
    more, message, minor = ctypes.c_uint32(), _Buffer(), ctypes.c_uint32()
    at = ctypes.byref
    _library().gss_display_status(at(minor), status, kind, at(_SPNEGO), at(more), at(message))
    return message.take().decode(errors="replace")
