"""All-reduce between processes of this host: our ring against a naive one, taken in turns.

    python -m benchmarks.all_reduce [--ranks 2] [--rounds 5] [--mb 1 16 100]

Prints MB/s (10^6 bytes of the buffer by the time of the slowest rank) as median (lowest to highest of the rounds). The
naive ring is the usual first one: each half sent whole by a thread with sendall while the other comes in, then added;
no checksum, no deadline, no authentication. It is written for two ranks and left out for more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import threading
import time
from typing import Any

import numpy as np

from training.comm.tcp import connect_ring

KEY = b"b" * 32


class NaiveRing:
    """Two ranks, blocking sockets, whole halves."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self._sock, self._rank = sock, rank
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def all_reduce(self, buf: np.ndarray) -> None:
        """Sum in place."""
        halves = np.array_split(buf, 2)
        mine, other = halves[self._rank], halves[1 - self._rank]
        incoming = np.empty_like(mine)
        self._exchange(other, incoming)
        mine += incoming
        self._exchange(mine, other)

    def _exchange(self, out: np.ndarray, into: np.ndarray) -> None:
        sender = threading.Thread(target=self._sock.sendall, args=(out.data,))
        sender.start()
        view = memoryview(into).cast("B")
        while view:
            view = view[self._sock.recv_into(view) :]
        sender.join()


def rank_main(rank: int, ranks: int, pipe: Any, sizes: list[float], rounds: int) -> None:
    """One process: join, then take turns."""

    def rendezvous(host: str, port: int) -> list[tuple[str, int]]:
        pipe.send((host, port))
        table: list[tuple[str, int]] = pipe.recv()
        return table

    ring = connect_ring(rank, ranks, 1, rendezvous, KEY, 30, "127.0.0.1", 120)
    kinds: dict[str, Any] = {"ring": ring}
    if ranks == 2:
        kinds["naive"] = NaiveRing(_pair(rank, rendezvous), rank)
    for mb in sizes:
        buf = np.zeros(int(mb * 1e6) // 4, np.float32)
        repeats = max(3, int(100 / max(mb, 1)))
        for _ in range(rounds):
            for name, kind in kinds.items():
                kind.all_reduce(buf)  # warm
                ring.barrier()
                began = time.perf_counter()
                for _ in range(repeats):
                    kind.all_reduce(buf)
                seconds = np.array([(time.perf_counter() - began) / repeats])
                ring.all_reduce(seconds, "max")
                pipe.send((name, mb, buf.nbytes / 1e6 / float(seconds[0])))
    pipe.send(None)
    ring.close()


def _pair(rank: int, rendezvous: Any) -> socket.socket:
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            rendezvous("127.0.0.1", listener.getsockname()[1])
            sock, _ = listener.accept()
            return sock
    (host, port), _ = rendezvous("127.0.0.1", 0)
    return socket.create_connection((host, port))


def exchange_tables(pipes: list[Any]) -> None:
    """Give every rank the addresses of all."""
    table = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=float, nargs="+", default=[0.001, 1, 16, 100])
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(args.ranks)]
    processes = [
        context.Process(target=rank_main, args=(rank, args.ranks, pipes[rank][1], args.mb, args.rounds))
        for rank in range(args.ranks)
    ]
    for process in processes:
        process.start()
    ours = [pipe for pipe, _ in pipes]
    for _ in range(2 if args.ranks == 2 else 1):
        exchange_tables(ours)
    found: dict[tuple[str, float], list[float]] = {}
    for pipe in ours:
        while (row := pipe.recv()) is not None:
            found.setdefault((row[0], row[1]), []).append(row[2])
    for process in processes:
        process.join()
    print(f"{args.ranks} ranks, {os.cpu_count()} cores, float32, {args.rounds} rounds; MB/s median (lowest to highest)")
    for (name, mb), values in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        print(f"{mb:>8g} MB  {name:<6} {statistics.median(values):8.1f}  ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
