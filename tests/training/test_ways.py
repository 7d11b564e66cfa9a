"""The ways to exchange: what each refuses, whose options it has, the page, and how a way and an option are added."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, ClassVar, cast

import pytest

from lockstep.jobs._train import config_of
from lockstep.jobs.train import parser
from lockstep.process.installed import ROOT
from lockstep.storage.errors import ConfigError
from lockstep.training import ways
from lockstep.training.config import TrainConfig
from lockstep.training.control.context import RankContext
from lockstep.training.strategies.every_step import Exchanging, exchanging
from lockstep.training.strategies.local_steps import Meetings
from lockstep.training.ways import WAYS, EveryStep, Refused, Way, table, way_of
from lockstep.training.ways.way import CANONICAL

PLAIN = TrainConfig(datasets=("d",), run="r", model="m", num_ranks=2, global_batch=8, epochs=2)
OTHERS = [way for way in WAYS if way is not EveryStep]
ASKS: dict[str, dict[str, Any]] = {
    "--delay": {"delay": 1},
    "--sync-every": {"sync_every": 4},
    "--tensor-parallel": {"tensor_parallel": 2},
    "--pipeline-stages": {"pipeline_stages": 2},
    "--zero": {"zero": 2},
    "--strategy async": {"strategy": "async", "staleness": 2},
    "--strategy parameter-server": {"strategy": "parameter-server", "staleness": 2, "servers": 1},
    "--strategy federated": {"strategy": "federated", "clients": "user"},
    "--strategy mirrored": {"strategy": "mirrored", "num_ranks": 1},
    "--strategy multi-worker-mirrored": {"strategy": "multi-worker-mirrored", "trust_network": "lo"},
    "--strategy layers": {"strategy": "layers"},
    "--strategy tasks": {"strategy": "tasks", "datasets": ("d", "e"), "mix": (1, 1), "tasks": "equal"},
    "--strategy sync": {},
}
WRONG: dict[str, dict[str, Any]] = {
    "exactness.canonical": {"canonical": True},
    "step.micro_batches": {"micro_batches": 2},
    "step.precision": {"precision": "mixed_float16"},
    "exactness.non_finite": {"non_finite": "skip"},
    "ranks.backend": {"backend": "nccl", "trust_network": "lo"},
    "step.compression": {"compression": "int8"},
    "step.batchnorm": {"batchnorm": "sync"},
    "ranks.elastic": {"min_ranks": 1},
    "step.shard_embeddings": {"shard_embeddings": 0},
    "ranks.balance": {"balance": True},
    "exactness.audit": {"audit": True},
    "model.ewc": {"ewc": 5.0},
}
PAIRS = [(way, refused) for way in WAYS for refused in way.refuses]
# For each option of a way, a value that the ways which have it take.
OPTIONS: dict[str, Any] = {
    "clients": "page", "client_fraction": 0.5, "local_epochs": 3, "update_clip": 1.5, "noise_multiplier": 0.5,
    "privacy_delta": 0.01, "staleness": 3, "servers": 2, "gradient_noise": 0.1, "devices": 2, "delay": 3,
    "sync_every": 2, "sync_until_epoch": 1, "outer_learning_rate": 0.7, "outer_momentum": 0.9,
    "pipeline_stages": 2, "schedule": "gpipe", "cut_after": "layer", "zero": 1, "tensor_parallel": 2,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.flag)
def test_a_configuration_asks_for_one_way(way: type[Way]) -> None:
    config = PLAIN.but(**ASKS[way.flag])
    assert type(config.way) is way and way_of(config) is config.way
    assert TrainConfig.from_json(config.to_json()) == config


def test_without_a_flag_ranks_add_gradients_in_each_step_as_where_one_does_nothing() -> None:
    assert way_of(PLAIN) == EveryStep()
    assert way_of(PLAIN.but(strategy="async", staleness=0)) == EveryStep()
    assert way_of(PLAIN.but(strategy="async", staleness=2, num_ranks=1)) == EveryStep()


@pytest.mark.parametrize(("way", "refused"), PAIRS, ids=[f"{way.flag}, {each.field}" for way, each in PAIRS])
def test_a_configuration_with_what_a_way_refuses_is_refused_by_name(way: type[Way], refused: Refused) -> None:
    asks, wrong = ASKS[way.flag], WRONG[refused.field]
    if way.flag == "--strategy mirrored" and refused.field == "ranks.elastic":
        wrong = {"max_ranks": 2}
    with pytest.raises(ConfigError) as caught:
        PLAIN.but(**{**asks, **wrong})
    said = refused.flag.format(wrong.get(refused.field.rpartition(".")[2], ""))
    assert f"with {said}{refused.why}" in caught.value.allowed and f"`{way.option}`" in caught.value.what


def test_each_option_of_a_way_has_a_value_here() -> None:
    assert {field.name for way in WAYS for field in fields(way)} == OPTIONS.keys()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.flag)
def test_an_option_of_another_way_is_refused_by_name(way: type[Way], name: str) -> None:
    with_it = [each for each in WAYS if name in {field.name for field in fields(each)}]
    (usual,) = {field.default for each in with_it for field in fields(each) if field.name == name}
    asks = ASKS[way.flag]
    assert PLAIN.but(**{name: usual, **asks}).way == PLAIN.but(**asks).way, "as a stored run gives each option"
    wrong = {**asks, name: OPTIONS[name]}
    first = next(each for each in WAYS if each.asked(wrong))
    if name in {field.name for field in fields(first)}:
        return  # it asks for its way
    with pytest.raises(ConfigError) as caught:
        PLAIN.but(**wrong)
    assert f"`{name}`" in caught.value.what
    flags = " or ".join(each.flag for each in with_it)
    said = f"without {flags}" if way is EveryStep else f"with {way.flag}, which does not have it"
    assert caught.value.allowed.endswith(said)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    rows = [f"| {way} | {refuses} |" for way, refuses in table()]
    assert "| way | refuses |\n| --- | --- |\n" + "\n".join(rows) + "\n" in page


def test_a_new_way_is_its_options_an_entry_and_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rare(Meetings):
        """Ranks meet twice as rarely."""

        def times(self) -> int:
            way = self._config.way
            assert isinstance(way, Rarely)
            return way.rarity

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Rarely(Way):
        """The options of --rarity."""

        flag: ClassVar[str] = "--rarity"
        option: ClassVar[str] = "rarity"
        otherwise: ClassVar[str] = "1"
        module: ClassVar[str] = "rare"
        refuses: ClassVar[tuple[Refused, ...]] = (CANONICAL,)

        rarity: int = 1
        """How rarely ranks meet."""

        def __post_init__(self) -> None:
            self.check("rarity", self.rarity >= 1, "an integer from 1 up")

    module = ModuleType("lockstep.training.strategies.rare")
    module.WAY = Rare  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(ways, "WAYS", (Rarely, *WAYS))
    given = ["--dataset", "d", "--run", "r", "--model", "m", "--num-ranks", "2", "--global-batch", "8", "--epochs", "2"]
    assert "--rarity N How rarely ranks meet (default 1)" in " ".join(parser().format_help().split())
    config = config_of(parser().parse([*given, "--rarity", "2"]))
    assert TrainConfig.from_json(config.to_json()) == config and config.to_json()["way"] == {"rarity": 2}
    context = cast(RankContext, None)
    rare = exchanging(config, context)
    assert isinstance(rare, Rare) and rare.times() == 2
    assert type(exchanging(PLAIN, context)) is Exchanging
    for more, words in (
        (("--canonical",), "1 with --canonical"),
        (("--delay", "1"), "0 with --rarity, which does not have it"),
        (("--rarity", "0"), "from 1 up"),
        (("--strategy", "mirrored", "--num-ranks", "1"), "1 with --strategy mirrored"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_of(parser().parse([*given, "--rarity", "2", *more]))
