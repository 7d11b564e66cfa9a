"""Three ranks on two hosts: who shares a host is found out, memory is shared there, TLS covers what leaves it."""

from __future__ import annotations

import pytest

from lockstep.training.control.task import RankTask
from tests.network.hosts import Hosts
from tests.network.run_hosts import run_hosts

pytestmark = pytest.mark.slow


def test_ranks_of_a_host_share_memory_and_their_leaders_talk() -> None:
    with Hosts(2) as hosts:
        found = run_hosts(hosts, RankTask("tests.network.two_level_ranks:sums", tls=True), 3)
    assert found == [found[0]] * 3  # the same choice and the same bits on every rank
    for asked in ("auto", "hierarchical"):
        assert (found[0][asked]["backend"], found[0][asked]["host_of"]) == ("hierarchical", [0, 0, 1])
    assert found[0]["hierarchical"]["algorithm"] == "hierarchical"
