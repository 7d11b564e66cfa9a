"""TLS 1.3 between ranks on different hosts, with certificates that the driver makes for one launch.

The driver is the certificate authority of one launch: it makes a key, signs one certificate per rank and discards the
key. A certificate names its rank and generation, so no rank can pass for another; both sides show theirs. The handshake
of `lockstep.training.comm.auth` runs inside, since a certificate does not prove the generation's key.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from lockstep.training.comm.auth import DrivenOutError, HandshakeError

if TYPE_CHECKING:
    from cryptography import x509

VALID_DAYS = 7  # ranks join within minutes, but a long run may make groups of them later
SKEW_MINUTES = 60  # the most by which hosts' clocks may differ


@dataclass(frozen=True, slots=True)
class Credentials:
    """One rank's PEM texts. They are sent only to where the generation's key is sent."""

    authority: str = field(repr=False)
    """Certificate of the launch's authority."""
    certificate: str = field(repr=False)
    """This rank's certificate."""
    private_key: str = field(repr=False)
    """This rank's private key; a secret."""

    def to_json(self) -> dict[str, str]:
        """The fields as a JSON object, for the rank's standard input."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, str]) -> Credentials:
        """The inverse of `to_json`."""
        return cls(**document)


def issue(generation: int, num_ranks: int) -> list[Credentials]:
    """Make an authority and sign one certificate for each rank of a launch; the authority's key is not kept.

    ECDSA over P-256, valid for VALID_DAYS. Takes a few milliseconds per rank.
    """
    # Only the driver needs this package; ranks do not load it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.UTC)
    authority = named(f"authority.generation-{generation}.lockstep")
    authority_key = ec.generate_private_key(ec.SECP256R1())

    def begin(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=SKEW_MINUTES))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False)
        )

    def pem(certificate: x509.Certificate) -> str:
        return certificate.public_bytes(serialization.Encoding.PEM).decode()

    root = (
        begin(authority, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    issued = []
    for rank in range(num_ranks):
        key, name = ec.generate_private_key(ec.SECP256R1()), name_of(rank, generation)
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            begin(named(name), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(purposes, critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        issued.append(Credentials(pem(root), pem(certificate), secret.decode()))
    return issued


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        **dict.fromkeys((*others, "encipher_only", "decipher_only"), False),
    )


def name_of(rank: int, generation: int) -> str:
    """The host name in the certificate of a rank."""
    return f"rank-{rank}.generation-{generation}.lockstep"


def leaves_host(sock: socket.socket) -> bool:
    """Whether a TCP connection goes to another host: its two ends then have different addresses.

    Both sides see the same pair, so both decide alike; the kernel drops packets from outside with a local source
    address. (Behind address translation the sides may decide differently: then the handshake fails, and nothing leaks.)
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return bool(sock.getsockname()[0] != sock.getpeername()[0])


class Tls:
    """Wraps the connections of one rank that leave its host."""

    def __init__(self, credentials: Credentials, generation: int) -> None:
        self._generation = generation
        self._calling = _context(ssl.PROTOCOL_TLS_CLIENT, credentials)
        self._listening = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
        self._listening.num_tickets = 0  # no session is resumed, and a caller that never reads would block on them

    def call(self, sock: socket.socket, peer: int, until: float) -> socket.socket:
        """The caller's side: returns the wrapped socket, or `sock` itself if the peer is on this host.

        Raises HandshakeError unless the listener's certificate is that of rank `peer`, before monotonic `until`.
        """
        if not leaves_host(sock):
            return sock
        name = name_of(peer, self._generation)
        return _shake(self._calling.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False), until)

    def answer(self, sock: socket.socket, until: float) -> socket.socket:
        """The listener's side; `check_caller` checks the caller once it has sent its rank."""
        if not leaves_host(sock):
            return sock
        return _shake(self._listening.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), until)

    def check_caller(self, sock: socket.socket, rank: int) -> None:
        """Raise HandshakeError unless the certificate shown on `sock` is that of `rank` in this generation."""
        if not isinstance(sock, ssl.SSLSocket):
            return
        shown = sock.getpeercert() or {}
        names = [value for pair in shown.get("subjectAltName", ()) for value in pair[1:]]
        if names != [name_of(rank, self._generation)]:
            raise HandshakeError(f"it says rank {rank}, and its certificate says {', '.join(map(str, names))}")


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credentials.authority)
    with _as_file(credentials.certificate + credentials.private_key) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """A path to `text`, in memory where the system can: ssl reads a private key only from a file."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("lockstep-certificate", os.MFD_CLOEXEC)
        try:
            os.write(file, text.encode())
            yield f"/proc/self/fd/{file}"
        finally:
            os.close(file)
        return
    with tempfile.NamedTemporaryFile() as named:  # mode 0600
        named.write(text.encode())
        named.flush()
        yield named.name


def _shake(sock: ssl.SSLSocket, until: float) -> ssl.SSLSocket:
    try:
        sock.settimeout(max(0.001, until - time.monotonic()))
        sock.do_handshake()
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        sock.close()
        raise DrivenOutError("it closed the connection during the TLS handshake") from error
    except (ssl.SSLError, ssl.CertificateError) as error:
        sock.close()
        raise HandshakeError(f"no TLS with it: {error.reason or error}") from error
    except OSError:
        sock.close()
        raise
    return sock
