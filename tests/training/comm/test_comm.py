"""The contract over one rank alone and over TCP by each algorithm, ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lockstep.training.comm import Communicator, TcpCommunicator
from tests.comm_contract import CommunicatorContract, RunRanks
from tests.training._ring import run_ring, run_solo


@pytest.mark.parametrize("num_ranks", [1])
class TestSolo(CommunicatorContract):
    @pytest.fixture
    def run_ranks(self) -> RunRanks:
        return run_solo


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 7, 8])
class TestTcp(CommunicatorContract):
    """As it chooses by size."""

    @pytest.fixture
    def run_ranks(self) -> RunRanks:
        return run_ring


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling", "double-tree"])
def test_each_algorithm(algorithm: str, num_ranks: int) -> None:
    """all_reduce and reduce_scatter are what they do; the other calls do not depend on the choice."""

    def run(num_ranks: int, work: Callable[[Communicator], Any]) -> list[Any]:
        def forced(comm: Communicator) -> Any:
            assert isinstance(comm, TcpCommunicator)
            comm.choose = lambda nbytes: algorithm
            return work(comm)

        return run_ring(num_ranks, forced)

    contract = CommunicatorContract()
    contract.test_all_reduce(run, num_ranks)
    if num_ranks <= 5:
        contract.test_reduce_scatter_and_its_inverse(run, num_ranks)
    contract.test_numbers_that_are_none(run, num_ranks)
