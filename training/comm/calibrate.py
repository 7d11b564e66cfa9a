"""Measures the three costs of a communicator's links, with all ranks at work and the same result on every rank."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.training.comm.base import Communicator
from lockstep.training.comm.cost import COUNTS, AlgorithmCosts, LinkCosts
from lockstep.training.comm.tcp.communicator import TcpCommunicator

BUDGET_S, INNER_BUDGET_S = 0.4, 0.1  # all ranks, then leaders, and the faster ranks of a host: below one second in all
SMALL_BYTES = 256
LARGE_BYTES = 1 << 20
SMALL_CALLS = 8  # ranks leave a barrier one after another, which would be half the time of a single small call
DIGITS = 2  # more would be noise, and hardly change the tables
MIN_ROUNDS, MAX_ROUNDS = 3, 15


def calibrate_tcp(comm: TcpCommunicator) -> AlgorithmCosts:
    """Call `calibrate` for each algorithm that a TCP communicator has. A collective."""
    before = comm.choose
    found = {}
    for name in COUNTS:
        comm.choose = partial(_always, name)
        found[name] = calibrate(comm, BUDGET_S / len(COUNTS), name)
    comm.choose = before
    return AlgorithmCosts(found)


def calibrate(comm: Communicator, budget_s: float = BUDGET_S, algorithm: str = "ring") -> LinkCosts:
    """Measure all_reduce on `comm` (two ranks or more) for about `budget_s` seconds at most. A collective.

    alpha from a small buffer, beta from a large one, gamma from additions in memory: the median over rounds, the
    maximum over ranks. All ranks stop after the same round.
    """
    small, large = (comm.allocate(nbytes // 4, np.float32) for nbytes in (SMALL_BYTES, LARGE_BYTES))
    times: list[tuple[float, float]] = []
    began = time.perf_counter()
    comm.all_reduce(small)  # the first call of each size makes its connections and its program
    comm.all_reduce(large)
    elapsed = np.zeros(1)
    while len(times) < MIN_ROUNDS or (len(times) < MAX_ROUNDS and elapsed[0] < budget_s):
        times.append((_timed(comm, small, SMALL_CALLS), _timed(comm, large, 1)))
        elapsed[0] = time.perf_counter() - began
        comm.all_reduce(elapsed, "max")
    found = np.array([*np.median(np.array(times), axis=0), _gamma(large)])
    comm.all_reduce(found, "max")
    small_s, large_s, gamma = found.tolist()
    least, most = (COUNTS[algorithm](comm.num_ranks, nbytes) for nbytes in (SMALL_BYTES, LARGE_BYTES))
    # Two equations, the reductions known: small_s = a*m + b*bytes + g*reduced, and the same of the large buffer.
    beta = ((large_s - small_s) - gamma * (most.reduced_bytes - least.reduced_bytes)) / (most.bytes - least.bytes)
    beta = max(beta, 0.0)
    alpha = max(small_s - beta * least.bytes - gamma * least.reduced_bytes, 0.0) / least.messages
    return LinkCosts(alpha_s=_rounded(alpha), beta_s_per_byte=_rounded(beta), gamma_s_per_byte=_rounded(gamma))


def slowest(comm: Communicator, costs: LinkCosts | None) -> LinkCosts:
    """The maximum of each cost over the ranks of `comm`, of which one at least has measured. A collective."""
    found = np.array(list(costs.to_json().values()) if costs else [0.0] * 3)
    comm.all_reduce(found, "max")
    alpha, beta, gamma = found.tolist()
    return LinkCosts(alpha_s=alpha, beta_s_per_byte=beta, gamma_s_per_byte=gamma)


def _always(name: str, nbytes: int) -> str:
    return name


def _timed(comm: Communicator, buf: NDArray[Any], calls: int) -> float:
    comm.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(buf)
    return (time.perf_counter() - began) / calls


def _gamma(buf: NDArray[Any]) -> float:
    other = np.zeros_like(buf)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        np.add(buf, other, out=buf)
        times.append(time.perf_counter() - began)
    return float(np.median(times)) / buf.nbytes


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
