"""A simulated training step on more ranks than are available: compute, exchange, and the part that cannot be hidden.

A pure function of assumptions. Its figures are marked as simulated wherever they are printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.training.comm.cost import LinkCosts, fastest, hierarchical_s, predict_s
from lockstep.training.exchange.buckets import BUCKET_BYTES

BITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A part of a model in order of the forward pass: its gradient's bytes and its share of the computing."""

    name: str
    gradient_bytes: int
    work: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model's step on one rank alone."""

    name: str
    layers: tuple[Layer, ...]
    compute_s: float
    """Forward pass, backward pass and update."""
    backward_share: float = 2 / 3
    """The backward pass's share of compute_s: it is two products where the forward pass is one."""

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all layers' gradients."""
        return sum(layer.gradient_bytes for layer in self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal hosts with equal ranks."""

    num_ranks: int
    ranks_per_host: int
    outer: LinkCosts
    """Between hosts."""
    inner: LinkCosts
    """Within a host."""

    def all_reduce_s(self, nbytes: int) -> float:
        """Seconds by the hierarchical algorithm, or the fastest flat one where each host has one rank."""
        if self.num_ranks == 1:
            return 0.0
        if self.ranks_per_host == 1:
            return predict_s(fastest(self.num_ranks, nbytes, self.outer), self.num_ranks, nbytes, self.outer)
        hosts, rest = divmod(self.num_ranks, self.ranks_per_host)
        return hierarchical_s([self.ranks_per_host] * hosts + [rest] * bool(rest), nbytes, self.inner, self.outer)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """What one step takes."""

    compute_s: float
    exchange_s: float
    """Seconds of all buckets, one after another."""
    exposed_s: float
    """What is waited for after the backward pass."""

    @property
    def efficiency(self) -> float:
        """Samples a second of a rank among all, as a share of one alone."""
        return self.compute_s / (self.compute_s + self.exposed_s)


def ethernet(gbit_per_s: float, *, alpha_s: float, gamma_s_per_byte: float) -> LinkCosts:
    """A link of so many Gbit/s (10^9), full duplex, used wholly."""
    return LinkCosts(alpha_s=alpha_s, beta_s_per_byte=BITS / (gbit_per_s * 1e9), gamma_s_per_byte=gamma_s_per_byte)


def simulate(workload: Workload, cluster: Cluster, bucket_bytes: int = BUCKET_BYTES) -> SimulatedStep:
    """One step with overlap: a bucket leaves when its last gradient is there and the one before it is done.

    Every rank computes equally fast; no rank is late, no packet is lost. Real clusters are slower by that.
    """
    exchange_s, free_at = 0.0, 0.0
    for ready_at, nbytes in _buckets(workload, bucket_bytes):
        seconds = cluster.all_reduce_s(nbytes)
        exchange_s += seconds
        free_at = max(free_at, ready_at) + seconds
    exposed_s = max(0.0, free_at - workload.compute_s) if cluster.num_ranks > 1 else 0.0
    return SimulatedStep(compute_s=workload.compute_s, exchange_s=exchange_s, exposed_s=exposed_s)


def _buckets(workload: Workload, bucket_bytes: int) -> Sequence[tuple[float, int]]:
    """(seconds since the step began, bytes) of each bucket: gradients come in reverse order, evenly within a layer."""
    backward_s = workload.compute_s * workload.backward_share
    now_s = workload.compute_s - backward_s
    work = sum(layer.work for layer in workload.layers)
    filled, buckets = 0, []
    for layer in reversed(workload.layers):
        layer_s, left = backward_s * layer.work / work, layer.gradient_bytes
        while filled + left >= bucket_bytes:
            taken = bucket_bytes - filled
            left, filled = left - taken, 0
            done = 1 - left / layer.gradient_bytes
            buckets.append((now_s + layer_s * done, bucket_bytes))
        filled += left
        now_s += layer_s
    if filled:
        buckets.append((now_s, filled))
    return buckets
