"""Several hosts on this machine: network namespaces on one switch, each with a link of a stated rate.

    with Hosts(4) as hosts:
        run_hosts(hosts, RankTask("module:entry"), 4)          # tests.network.run_hosts: as run_local, but over hosts
        hosts.popen(2, ["iperf3", "-s"])                       # any command on host 2
        with hosts.inside(1): socket.create_connection(...)    # this thread's sockets and processes on host 1

Host i has eth0 with 10.77.0.(i + 1), whose sending tc's tbf limits, and aaa0 with 10.66.0.(i + 1), which leads nowhere
though it stands first in every list. The driver is at 10.77.0.254, on the switch itself, unlimited, and at 10.66.0.254,
which no host reaches.

A namespace is held by a file descriptor of this process alone, so all of it is gone when the process ends, however it
ends: nothing has a name that another run could meet. Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN), `ip` and `tc`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any

CLONE_NEWNET = 0x40000000
DRIVER = -1  # in place of a host's number
BURST_BYTES = 256 << 10  # the kernel hands over up to 64 KiB at once: a smaller bucket would cut each of those
QUEUE_MS = 20
TOOLS = ("ip", "tc")

_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """What this machine lacks for namespaces, in words; None where they work."""
    if sys.platform != "linux":
        return f"no network namespaces on {sys.platform}"
    missing = [tool for tool in TOOLS if _path_of(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing (iproute2)"
    try:
        with Hosts(1):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return f"no network namespace can be made here ({told.strip().splitlines()[0]})"


class Hosts:
    """`count` hosts; used as a context manager, which ends the processes that it started."""

    def __init__(self, count: int, *, rate_bits_s: int = 10**9, delay_ms: float = 0.0) -> None:
        self.addresses = [f"10.77.0.{host + 1}" for host in range(count)]
        self.wrong_addresses = [f"10.66.0.{host + 1}" for host in range(count)]
        self.driver_address, self.wrong_driver_address = "10.77.0.254", "10.66.0.254"
        self.notes: list[str] = []
        """What was asked for and this kernel cannot do; to be shown beside every result."""
        self._rate_bits_s, self._delay_ms = rate_bits_s, delay_ms
        self._spaces: list[int] = []  # file descriptors; the last one is the switch's
        self._processes: list[subprocess.Popen[Any]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            stack.callback(self._end)
            for _ in range(len(self.addresses) + 1):
                self._spaces.append(_new_namespace())
            self._lay()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Sockets made and processes started by this thread belong to `host` (or DRIVER) until the block ends."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(self._spaces[host], CLONE_NEWNET), "setns")
            try:
                yield
            finally:
                _check(_libc.setns(home, CLONE_NEWNET), "setns")
        finally:
            os.close(home)

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on `host`, killed at the end if it still runs."""
        with self.inside(host):
            process = subprocess.Popen(argv, **options)
        self._processes.append(process)
        return process

    def set_link(self, host: int, *, up: bool) -> None:
        """Pull or plug the cable of `host` at the switch: the host itself is told nothing."""
        self._ip(DRIVER, f"link set h{host} {'up' if up else 'down'}")

    def set_rate(self, host: int, rate_bits_s: int) -> None:
        """From now on, `host` sends at this rate."""
        self._shape(host, "change", rate_bits_s)

    def _shape(self, host: int, verb: str, rate_bits_s: int) -> None:
        shape = f"tbf rate {rate_bits_s} burst {BURST_BYTES} latency {QUEUE_MS}ms"
        self._tool(host, ["tc", "qdisc", verb, "dev", "eth0", "root", "handle", "1:", *shape.split()])

    def _lay(self) -> None:
        switch = ["link add sw0 type bridge", f"addr add {self.driver_address}/24 dev sw0", "link set sw0 up"]
        switch += ["link add aaa0 type veth peer name aaa1", f"addr add {self.wrong_driver_address}/24 dev aaa0"]
        switch += ["link set aaa0 up", "link set aaa1 up"]
        for host, space in enumerate(self._spaces[:-1]):
            switch += [
                f"link add h{host} type veth peer name eth0 netns /proc/{os.getpid()}/fd/{space}",
                f"link set h{host} master sw0",
                f"link set h{host} up",
            ]
        self._ip(DRIVER, *switch)
        for host, (right, wrong) in enumerate(zip(self.addresses, self.wrong_addresses, strict=True)):
            self._ip(
                host,
                "link add aaa0 type veth peer name aaa1",  # a cable whose other end nobody holds
                f"addr add {wrong}/24 dev aaa0",
                f"addr add {right}/24 dev eth0",
                *(f"link set {name} up" for name in ("lo", "aaa0", "aaa1", "eth0")),
            )
            self._shape(host, "add", self._rate_bits_s)
            if self._delay_ms:
                self._delay(host)

    def _delay(self, host: int) -> None:
        try:
            delay = f"netem delay {self._delay_ms}ms limit 10000".split()
            self._tool(host, ["tc", "qdisc", "add", "dev", "eth0", "parent", "1:", *delay])
        except subprocess.CalledProcessError as error:
            note = f"no delay: this kernel has no netem ({error.stderr.strip()})"
            self.notes = [note]

    def _ip(self, host: int, *commands: str) -> None:
        self._tool(host, ["ip", "-batch", "-"], "\n".join(commands) + "\n")

    def _tool(self, host: int, argv: list[str], text: str | None = None) -> None:
        with self.inside(host):
            subprocess.run(
                [_path_of(argv[0]) or argv[0], *argv[1:]],
                input=text,
                check=True,
                capture_output=True,
                text=True,
                timeout=30,
            )

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for space in self._spaces:
            with suppress(OSError):
                os.close(space)
        self._spaces.clear()


def _path_of(tool: str) -> str | None:
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _new_namespace() -> int:
    """A file descriptor that keeps a new network namespace alive; made in a thread, which leaves ours as it was."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            _check(_libc.unshare(CLONE_NEWNET), "unshare")
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _check(code: int, call: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
