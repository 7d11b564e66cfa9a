"""All-reduce of float32 sums between two processes of this host: this project against its peers, in turns.

    python -m benchmarks.all_reduce [--peers FOLDER] [--torch PYTHON] [--jax PYTHON] [--mpi PYTHON] [--rounds 5]
                                    [--kib 4 1024 4096 16384 65536]

This project: shared memory in buffers of `allocate` (shm) and in any array (shm-any), and TCP. TensorFlow's gRPC ring
is in the project's environment. PyTorch's gloo, JAX's gloo and MPICH (mpich and mpi4py of PyPI) run in the given
interpreters; --peers creates one environment in FOLDER with JAX, MPICH and PyTorch (with its CUDA libraries, some
gigabytes; Debian's python3-torch with --torch /usr/bin/python3 works, too). Missing peers are named.

The limit of the memory (bound-sum, bound-copy): two processes that move as many bytes without any exchange. All figures
are microseconds for a call, of the slower rank: median (lowest to highest) of the rounds; `x shm` is the median of the
rounds' ratios to shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RANKS = 2
PINS = ["jax==0.9.2", "mpich==5.0.2", "mpi4py==4.1.2", "torch"]
REPEATS_BYTES = 128 << 20  # of one turn, within the limits below
MIN_REPEATS, MAX_REPEATS = 2, 300
WAIT_S = 120


class Contestant:
    """The processes of one contestant, idle on their stdin between turns."""

    def __init__(self, name: str, commands: list[list[str]]) -> None:
        self.name = name
        env = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        self.processes = [subprocess.Popen(c, stdin=pipe, stdout=pipe, stderr=pipe, env=env) for c in commands]

    def answers(self) -> list[Any]:
        """A line of each process; other lines than JSON are a library's chatter."""
        return [self._answer(process) for process in self.processes]

    def _answer(self, process: subprocess.Popen[bytes]) -> Any:
        assert process.stdout is not None and process.stderr is not None
        while line := process.stdout.readline():
            try:
                return json.loads(line)
            except ValueError:
                continue
        words = process.stderr.read().decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"{self.name} ended: {words[-1] if words else 'without a word'}")

    def turn(self, size: int, repeats: int) -> float:
        """Seconds a call."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{size} {repeats}\n".encode())
            process.stdin.flush()
        return float(max(self.answers()))

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_ports(count: int) -> list[str]:
    """Free TCP ports of this host."""
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(sock.getsockname()[1]) for sock in socks]
    for sock in socks:
        sock.close()
    return ports


def commands(args: argparse.Namespace, folder: str) -> dict[str, list[list[str]] | str]:
    """Each contestant's command lines, or why it has none."""
    found: dict[str, list[list[str]] | str] = {}
    for kind in ("shm", "shm-any", "tcp", "tensorflow", "bound-sum", "bound-copy"):
        place = Path(folder, kind)
        place.mkdir()
        worker = [sys.executable, str(HERE / "peers" / "all_reduce_worker.py"), kind]
        ports = free_ports(RANKS)
        found[kind] = [[*worker, str(rank), str(place), *ports] for rank in range(RANKS)]
    for kind, python in (("torch", args.torch), ("jax", args.jax)):
        (port,) = free_ports(1)
        script = str(HERE / "peers" / f"{kind}_peer.py")
        found[kind] = [[python, script, str(r), port] for r in range(RANKS)] if python else f"no --{kind} or --peers"
    if args.mpi:
        mpiexec = str(Path(args.mpi).parent / "mpiexec")
        found["mpich"] = [[mpiexec, "-n", str(RANKS), args.mpi, str(HERE / "peers" / "mpich_peer.py")]]
    else:
        found["mpich"] = "no --mpi or --peers"
    return found


def start(args: argparse.Namespace, folder: str) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Start the contestants: return those that came up, and why the others did not."""
    up: dict[str, Contestant] = {}
    absent: dict[str, str] = {}
    for name, lines in commands(args, folder).items():
        if isinstance(lines, str):
            absent[name] = lines
            continue
        try:
            contestant = Contestant(name, lines)
            print(f"{name}: {contestant.answers()[0]}", flush=True)
            up[name] = contestant
        except (OSError, RuntimeError) as error:
            absent[name] = str(error)
    return up, absent


def make_peers(folder: Path) -> str:
    """An interpreter with all peers, installed once."""
    python = str(folder / "bin" / "python")
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINS], check=True)
    return python


def measure(up: dict[str, Contestant], size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a call by contestant, one figure for each round, in rotating order."""
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, REPEATS_BYTES // size // 4))
    names = list(up)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(up[name].turn(size, repeats))
    return found


def report(size: int, found: dict[str, list[float]]) -> None:
    """Print one size."""
    print(f"\n{size >> 10} KiB")
    for name, seconds in sorted(found.items(), key=lambda item: statistics.median(item[1])):
        middle = statistics.median(seconds)
        ratio = statistics.median(a / b for a, b in zip(seconds, found["shm"], strict=True))
        spread = f"({min(seconds) * 1e6:.0f} to {max(seconds) * 1e6:.0f})"
        print(f"  {name:<12} {middle * 1e6:10.0f} {spread:<24} {size / middle / 1e9:6.2f} GB/s   {ratio:7.2f} x shm")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--torch")
    parser.add_argument("--jax")
    parser.add_argument("--mpi")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 1 << 10, 4 << 10, 16 << 10, 64 << 10])
    args = parser.parse_args()
    if args.peers:
        python = make_peers(args.peers.absolute())
        args.torch, args.jax, args.mpi = args.torch or python, args.jax or python, args.mpi or python
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Linux {platform.release()}, Python {platform.python_version()}"
    )
    with tempfile.TemporaryDirectory() as folder:
        up, absent = start(args, folder)
        try:
            for name, why in absent.items():
                print(f"not measured: {name} ({why})")
            print(f"two processes, float32 sum, {args.rounds} rounds in turns; microseconds a call")
            for kib in args.kib:
                report(kib << 10, measure(up, kib << 10, args.rounds))
        finally:
            for contestant in up.values():
                contestant.close()


if __name__ == "__main__":
    main()
