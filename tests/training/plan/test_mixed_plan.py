"""A mixture: exactly its share of each dataset in each batch, each dataset once an epoch of its own, at any ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.storage.errors import ConfigError, DataError
from lockstep.training.batches.feed import MixedFeed
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.config import TrainConfig
from lockstep.training.driver.preflight import plan_for
from lockstep.training.plan.datasets import open_mixture
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.plan.make_plan import plan_from
from lockstep.training.plan.mixture import MixedPlan, check_ratios, lowest
from lockstep.training.results.audit import check_audit, parse_audit
from lockstep.training.world import World
from tests.training._tiny import write_images, write_table

Sample = tuple[int, int, int]  # dataset, epoch, position


@dataclass(frozen=True)
class Case:
    plan: MixedPlan
    epochs: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lanes = draw(st.integers(1, 4))
    ratios = lowest(draw(st.lists(st.integers(1, 4), min_size=2, max_size=3)))
    of_one = lanes * draw(st.integers(1, 2))
    groups = draw(st.sampled_from([None, *(size for size in range(1, lanes + 1) if lanes % size == 0)]))
    parts = tuple(
        EpochPlan(
            dataset_digest=f"{number:064x}",
            split="train",
            shard_records=tuple(draw(st.lists(st.integers(lanes, 25), min_size=1, max_size=3))),
            block_records=draw(st.integers(1, 9)),
            seed=7,
            global_batch=of_one * ratio,
            lanes=lanes,
            window_records=draw(st.integers(1, 9)),
            cache_groups=groups,
        )
        for number, ratio in enumerate(ratios)
    )
    return Case(MixedPlan(dataset_digest="ab" * 32, ratios=ratios, parts=parts), draw(st.integers(1, 3)))


def batch(plan: MixedPlan, step: int, num_ranks: int = 1) -> list[Sample]:
    """A global batch as `num_ranks` ranks put it together."""
    found: list[Sample] = []
    for rank in range(num_ranks):
        for lane in plan.rank_lanes(rank, num_ranks):
            for number, part in enumerate(plan.parts):
                each = part.global_batch // plan.lanes
                for epoch, positions in part.lane_positions(lane, step * each, (step + 1) * each):
                    found += [(number, epoch, int(position)) for position in positions]
    return found


@given(cases())
@settings(max_examples=40, deadline=None)
def test_shares_are_exact_and_each_dataset_is_used_once_an_epoch_of_its_own(case: Case) -> None:
    plan = case.plan
    steps = plan.first_step(case.epochs)
    used: Counter[Sample] = Counter()
    for step in range(steps):
        samples = batch(plan, step)
        shares = [sum(sample[0] == number for sample in samples) for number in range(len(plan.parts))]
        assert [share * sum(plan.ratios) for share in shares] == [plan.global_batch * r for r in plan.ratios]
        assert plan.row_datasets(plan.global_batch).tolist() == [sample[0] for sample in samples]
        used.update(samples)
    assert set(used.values()) <= {1}
    for number, part in enumerate(plan.parts):
        begun = plan.epochs_begun(number, steps)
        of_part = [(epoch, position) for dataset, epoch, position in used if dataset == number]
        left = part.leftover(begun, steps)
        assert {*of_part, *left} == {(epoch, position) for epoch in range(begun) for position in range(part.total)}
        assert len(of_part) + len(left) == begun * part.total and len(left) < part.total + part.lanes


@given(cases(), st.data())
@settings(max_examples=30, deadline=None)
def test_a_batch_is_the_same_at_any_number_of_ranks(case: Case, data: st.DataObject) -> None:
    plan = case.plan
    step = data.draw(st.integers(0, plan.first_step(case.epochs) + 3))
    for num_ranks in range(1, plan.lanes + 1):
        assert batch(plan, step, num_ranks) == batch(plan, step)
        assert sum(plan.rows(rank, num_ranks) for rank in range(num_ranks)) == plan.global_batch
    epoch = plan.epoch_of_step(step)
    assert plan.first_step(epoch) <= step < plan.first_step(epoch + 1)


@pytest.mark.parametrize(
    ("batch_size", "lanes", "ratios", "groups", "hint"),
    [
        (64, 16, (3, 1), None, None),
        (64, None, (3, 1), 8, None),
        (64, 32, (3, 1), None, "--lanes 16 or --global-batch 128"),  # 16 samples a ratio of 1, for 32 lanes
        (64, 32, (3, 1), 8, "--lanes 16 or --global-batch 128"),  # of the divisors of 16 the multiples of 8
        (60, 12, (3, 4), None, "Use --global-batch 84"),  # 60 is no multiple of 7 at all
        (32, None, (3, 2), 8, "Use --global-batch 40"),
        (20, None, (2, 1), None, "Use --global-batch 21"),
    ],
)
def test_ratios_that_do_not_fit_name_what_would(
    batch_size: int, lanes: int | None, ratios: tuple[int, ...], groups: int | None, hint: str | None
) -> None:
    if hint is None:
        assert check_ratios(batch_size, lanes, ratios, groups, None) * sum(ratios) == batch_size
        return
    with pytest.raises(ConfigError, match="ratios of the mixture") as caught:
        check_ratios(batch_size, lanes, ratios, groups, None)
    assert hint in caught.value.next_step


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two datasets with the same sample ids in part: ids are unique within a dataset only."""
    folder = tmp_path_factory.mktemp("mixed")
    write_table(folder / "a", records={"train": 50, "test": 3}, block_records=8)
    write_table(folder / "b", records={"train": 110, "test": 3}, block_records=16, seed=1, fmt="parquet")
    return [str(folder / "a"), str(folder / "b")]


def config(urls: list[str], **more: object) -> TrainConfig:
    options: dict[str, object] = {"batchnorm": "local", "window_bytes": 4000, "mix": (2, 6), "global_batch": 16}
    return TrainConfig(datasets=tuple(urls), run="r", model="m", num_ranks=1, epochs=2, **{**options, **more})  # type: ignore[arg-type]  # a table of fields


def feeds(urls: list[str], num_ranks: int) -> list[MixedFeed]:
    found = []
    for rank in range(num_ranks):
        opened = TrainingSet.at(urls, "train", (2, 6))
        plan = opened.plan(plan_for(opened.manifest, config(urls)).identity())
        feed = opened.feed(plan, World.local(rank, num_ranks))
        assert isinstance(feed, MixedFeed)
        found.append(feed)
    return found


def test_feeds_of_any_number_of_ranks_give_the_parts_feeds_rows(urls: list[str]) -> None:
    whole = list(feeds(urls, 1)[0].batches(0, 9))
    assert [batch.step for batch in whole] == list(range(9))
    for num_ranks in (2, 3, 4):
        parts = [list(feed.batches(0, 9)) for feed in feeds(urls, num_ranks)]
        for step, batch in enumerate(whole):
            assert np.array_equal(batch.sample_ids, np.concatenate([rank[step].sample_ids for rank in parts]))
            assert batch.y is not None
            assert np.array_equal(batch.y, np.concatenate([np.asarray(rank[step].y) for rank in parts]))
            for name, values in batch.x.items():
                assert np.array_equal(values, np.concatenate([rank[step].x[name] for rank in parts]))
    opened = TrainingSet.at(urls, "train", (2, 6))
    plan = opened.plan(plan_for(opened.manifest, config(urls)).identity())
    assert isinstance(plan, MixedPlan) and plan.ratios == (1, 3)
    of_row = plan.row_datasets(16)
    for split, part, number in zip(opened.splits, plan.parts, (0, 1), strict=True):
        alone = TrainingSet(split.manifest, (split,)).feed(part, World.local(0, 1)).batches(0, 9)
        for batch, own in zip(whole, alone, strict=True):
            assert np.array_equal(batch.sample_ids[of_row == number], own.sample_ids)
            assert np.array_equal(batch.x["a"][of_row == number], own.x["a"])
            assert np.array_equal(batch.epochs[of_row == number], own.epochs)


STEPS = 25  # two passes of the first dataset's 50 records, 4 a batch; 300 of 2.7 passes of the second


def audits(urls: list[str], changes: tuple[tuple[int, int], ...]) -> list[tuple[str, bytes]]:
    """What ranks write who are `num_ranks` from step `first` on, for each change."""
    found = []
    for number, (first, num_ranks) in enumerate(changes):
        stop = changes[number + 1][0] if number + 1 < len(changes) else STEPS
        for rank, feed in enumerate(feeds(urls, num_ranks)):
            opened = TrainingSet.at(urls, "train", (2, 6))
            assert isinstance(feed.plan, MixedPlan)
            log = opened.audit_log(feed.plan, feed.rows)
            for batch in feed.batches(first, stop):
                log.add(batch)
            found.append((f"{num_ranks} ranks, rank {rank}", log.take(stop)))
    return found


def test_an_audit_of_a_mixture_counts_each_dataset_by_itself_across_other_numbers_of_ranks(urls: list[str]) -> None:
    opened = TrainingSet.at(urls, "train", (2, 6))
    plan = plan_for(opened.manifest, config(urls))
    files = audits(urls, ((0, 2), (7, 4), (16, 1)))

    def check(given: list[tuple[str, bytes]], steps: int = STEPS) -> object:
        return check_audit(plan, opened.readers, given, steps=steps, epochs=2)

    report = check_audit(plan, opened.readers, files, steps=STEPS, epochs=2)
    assert report.ok and report.samples == STEPS * 16 and report.left_over == ()
    halfway = check_audit(plan, opened.readers, files[:2], steps=7, epochs=2)
    assert halfway.ok and len(halfway.left_over) == 100 - 7 * 4
    name, content = files[0]
    rows = parse_audit(content, file=name)
    gone = next(line for line in content.splitlines(keepends=True) if line.endswith(b",1\n"))
    lost = check_audit(plan, opened.readers, [(name, content.replace(gone, b"")), *files[1:]], steps=STEPS, epochs=2)
    sample = gone.split(b",")[2].decode()
    assert lost.missing == ((0, f"{sample} of dataset 2"),) and lost.short_steps == (1,) and len(rows) == 7 * 8
    # The same id of the other dataset is another sample.
    moved = check_audit(
        plan, opened.readers, [(name, content.replace(gone, gone[:-2] + b"0\n")), *files[1:]], steps=STEPS, epochs=2
    )
    assert not moved.ok and moved.missing == lost.missing
    strange = check_audit(
        plan, opened.readers, [*files, ("x", files[0][1][:29] + b"1,0,%016x,5\n" % 1)], steps=STEPS, epochs=2
    )
    assert strange.unknown == ((0, f"{1:016x} of no dataset"),)


def test_what_is_stored_is_what_comes_back_or_refused(urls: list[str]) -> None:
    manifest = open_mixture(urls, "train")[1]
    plan = plan_for(manifest, config(urls))
    assert isinstance(plan, MixedPlan) and plan_from(plan.identity(), manifest) == plan
    assert plan_from(plan_for(manifest, config(urls, cache_groups=2)).identity(), manifest) != plan
    with pytest.raises(DataError, match="stored plan belongs to"):
        plan_from(plan.identity(), open_mixture(urls[::-1], "train")[1])
    for name, value in (("ratios", [1, 4]), ("parts", []), ("lanes", 2), ("more", 1)):
        with pytest.raises(DataError, match="other datasets"):
            plan_from({**plan.identity(), name: value}, manifest)
    first, own = plan.parts[0], manifest.mixed[0]
    assert plan_from(first.identity(), own) == first
    # A key of a later version says of the order what this one does not know.
    more = first.total + 1
    for name, stored, told in (
        ("more", None, "more = None (not there)"),
        ("records", more, f"records = {more} (not {first.total})"),
    ):
        with pytest.raises(DataError, match=r"another dataset") as refused:
            plan_from({**first.identity(), name: stored}, own)
        assert refused.value.got == told


@pytest.mark.parametrize(
    ("name", "stored", "told"),
    [
        ("seed", "0", "the file: seed is invalid"),
        ("lanes", "4", "the file: lanes has an invalid value"),
        ("lanes", True, "the file: lanes has an invalid value"),
        ("lanes", None, "the file: lanes has an invalid value"),
        ("lanes", 0, "the file: lanes has an invalid value"),
        ("global_batch", 1.0, "the file: global_batch has an invalid value"),
        ("window_records", [3], "the file: window_records has an invalid value"),
        ("version", "1", "the file: version has an invalid value"),
        ("version", 99, "the file is not a plan"),
        ("split", 3, "the file: split has an invalid value"),
        ("split", "other", "the file is not a plan"),  # a string, but of no such split
        ("lanes", 3, "the file is not a plan"),  # a number, but none that divides the batch
        ("interleave", "2", "the file: interleave has an invalid value"),
        ("interleave", 1, "the file is not a plan"),  # one place is never stored
    ],
)
def test_a_damaged_plan_is_told_with_file_and_field(urls: list[str], name: str, stored: object, told: str) -> None:
    mixed = open_mixture(urls, "train")[1]
    plan = plan_for(mixed, config(urls))
    assert isinstance(plan, MixedPlan)
    damaged = {**plan.parts[0].identity(), name: stored}
    with pytest.raises(DataError, match=f"^{told}"):
        plan_from(damaged, mixed.mixed[0], "the file")
    parts = [damaged, *(part.identity() for part in plan.parts[1:])]
    with pytest.raises(DataError, match=told.replace("the file", "the file: part 0")):
        plan_from({**plan.identity(), "parts": parts}, mixed, "the file")
    with pytest.raises(DataError, match="the file: part 0 has an invalid value"):
        plan_from({**plan.identity(), "parts": [7, *parts[1:]]}, mixed, "the file")


def test_what_cannot_be_mixed(urls: list[str], tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    for pair, got in (
        ([urls[0], str(tmp_path / "images")], "another schema: no field `a`"),
        ([urls[0], urls[0]], "a dataset twice"),
    ):
        with pytest.raises(ConfigError, match="cannot be trained on as one") as caught:
            open_mixture(pair, "train")
        assert got in caught.value.got
    with pytest.raises(ConfigError, match="not one full global batch") as caught:
        plan_for(open_mixture(urls, "train")[1], config(urls, global_batch=256, mix=(1, 1))).steps(2)
    assert "--global-batch 200 or less" in caught.value.next_step  # twice 50 samples, half of a batch
    for mix in ((1,), (1, 2, 3), (1, 0)):
        with pytest.raises(ConfigError, match="the training configuration's `mix` is invalid"):
            config(urls, mix=mix)
