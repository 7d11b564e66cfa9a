"""The table of ways to exchange: what each refuses, the page, and how one is added."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from types import ModuleType
from typing import Any, cast

import pytest

from lockstep.process.installed import ROOT
from lockstep.storage.errors import ConfigError
from lockstep.training import ways
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.strategies.every_step import Exchanging, exchanging
from lockstep.training.strategies.local_steps import Meetings
from lockstep.training.ways import EVERY_STEP, WAYS, Refused, Way, table, way_of

PLAIN = TrainConfig(datasets=("d",), run="r", model="m", num_ranks=2, global_batch=8, epochs=1)
ASKS: dict[str, dict[str, Any]] = {
    "--delay": {"delay": 1},
    "--sync-every": {"sync_every": 4},
    "--strategy async": {"strategy": "async", "staleness": 2},
    "--strategy parameter-server": {"strategy": "parameter-server", "staleness": 2, "servers": 1},
    "--strategy federated": {"strategy": "federated", "clients": "user"},
    "--strategy mirrored": {"strategy": "mirrored", "num_ranks": 1},
    "--strategy multi-worker-mirrored": {"strategy": "multi-worker-mirrored", "trust_network": "lo"},
}
WRONG: dict[str, dict[str, Any]] = {
    "canonical": {"canonical": True},
    "micro_batches": {"micro_batches": 2},
    "precision": {"precision": "mixed_float16"},
    "non_finite": {"non_finite": "skip"},
    "backend": {"backend": "nccl", "trust_network": "lo"},
    "delay": {"delay": 1},
    "sync_every": {"sync_every": 4},
    "compression": {"compression": "int8"},
    "batchnorm": {"batchnorm": "sync"},
    "elastic": {"min_ranks": 1},
    "shard_embeddings": {"shard_embeddings": 0},
}
PAIRS = [(way, refused) for way in WAYS for refused in way.refuses]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_configuration_asks_for_one_way(way: Way) -> None:
    config = replace(PLAIN, **ASKS[way.name])
    assert [each.name for each in WAYS if each.asked(config)] == [way.name] and way_of(config) is way


def test_without_a_flag_ranks_add_gradients_in_each_step_as_where_one_does_nothing() -> None:
    assert way_of(PLAIN) is EVERY_STEP
    assert way_of(replace(PLAIN, strategy="async", staleness=0)) is EVERY_STEP
    assert way_of(replace(PLAIN, strategy="async", staleness=2, num_ranks=1)) is EVERY_STEP


@pytest.mark.parametrize(("way", "refused"), PAIRS, ids=[f"{way.name}, {each.field}" for way, each in PAIRS])
def test_a_configuration_with_what_a_way_refuses_is_refused_by_name(way: Way, refused: Refused) -> None:
    asks, wrong = ASKS[way.name], WRONG[refused.field]
    if way.name == "--strategy mirrored" and refused.field == "elastic":
        wrong = {"max_ranks": 2}
    with pytest.raises(ConfigError) as caught:
        replace(PLAIN, **{**asks, **wrong})
    said = refused.flag.format(wrong.get(refused.field, ""))
    assert f"with {said}{refused.why}" in caught.value.allowed and f"`{way.field}`" in caught.value.what


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    rows = [f"| {way} | {refuses} |" for way, refuses in table()]
    assert "| way | refuses |\n| --- | --- |\n" + "\n".join(rows) + "\n" in page
    known = {field.name for field in fields(TrainConfig)} | {"elastic"}
    assert {each.field for _, each in PAIRS} <= known


def test_a_new_way_is_one_entry_and_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rare(Meetings):
        """Ranks meet twice as rarely."""

    module = ModuleType("lockstep.training.strategies.rare")
    module.WAY = Rare  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    asked = Way("--seed 7", "seed", "another one", lambda config: config.seed == 7, "rare", (ways.CANONICAL,))
    monkeypatch.setattr("lockstep.training.ways.WAYS", (*WAYS, asked))
    monkeypatch.setattr("lockstep.training.config.WAYS", (*WAYS, asked))
    context = cast(RankContext, None)
    assert type(exchanging(replace(PLAIN, seed=7), context)) is Rare
    assert type(exchanging(PLAIN, context)) is Exchanging
    with pytest.raises(ConfigError, match="another one with --canonical"):
        replace(PLAIN, seed=7, canonical=True)
