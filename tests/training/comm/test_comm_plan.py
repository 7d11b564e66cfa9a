"""Layouts of hosts, plans and how a run freezes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage.errors import CommunicationError, ConfigError, CorruptionError, DataError
from lockstep.storage.fs import filesystem
from lockstep.training.comm.comm_plan import CommPlan, make_plan
from lockstep.training.comm.cost import COUNTS, LARGEST_BYTES, AlgorithmCosts, LinkCosts
from lockstep.training.comm.hosts import Layout, host_identity
from lockstep.training.comm.options import CommOptions
from lockstep.training.run.comm_plans import freeze_plan, read_plans
from lockstep.training.run.lineage import SupersededError, claim_next
from lockstep.training.run.paths import RunPaths

SLOW = AlgorithmCosts(dict.fromkeys(COUNTS, LinkCosts(alpha_s=1e-4, beta_s_per_byte=1e-8, gamma_s_per_byte=1e-10)))
FAST = LinkCosts(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=1e-10)


@pytest.mark.parametrize(
    ("identities", "host_of", "said"),
    [
        (["a", "a", "a"], (0, 0, 0), "3 ranks on 1 host"),
        (["b", "a", "b"], (0, 1, 0), "3 ranks on 2 hosts (2, 1)"),  # numbered by first rank, not by name
        (["", "", "x"], (0, 1, 2), "3 ranks on 3 hosts (1, 1, 1)"),  # who cannot tell shares with nobody
    ],
)
def test_layouts(identities: list[str], host_of: tuple[int, ...], said: str) -> None:
    layout = Layout.of(identities)
    assert (layout.host_of, str(layout)) == (host_of, said)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=20))
def test_every_rank_is_on_one_host(identities: list[str]) -> None:
    layout = Layout.of(identities)
    assert sorted(rank for ranks in layout.hosts for rank in ranks) == list(range(len(identities)))
    leaders = [ranks[0] for ranks in layout.hosts]
    assert leaders == sorted(leaders)
    for ranks in layout.hosts:
        assert len({identities[rank] for rank in ranks}) == 1


def test_this_host_is_itself() -> None:
    assert host_identity() == host_identity() != ""


@pytest.mark.parametrize(
    ("backend", "asked", "table"),
    [
        ("shm", "auto", ()),
        ("tcp", "ring", ((LARGEST_BYTES, "ring"),)),  # forced: no costs are needed
        ("hierarchical", "hierarchical", ((LARGEST_BYTES, "hierarchical"),)),
    ],
)
def test_what_is_not_chosen_needs_no_costs(backend: str, asked: str, table: Any) -> None:
    assert make_plan(Layout((0, 0, 1)), backend, asked).table == table


def test_between_hosts_that_are_far_the_host_is_summed_up_first() -> None:
    plan = make_plan(Layout((0, 0, 0, 0, 1, 1, 1, 1)), "hierarchical", "auto", SLOW, SLOW, FAST)
    assert plan.choose(64) == plan.choose(1 << 16) == "hierarchical"


def test_few_ranks_far_apart_choose_by_size() -> None:
    plan = make_plan(Layout.apart(7), "tcp", "auto", SLOW)
    assert plan.choose(64) != "ring"
    assert plan.choose(1 << 28) == "ring"
    assert {name for _, name in plan.table} <= set(COUNTS)


costs = st.floats(0, 1e-2).map(lambda x: float(f"{x:.2g}"))
links = st.builds(LinkCosts, alpha_s=costs, beta_s_per_byte=costs, gamma_s_per_byte=costs)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=9), st.tuples(links, links, links), links)
def test_a_plan_read_back_chooses_the_same(
    identities: list[str], outer: tuple[LinkCosts, ...], inner: LinkCosts
) -> None:
    between = AlgorithmCosts(dict(zip(COUNTS, outer, strict=True)))
    plan = make_plan(Layout.of(identities), "hierarchical", "auto", between, between, inner)
    back = CommPlan.from_json(plan.to_json(), where="here")
    assert back == plan and back.key == plan.key
    for bits in range(34):
        assert back.choose(1 << bits) == plan.choose(1 << bits)


@pytest.mark.parametrize(
    "change",
    [
        {"table": [[1, "star"]]},
        {"table": [[-1, "ring"]]},
        {"backend": "nccl"},
        {"host_of": [0.5]},
        {"outer": {"alpha_s": 1}},
        {"more": 1},
    ],
)
def test_a_plan_that_is_none_is_refused(change: dict[str, Any]) -> None:
    plan = make_plan(Layout.apart(2), "tcp", "ring")
    with pytest.raises(DataError, match="here"):
        CommPlan.from_json({**plan.to_json(), **change}, where="here")


# Options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"backend": "mpi"}, "backend"),
        ({"algorithm": "star"}, "algorithm"),
        ({"trust_network": ""}, "trust-network"),
        ({"backend": "shm", "algorithm": "ring"}, "no algorithm `ring`"),
        ({"backend": "hierarchical", "algorithm": "ring"}, "no algorithm `ring`"),
        ({"backend": "tcp", "algorithm": "hierarchical"}, "no algorithm `hierarchical`"),
    ],
)
def test_options_that_cannot_be_right(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CommOptions(**options)


def test_options_travel_as_json() -> None:
    plan = make_plan(Layout.apart(2), "tcp", "ring")
    options = CommOptions(algorithm="ring", trust_network="eth1", plans=(plan.to_json(),))
    assert CommOptions.from_json(options.to_json()).to_json() == options.to_json()
    with pytest.raises(ConfigError, match="wishes"):
        CommOptions.from_json({"wishes": 1})


# Frozen in a run


def _run(tmp_path: Path) -> tuple[Any, RunPaths]:
    paths = RunPaths(str(tmp_path))
    fs = filesystem(paths.root)
    claim_next(fs, paths, None, epochs=1, num_ranks=3)
    return fs, paths


def test_a_frozen_plan_is_read_back_for_its_number_of_ranks(tmp_path: Path) -> None:
    fs, paths = _run(tmp_path)
    assert read_plans(fs, paths, 3) == []
    plans = [make_plan(Layout(host_of), "tcp", "auto", SLOW) for host_of in ((0, 1, 2), (0, 0, 1))]
    for plan in plans:
        freeze_plan(fs, paths, 1, plan.to_json())
        freeze_plan(fs, paths, 1, plan.to_json())  # the same again: a driver that did not hear the first answer
    assert sorted(plan["host_of"] for plan in read_plans(fs, paths, 3)) == [[0, 0, 1], [0, 1, 2]]
    assert read_plans(fs, paths, 2) == []


def test_another_plan_for_the_same_ranks_is_refused(tmp_path: Path) -> None:
    fs, paths = _run(tmp_path)
    layout = Layout.apart(3)
    freeze_plan(fs, paths, 1, make_plan(layout, "tcp", "auto", SLOW).to_json())
    other = AlgorithmCosts(dict.fromkeys(COUNTS, FAST))
    with pytest.raises(CommunicationError, match="another order"):
        freeze_plan(fs, paths, 1, make_plan(layout, "tcp", "auto", other).to_json())


def test_an_older_driver_freezes_nothing(tmp_path: Path) -> None:
    fs, paths = _run(tmp_path)
    claim_next(fs, paths, None, epochs=1, num_ranks=3)
    with pytest.raises(SupersededError):
        freeze_plan(fs, paths, 1, make_plan(Layout.apart(3), "tcp", "auto", SLOW).to_json())
    assert read_plans(fs, paths, 3) == []


def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    fs, paths = _run(tmp_path)
    file = Path(freeze_plan(fs, paths, 1, make_plan(Layout.apart(3), "tcp", "auto", SLOW).to_json()))
    data = bytearray(file.read_bytes())
    data[data.index(b"ring")] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CorruptionError, match=file.name):
        read_plans(fs, paths, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_of", []),
        ("host_of", [0, 2, 1]),  # not numbered by first rank: another key for the same layout
        ("table", []),  # no algorithm at all
        ("table", [[1]]),
        ("table", [[1, "ring", 2]]),
        ("table", [[5, "ring"], [3, "ring"]]),
        ("table", [[5, "hierarchical"]]),  # which TCP alone has not
        ("leaders", [[5, "hierarchical"]]),
    ],
)
def test_what_is_no_plan_is_refused_before_it_is_followed(field: str, value: Any) -> None:
    plan = make_plan(Layout.apart(3), "tcp", "auto", SLOW).to_json()
    with pytest.raises(DataError, match=f"RUN/comm: {field}"):
        CommPlan.from_json({**plan, field: value}, where="RUN/comm")
