"""The plan's batches for any program: NumPy iterators, and PyTorch's IterableDataset over the same.

Where PyTorch is installed the tests run with it, else with a stand-in for the few names that are used of it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lockstep.features.images import decode_many
from lockstep.features.images.decode_many import BadImageError
from lockstep.storage.dataset.manifest import load_dataset
from lockstep.storage.errors import ConfigError, CorruptionError, DataError
from lockstep.training.batches.feed import Batch, RankFeed, eval_batches
from lockstep.training.batches.planned import PlannedBatches, numpy_batches
from lockstep.training.batches.training_set import TrainingSet
from lockstep.training.config import TrainConfig
from lockstep.training.driver.preflight import plan_for
from lockstep.training.plan.epoch_plan import EpochPlan
from lockstep.training.reading.open import OpenSplit
from lockstep.training.reading.reader import SplitReader
from lockstep.training.world import World
from tests.training import _torch_stand_in
from tests.training._tiny import write_files, write_images

OPTIONS: dict[str, Any] = {"global_batch": 20, "lanes": 5, "seed": 3, "epochs": 2}
AUGMENT = "crop:2 flip mixup:0.4"


@pytest.fixture
def root(tmp_path: Path) -> str:
    write_images(tmp_path / "d")
    return str(tmp_path / "d")


@pytest.fixture
def torch_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(decode_many, "_pool", decode_many._Pool())  # workers of the stand-in are of this process
    if importlib.util.find_spec("torch") is None:
        _torch_stand_in.install(monkeypatch)
    yield importlib.import_module("lockstep.training.batches.torch_data")
    sys.modules.pop("lockstep.training.batches.torch_data")


def content(batch: Batch) -> tuple[Any, ...]:
    assert batch.y is not None
    return batch.step, batch.x["image"].tobytes(), batch.y.tobytes(), batch.sample_ids.tolist(), batch.epochs.tolist()


def of_torch(item: dict[str, Any]) -> tuple[Any, ...]:
    image, y = np.asarray(item["x"]["image"]), np.asarray(item["y"])
    return item["step"], image.tobytes(), y.tobytes(), item["sample_ids"].tolist(), item["epochs"].tolist()


def test_batches_are_those_that_a_run_trains_on(root: str) -> None:
    opened = OpenSplit.at(root, "train")
    plan = EpochPlan.for_dataset(opened.manifest, "train", seed=3, global_batch=20, lanes=5)
    feed = RankFeed(plan, opened.reader, opened.encoder, World.local(0, 1))
    assert [content(batch) for batch in numpy_batches(root, **OPTIONS)] == [content(b) for b in feed.batches(0, 10)]


@pytest.mark.parametrize("augment", ["", AUGMENT])
@pytest.mark.parametrize("batches", [1, 10])
def test_files_are_closed_where_an_iteration_ends_or_is_left(
    root: str, augment: str, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[SplitReader] = []
    monkeypatch.setattr(SplitReader, "close", lambda self: closed.append(self))
    iterator = numpy_batches(root, augment=augment, **OPTIONS)
    assert len(list(islice(iterator, batches))) == batches and len(closed) == 1  # what the plan was made from
    iterator.close()
    assert len(closed) == 2


@pytest.mark.parametrize("augment", ["", AUGMENT])
def test_ranks_share_what_one_has_and_any_start_is_a_part_of_the_whole(root: str, augment: str) -> None:
    whole = [content(batch) for batch in numpy_batches(root, augment=augment, **OPTIONS)]
    assert len(whole) == 10 and sorted(sample for batch in whole[:5] for sample in batch[3]) == sorted(
        sample for batch in whole[5:] for sample in batch[3]
    )
    assert [content(b) for b in numpy_batches(root, augment=augment, start_step=7, **OPTIONS)] == whole[7:]
    ranks = [numpy_batches(root, augment=augment, rank=rank, num_ranks=3, **OPTIONS) for rank in range(3)]
    for one, *parts in zip(whole, *ranks, strict=True):
        joined = [content(part) for part in parts]
        assert one[1:3] == (b"".join(part[1] for part in joined), b"".join(part[2] for part in joined))
    planned = PlannedBatches.open(root, augment=augment, **OPTIONS)
    assert [content(b) for b in planned.batches(1, every=4)] == whole[1::4]


MIXED: dict[str, Any] = {**OPTIONS, "mix": (3, 1), "interleave": 2, "cache_groups": 5}


@pytest.fixture
def pair(tmp_path: Path, root: str) -> list[str]:
    write_images(tmp_path / "e", records={"train": 40, "test": 5}, seed=1, fmt="tfrecord")
    return [root, str(tmp_path / "e")]


def test_a_mixture_is_the_same_at_any_ranks_and_is_what_a_run_trains_on(pair: list[str]) -> None:
    whole = [content(batch) for batch in numpy_batches(pair, augment=AUGMENT, **MIXED)]
    ranks = [numpy_batches(pair, augment=AUGMENT, rank=rank, num_ranks=3, **MIXED) for rank in range(3)]
    assert len(whole) == 13  # two passes of the first dataset's 100 samples, 15 a batch
    for one, *parts in zip(whole, *ranks, strict=True):
        joined = [content(part) for part in parts]
        assert one[1:3] == (b"".join(part[1] for part in joined), b"".join(part[2] for part in joined))
        assert one[3] == [sample for part in joined for sample in part[3]]
    config = TrainConfig(
        datasets=tuple(pair), run="r", model="m", num_ranks=1, batchnorm="local",
        **MIXED,
    )  # fmt: skip
    opened = TrainingSet.at(pair, "train", config.data.mix)
    plan = plan_for(opened.manifest, config)
    planned = PlannedBatches.open(pair, **MIXED)
    assert planned.plan == plan
    feed = opened.feed(plan, World.local(0, 1))
    assert [content(batch) for batch in planned.batches(6)] == [content(batch) for batch in feed.batches(6, 13)]


def test_a_second_epoch_is_read_from_the_cache(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SplitReader] = []
    at = TrainingSet.at.__func__  # type: ignore[attr-defined]  # a classmethod's function

    def kept(cls: type[TrainingSet], *arguments: Any) -> TrainingSet:
        found: TrainingSet = at(cls, *arguments)
        opened.extend(found.readers)
        return found

    monkeypatch.setattr(TrainingSet, "at", classmethod(kept))
    whole = [content(batch) for batch in numpy_batches(root, **OPTIONS)]
    options = {**OPTIONS, "cache": str(tmp_path / "cache"), "cache_bytes": 1 << 24, "read_ahead_bytes": 1 << 16}
    assert [content(batch) for batch in numpy_batches(root, **options)] == whole
    counts = opened[-1].counts.cached
    assert counts is not None and counts.misses > 0 and counts.hits >= counts.misses
    assert [content(batch) for batch in numpy_batches(root, **options)] == whole  # another process would hit likewise
    counts = opened[-1].counts.cached
    assert counts is not None and counts.misses == 0 and counts.hits > 0


def test_a_full_verification_reads_this_rank_s_share_before_the_first_batch(root: str) -> None:
    shard = Path(root, load_dataset(root).splits["train"].shards[1].path)
    data = bytearray(shard.read_bytes())
    data[20] ^= 1  # within the first page
    shard.write_bytes(data)
    PlannedBatches.open(root, verify="full", rank=0, num_ranks=2, **OPTIONS)  # the other rank's share
    with pytest.raises(CorruptionError, match="does not match its digest"):
        PlannedBatches.open(root, verify="full", rank=1, num_ranks=2, **OPTIONS)


def test_a_dataset_that_was_replaced_is_refused(root: str) -> None:
    planned = PlannedBatches.open(root, **OPTIONS)
    shutil.rmtree(root)
    write_images(root, seed=5)
    with pytest.raises(DataError, match="another dataset"):
        next(planned.batches())


def test_without_epochs_there_is_no_end_and_a_closed_iterator_leaves_no_thread(root: str) -> None:
    options = {**OPTIONS, "epochs": None}
    others = set(threading.enumerate())
    batches = numpy_batches(root, augment=AUGMENT, start_step=1000, **options)
    assert [batch.step for batch in islice(batches, 12)] == list(range(1000, 1012))
    batches.close()
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name == "read-ahead"]


def test_an_iterator_is_closed_while_a_read_stands_still(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stands, go_on = threading.Event(), threading.Event()

    def stuck(self: RankFeed, first_step: int, _: int) -> Iterator[Batch]:
        yield self.batch(first_step)
        stands.set()
        go_on.wait(120)

    monkeypatch.setattr("lockstep.training.reading.background._JOIN_S", 0.05)
    monkeypatch.setattr(RankFeed, "batches", stuck)
    batches = PlannedBatches.open(root, augment=AUGMENT, **OPTIONS).batches()
    try:
        next(batches)
        assert stands.wait(120)
        batches.close()
    finally:
        go_on.set()


def test_the_signature_tells_what_a_batch_holds(root: str) -> None:
    planned = PlannedBatches.open(root, augment="mixup:0.4", **OPTIONS)
    batch = next(planned.batches())
    label = planned.signature.label
    assert label is not None and batch.y is not None
    assert batch.y.shape == (20, *label.shape) and batch.y.dtype == label.dtype
    assert batch.x["image"].shape == (20, *planned.signature.features["image"].shape)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rank": 2, "num_ranks": 2}, "rank"),
        ({"num_ranks": 6}, "lanes"),
        ({"augment": "mixup:0.2", "lanes": 20}, "2 rows or more"),
        ({"augment": "blur"}, "crop:pixels"),
        ({"split": "validation"}, "train"),
        ({"datasets": ()}, "no dataset"),
        ({"lanes": 0}, "from 1"),
        ({"global_batch": 0, "lanes": None}, "from 1"),
        ({"epochs": -1}, "not one full global batch"),
        ({"cache": ""}, "an empty path"),
        ({"start_step": -1}, "from 0 up"),
        ({"mix": (1, 1)}, "two datasets"),
        ({"mix": ()}, "two datasets"),
        ({"interleave": 0}, "from 2 up"),
        ({"cache_groups": 2}, "divide|lanes"),
        ({"verify": "all"}, "start or full"),
        ({"bad_images": "no"}, "refuse or skip"),
        ({"cache_bytes": 0, "cache": "/nowhere"}, "1 or more"),
        ({"read_ahead_bytes": 0}, "1 or more"),
    ],
)
def test_what_cannot_be_iterated_is_refused(root: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        next(numpy_batches(**{"datasets": root, **OPTIONS, **changes}))


def test_torch_gets_the_same_batches_by_any_number_of_workers(root: str, torch_data: Any) -> None:
    whole = [content(batch) for batch in numpy_batches(root, augment=AUGMENT, **OPTIONS)]
    planned = PlannedBatches.open(root, augment=AUGMENT, **OPTIONS)
    for workers in (0, 1, 3):
        assert [of_torch(item) for item in torch_data.loader(planned, num_workers=workers)] == whole, workers
    assert [item["epoch"] for item in torch_data.loader(planned)] == [0] * 5 + [1] * 5
    for workers in (0, 2):
        loader = torch_data.loader(planned, num_workers=workers)
        parts = [list(islice(loader, 4)), list(loader)]  # one that is left and taken up again goes on
        assert [of_torch(item) for part in parts for item in part] == whole


def test_torch_goes_on_where_a_state_was_taken_at_other_ranks_and_workers(root: str, torch_data: Any) -> None:
    whole = [content(batch) for batch in numpy_batches(root, augment=AUGMENT, **OPTIONS)]
    for before, after in ((0, 2), (2, 0), (2, 3)):
        loader = torch_data.loader(PlannedBatches.open(root, augment=AUGMENT, **OPTIONS), num_workers=before)
        assert len(list(islice(loader, 4))) == 4  # workers have made more by then
        state = json.loads(json.dumps(loader.state_dict()))
        ranks = [
            torch_data.loader(
                PlannedBatches.open(root, augment=AUGMENT, rank=rank, num_ranks=2, **OPTIONS), state, num_workers=after
            )
            for rank in range(2)
        ]
        for one, *parts in zip(whole[4:], *ranks, strict=True):
            assert one[1] == b"".join(of_torch(part)[1] for part in parts)
    dataset = torch_data.PlannedDataset(PlannedBatches.open(root, augment=AUGMENT, **OPTIONS))
    assert len(list(islice(dataset, 6))) == 6
    again = torch_data.PlannedDataset(dataset.planned)
    again.load_state_dict(dataset.state_dict())
    assert [of_torch(item) for item in again] == whole[6:]


def test_a_state_that_would_lose_or_repeat_samples_is_refused(root: str, torch_data: Any) -> None:
    planned = PlannedBatches.open(root, augment=AUGMENT, **OPTIONS)
    loader = torch_data.loader(planned, num_workers=2)
    assert len(list(islice(loader, 3))) == 3
    with pytest.raises(ConfigError, match="worker processes"):
        loader.dataset.state_dict()
    state = loader.state_dict()
    for changes, name in (
        ({"seed": 4}, "seed"),
        ({"augment": "flip"}, "augment"),
        ({"global_batch": 10}, "global_batch"),
    ):
        with pytest.raises(DataError, match=name):
            torch_data.loader(PlannedBatches.open(root, **{**OPTIONS, "augment": AUGMENT, **changes}), state)


def test_a_damaged_state_is_refused(root: str, torch_data: Any) -> None:
    planned = PlannedBatches.open(root, **OPTIONS)
    state = torch_data.loader(planned).state_dict()
    for damaged in ({**state, "next_step": -1}, {**state, "next_step": "3"}, {"batches": state["batches"]}):
        with pytest.raises(DataError, match="next_step"):
            torch_data.loader(planned, damaged)


def test_torch_goes_on_in_a_mixture_and_refuses_another(pair: list[str], tmp_path: Path, torch_data: Any) -> None:
    whole = [content(batch) for batch in numpy_batches(pair, **MIXED)]
    loader = torch_data.loader(PlannedBatches.open(pair, **MIXED))
    assert len(list(islice(loader, 5))) == 5
    state = json.loads(json.dumps(loader.state_dict()))
    # How files are read decides nothing of the batches.
    cached = PlannedBatches.open(pair, **MIXED, cache=str(tmp_path / "cache"), cache_bytes=1 << 24)
    assert [of_torch(item) for item in torch_data.loader(cached, state, num_workers=2)] == whole[5:]
    for changes, name in (
        ({"mix": (1, 1)}, "global_batch|parts|ratios"),
        ({"interleave": 1}, "parts"),
        ({"cache_groups": None}, "parts"),
    ):
        with pytest.raises(DataError, match=name):
            torch_data.loader(PlannedBatches.open(pair, **{**MIXED, **changes}), state)
    with pytest.raises(DataError, match="another `block_records`"):
        torch_data.loader(PlannedBatches.open(pair[:1], **{**MIXED, "mix": None}), state)


def test_without_torch_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "lockstep.training.batches.torch_data", raising=False)
    with pytest.raises(ConfigError, match="needs PyTorch"):
        importlib.import_module("lockstep.training.batches.torch_data")


FILES: dict[str, Any] = {"global_batch": 10, "lanes": 5, "epochs": 2}


def test_a_bad_image_is_told_with_file_record_and_sample_id(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {33: b"no image"})
    place = r"sample id 0000000000000021, .*part-00001\.tfrecord, record 8 \(block 1\)$"  # 25 lie in the first
    with pytest.raises(BadImageError) as refused:
        list(numpy_batches(str(tmp_path / "d"), **FILES))
    assert re.search(place, refused.value.what) and "unknown_format" in refused.value.got
    opened = OpenSplit.at(str(tmp_path / "d"), "train")
    for rank, batch_rows in ((1, 4), (1, 7)):
        with pytest.raises(BadImageError) as refused:
            list(eval_batches(opened.reader, opened.encoder, rank, 2, batch_rows))
        assert re.search(place, refused.value.what)


def test_a_bad_image_may_keep_its_place_with_weight_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path / "d", {33: b"no image", 7: b""})
    for augment in ("", "crop:1 mixup:0.4"):
        options = {**FILES, "augment": augment, "bad_images": "skip"}
        weights: dict[int, set[float]] = {}
        for batch in numpy_batches(str(tmp_path / "d"), **options):
            assert batch.weight is not None and batch.weight.dtype == np.float32
            for sample, weight, image in zip(batch.sample_ids, batch.weight, batch.x["image"], strict=True):
                weights.setdefault(int(sample), set()).add(float(weight))
                assert (sample not in (7, 33)) or not image.any()
                assert (sample in (7, 33)) or augment or (image[..., 0] == sample + 1).all()
        assert len(weights) == 50
        assert {sample for sample, found in weights.items() if found == {0.0}} == {7, 33}
        assert all(found == {1.0} for sample, found in weights.items() if sample not in (7, 33))
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("weight 0:")]
        assert len(told) == 2 and all("record" in line for line in told)
    planned = PlannedBatches.open(str(tmp_path / "d"), **FILES, bad_images="skip")
    assert planned.signature.weight is not None


def test_where_nothing_is_decoded_nothing_can_be_skipped(root: str) -> None:
    with pytest.raises(ConfigError, match="no images to skip"):
        numpy_batches(root, bad_images="skip", **OPTIONS)
