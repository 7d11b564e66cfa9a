"""The contract over both communicators, ranks as threads."""

from __future__ import annotations

import pytest

from tests.comm_contract import CommunicatorContract, RunRanks
from tests.training._ring import run_ring, run_solo


@pytest.mark.parametrize("num_ranks", [1])
class TestSolo(CommunicatorContract):
    @pytest.fixture
    def run_ranks(self) -> RunRanks:
        return run_solo


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
class TestTcp(CommunicatorContract):
    @pytest.fixture
    def run_ranks(self) -> RunRanks:
        return run_ring
