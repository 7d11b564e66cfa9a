"""Certificates of one launch: who gets through the TLS handshake of a rank and who does not; then how bytes travel.

127.0.0.2 is called from 127.0.0.1: two addresses, so to the code under test a connection between two hosts.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from lockstep.jobs._train import config_of
from lockstep.jobs.train import parser
from lockstep.storage.errors import ConfigError
from lockstep.training.comm.auth import HandshakeError
from lockstep.training.comm.tcp.link import held, receive_some, send_some
from lockstep.training.comm.tls import VALID_DAYS, Credentials, Tls, issue, leaves_host, name_of
from lockstep.training.config import TrainConfig
from lockstep.training.control.task import Limits, RankTask
from lockstep.training.launch.barrier import SuperviseOnTask
from lockstep.training.launch.process import Order, SupervisorSpec
from lockstep.training.world import World
from tests.docs.test_flags import JOBS, flags_of

GENERATION = 7
LAUNCH = issue(GENERATION, 3)
OTHER_LAUNCH = issue(GENERATION, 3)  # the same generation and ranks, another authority
OLD = issue(GENERATION - 1, 3)
NUMBERS = {"num_ranks": 1, "global_batch": 1, "epochs": 1}


def connection(listening: str = "127.0.0.2") -> tuple[socket.socket, socket.socket]:
    """(caller's end, listener's end)."""
    with socket.create_server((listening, 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        return caller, listener.accept()[0]


def shake(
    call: Callable[[socket.socket], socket.socket], answer: Callable[[socket.socket], socket.socket]
) -> list[socket.socket | BaseException]:
    """What became of the caller's and the listener's end."""

    def one(side: Callable[[socket.socket], socket.socket], sock: socket.socket) -> socket.socket | BaseException:
        try:
            return side(sock)
        except (HandshakeError, OSError) as error:
            sock.close()
            return error

    with ThreadPoolExecutor(2) as pool:
        ends = zip((call, answer), connection(), strict=True)
        return [future.result(120) for future in [pool.submit(one, side, sock) for side, sock in ends]]


def rank(credentials: Credentials, generation: int = GENERATION) -> Tls:
    return Tls(credentials, generation)


def soon() -> float:
    return time.monotonic() + 120


def as_listener(credentials: Credentials, caller: int) -> Callable[[socket.socket], socket.socket]:
    """Rank 0, to which the caller says that it is rank `caller`."""

    def answer(sock: socket.socket) -> socket.socket:
        wrapped = rank(credentials).answer(sock, soon())
        try:
            rank(credentials).check_caller(wrapped, caller)
        except HandshakeError:
            wrapped.close()
            raise
        return wrapped

    return answer


def test_two_ranks_of_a_launch_get_through() -> None:
    ends = shake(lambda s: rank(LAUNCH[2]).call(s, 0, soon()), as_listener(LAUNCH[0], 2))
    caller, listener = ends
    assert isinstance(caller, ssl.SSLSocket) and isinstance(listener, ssl.SSLSocket)
    assert caller.version() == listener.version() == "TLSv1.3"
    caller.close()
    listener.close()


def plain_caller(sock: socket.socket) -> socket.socket:
    sock.sendall(b"LOCKSTP2" + bytes(200))
    sock.settimeout(120)
    sock.recv(100)
    return sock


def bare(version: ssl.TLSVersion) -> Callable[[socket.socket], socket.socket]:
    """A stranger who speaks TLS, shows no certificate and believes everything."""

    def call(sock: socket.socket) -> socket.socket:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = version
        sock.settimeout(120)
        return context.wrap_socket(sock)

    return call


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (plain_caller, "no TLS"),
        (bare(ssl.TLSVersion.TLSv1_3), "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        (bare(ssl.TLSVersion.TLSv1_2), "UNSUPPORTED_PROTOCOL"),
        (lambda s: rank(OLD[2], GENERATION - 1).call(s, 0, soon()), "no TLS"),  # it finds out first and says so
        (lambda s: rank(OTHER_LAUNCH[2]).call(s, 0, soon()), "no TLS"),
        (lambda s: rank(LAUNCH[1]).call(s, 0, soon()), "says rank 2, and its certificate says rank-1"),
    ],
)
def test_callers_who_are_refused(call: Callable[[socket.socket], socket.socket], words: str) -> None:
    caller, listener = shake(call, as_listener(LAUNCH[0], 2))
    assert isinstance(listener, HandshakeError) and words in str(listener)
    if isinstance(caller, socket.socket):
        caller.close()


@pytest.mark.parametrize(
    "answer",
    [
        lambda s: Tls(LAUNCH[1], GENERATION).answer(s, soon()),  # a rank of this launch, but not the one called
        lambda s: Tls(OTHER_LAUNCH[0], GENERATION).answer(s, soon()),
        lambda s: Tls(OLD[0], GENERATION - 1).answer(s, soon()),
        lambda s: s.sendall(b"x" * 100) or s,  # does not speak TLS
    ],
)
def test_listeners_who_are_refused(answer: Callable[[socket.socket], socket.socket]) -> None:
    caller, listener = shake(lambda s: rank(LAUNCH[2]).call(s, 0, soon()), answer)
    assert isinstance(caller, HandshakeError) and "no TLS" in str(caller)
    if isinstance(listener, socket.socket):
        listener.close()


def test_a_caller_who_says_nothing_is_given_up_at_the_deadline() -> None:
    caller, listener = connection()
    with caller, pytest.raises(TimeoutError):
        rank(LAUNCH[0]).answer(listener, time.monotonic() + 0.2)


def test_within_a_host_nothing_is_wrapped() -> None:
    caller, listener = connection("127.0.0.1")
    with caller, listener:
        assert not leaves_host(caller) and not leaves_host(listener)
        assert rank(LAUNCH[1]).call(caller, 0, soon()) is caller
        assert rank(LAUNCH[0]).answer(listener, soon()) is listener
        rank(LAUNCH[0]).check_caller(listener, 1)  # nothing to compare: the key alone proves
    ends = socket.socketpair()
    assert not any(map(leaves_host, ends))
    for end in ends:
        end.close()


def test_certificates_are_bound_and_short_lived() -> None:
    for number, credentials in enumerate(LAUNCH):
        found = x509.load_pem_x509_certificate(credentials.certificate.encode())
        names = found.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
        assert isinstance(names, x509.SubjectAlternativeName)
        assert names.get_values_for_type(x509.DNSName) == [name_of(number, GENERATION)]
        assert (found.not_valid_after_utc - found.not_valid_before_utc).days == VALID_DAYS
        constraints = found.extensions.get_extension_for_class(x509.BasicConstraints).value
        assert not constraints.ca  # a rank cannot make ranks
    assert len({credentials.private_key for credentials in LAUNCH}) == 3


def open_files() -> set[str]:
    """Files and memory files that this process holds; sockets and pipes of other threads come and go."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("/") and not name.startswith("/proc/")}


def test_the_private_key_is_in_no_text_and_no_file_stays() -> None:
    assert "BEGIN" not in repr(LAUNCH[0]) and "PRIVATE" in LAUNCH[0].private_key  # nor a certificate
    assert Credentials.from_json(LAUNCH[0].to_json()) == LAUNCH[0]
    before = open_files()
    rank(LAUNCH[0])
    assert open_files() <= before


@pytest.mark.parametrize("tls", [False, True])
def test_bytes_arrive_whole_and_in_order(tls: bool) -> None:
    """More than all buffers hold, in parts of odd sizes, with one thread for both ends."""
    if tls:
        ends = shake(lambda s: rank(LAUNCH[2]).call(s, 0, soon()), as_listener(LAUNCH[0], 2))
        assert all(isinstance(end, ssl.SSLSocket) for end in ends)
        caller, listener = (end for end in ends if isinstance(end, socket.socket))
    else:
        caller, listener = connection()
    with caller, listener:
        for end in (caller, listener):
            end.setblocking(False)
        sent = os.urandom(5_000_003)
        left, into = memoryview(sent), bytearray(len(sent))
        free = memoryview(into)
        waits = 0
        while free:
            if left:
                cut = len(left) % 40_000 or 36  # a header's size now and then
                left = left[send_some(caller, [left[:cut], left[cut:]]) :]
            count = receive_some(listener, [free[:100_001], free[100_001:]])
            if count is None:
                assert not held(listener)
                waits += not left and not select.select([listener], [], [], 120)[0]
                assert waits == 0
            else:
                assert count > 0
                free = free[count:]
        assert into == sent
        caller.close()
        while (count := receive_some(listener, [memoryview(bytearray(10))])) is None:
            select.select([listener], [], [], 5)
        assert count == 0


def test_an_order_tells_no_secret() -> None:
    """Python and Spark write such objects into logs and errors."""
    key = b"a secret of the generation 123456"
    place = ("127.0.0.1", 1)
    order = Order(RankTask("a:b"), World.local(0, 1), "host", place, key, Limits(), tls=LAUNCH[0])
    stage = SuperviseOnTask(place, key, Limits(), [()] * 3)
    post = SupervisorSpec(0, ("host",), place, key, Limits())
    for text in (repr(order), repr(stage), repr(post), str(order)):
        assert "secret" not in text and "BEGIN" not in text
    assert "Credentials()" in repr(order)


def test_the_production_profile_turns_it_on() -> None:
    numbers = ["--num-ranks=2", "--global-batch=8", "--epochs=1"]
    call = ["--dataset=d", "--run=r", "--model=logistic", *numbers]
    assert config_of(parser().parse(call)).ranks.tls == "off"
    assert config_of(parser().parse([*call, "--config", "conf/production.toml"])).ranks.tls == "on"
    tables = tomllib.loads(Path("conf/production.toml").read_text())
    with_tls = {job for job in JOBS if "--tls" in flags_of(job)}
    assert tables == {job: {"tls": "on"} for job in with_tls}
    with pytest.raises(ConfigError, match="tls"):
        TrainConfig(datasets=["d"], run="r", model="m", tls="yes", **NUMBERS)  # type: ignore[arg-type]  # not a switch
