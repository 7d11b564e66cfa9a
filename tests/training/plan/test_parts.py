"""Several datasets, or several folds, are trained on as one: each sample once an epoch, in an order of its own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.features.schema.sampled import Sampled, sampled_of
from lockstep.storage.dataset.manifest import DatasetManifest
from lockstep.storage.dataset.manifest_entries import FileInfo
from lockstep.storage.errors import ConfigError, NotFoundError
from lockstep.training.config import TrainConfig
from lockstep.training.driver.preflight import plan_for
from lockstep.training.plan import datasets
from lockstep.training.plan.datasets import held_out, open_mixture, open_parts
from lockstep.training.reading.open import OpenSplit
from tests.builders.blocks import read_all
from tests.training._tiny import write_images, write_table


def ids_of(opened: OpenSplit, split: str, plan_of: Any) -> list[int]:
    plan = plan_of(opened.manifest, split)
    return read_all(opened.reader, plan.runs(1, 0, plan.total)).column("sample_id").to_pylist()


def plan_of(manifest: DatasetManifest, split: str) -> Any:
    options: dict[str, Any] = {"datasets": ("d",), "run": "r", "model": "m", "num_ranks": 2, "epochs": 2}
    return plan_for(manifest, TrainConfig(split=split, global_batch=8, **options))


@pytest.mark.parametrize("fmt", ["tfrecord", "parquet"])
def test_datasets_end_to_end_are_one_split(tmp_path: Path, fmt: str) -> None:
    urls = [str(tmp_path / name) for name in "ab"]
    write_table(urls[0], fmt=fmt, records={"train": 43, "test": 9}, shards=3)
    write_table(urls[1], fmt=fmt, records={"train": 20, "test": 5}, shards=2, seed=1)
    opened, swapped = OpenSplit.at(urls, "train"), OpenSplit.at(urls[::-1], "train")
    found = ids_of(opened, "train", plan_of)
    alone = [ids_of(OpenSplit.at(url, "train"), "train", plan_of) for url in urls]
    assert sorted(found) == sorted(alone[0] + alone[1]) and found[:43] != alone[0]  # mixed, none lost, none twice
    assert opened.manifest.digest != swapped.manifest.digest != OpenSplit.at(urls[0], "train").manifest.digest
    plan = plan_of(opened.manifest, "train")
    assert (plan.total, plan.dataset_digest) == (63, opened.manifest.digest)
    readers = [opened.reader, *(OpenSplit.at(url, "train").reader for url in urls)]
    whole, *each = (np.asarray(read_all(r)["b"]) for r in readers)
    assert np.array_equal(whole, np.concatenate(each))


def test_shares_that_hold_for_all_are_told(tmp_path: Path) -> None:
    sampled = [{"column": "label", "shares": {"false": share}, "splits": ["train"]} for share in ("1/2", "1/2", "1/3")]
    urls = [str(tmp_path / name) for name in "abc"]
    for seed, (url, stored) in enumerate(zip(urls, sampled, strict=True)):
        manifest = write_table(url, seed=seed)
        own = {**manifest.created_by, "config": {"sampled": stored}}
        Path(url, "_manifest.json").write_bytes(replace(manifest, created_by=own).to_bytes())
    for joined in (open_parts, open_mixture):
        assert sampled_of(joined(urls[:2], "train")[1]) == Sampled.from_json(sampled[0])
        assert sampled_of(joined(urls, "train")[1]) is None
    assert sampled_of(open_parts(urls[2:], "train")[1]) == Sampled.from_json(sampled[2])


def test_folds_that_are_not_held_out(tmp_path: Path) -> None:
    write_table(tmp_path / "d", records={"fold-0": 20, "fold-1": 30, "fold-2": 25})
    opened = OpenSplit.at(str(tmp_path / "d"), "fold-0,fold-2", training=True)
    found = ids_of(opened, "fold-0,fold-2", plan_of)
    each = [ids_of(OpenSplit.at(str(tmp_path / "d"), name), name, plan_of) for name in ("fold-0", "fold-1", "fold-2")]
    assert sorted(found) == sorted(each[0] + each[2])
    for split, training, fold in (
        ("fold-0,fold-2", True, "fold-1"),
        ("fold-1", False, "fold-1"),  # evaluated on what is held out
        ("fold-1", True, None),  # two folds are left out: nothing was fitted for that
    ):
        assert held_out(opened.manifest, split, training=training) == fold
    for split in ("fold-0,fold-9", "fold-0,fold-0"):
        with pytest.raises(ConfigError, match="cannot be trained on as one") as caught:
            OpenSplit.at(str(tmp_path / "d"), split)
        assert caught.value.next_step == "Correct --split."


def test_what_does_not_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_table(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    write_table(tmp_path / "blocks", block_records=4, seed=1)
    write_table(tmp_path / "parquet", fmt="parquet", seed=1)
    write_images(tmp_path / "images")
    for name, got in (
        ("a", "the same records twice"),
        ("copy", "the same records twice"),  # known by its digest, not by its URL
        ("blocks", "blocks of 4, 8 records"),
        ("parquet", "another format: parquet"),
        ("images", "another schema: no field `a`; no field `b`; field `image` (not there); field `label`: dtype"),
    ):
        with pytest.raises(ConfigError, match="cannot be trained on as one") as caught:
            open_parts([str(tmp_path / "a"), str(tmp_path / name)], "train")
        assert got in caught.value.got and caught.value.next_step
    with pytest.raises(ConfigError, match="cannot be trained on as one"):
        open_parts(str(tmp_path / "a"), "train,train")
    assert open_parts(str(tmp_path / "a"), "train") == open_parts([str(tmp_path / "a")], "train")
    one = TrainConfig(datasets="a/b", run="r", model="m", num_ranks=1, global_batch=1, epochs=1)
    assert one.data.datasets == ("a/b",)
    with pytest.raises(NotFoundError):
        open_parts([str(tmp_path / "a"), str(tmp_path / "none")], "train")
    other = replace(first, digest="0" * 64, files={**first.files, "_fitted/x.json": FileInfo(1, "0" * 64)})
    monkeypatch.setattr(datasets, "load_dataset", {"one": first, "two": other}.__getitem__)
    with pytest.raises(ConfigError, match="cannot be trained on as one") as caught:
        open_parts(["one", "two"], "train")
    assert caught.value.got == "another set of fitted files: _fitted/x.json (not there)"


@pytest.mark.parametrize("joined", [open_parts, open_mixture])
def test_classes_of_other_names_are_not_one_label(tmp_path: Path, joined: Any) -> None:
    """Pictures in folders cat, cow, dog, owl have labels 0 to 3, and so have those in cat, cow, owl, rat."""
    names = {"a": "cat cow dog owl", "same": "cat cow dog owl", "other": "cat cow owl rat", "numbers": ""}
    for seed, (name, words) in enumerate(names.items()):
        write_images(tmp_path / name, seed=seed, class_names=words.split())
    for name in ("same", "numbers"):
        joined([str(tmp_path / "a"), str(tmp_path / name)], "train")
    for together in (["a", "other"], ["numbers", "a", "other"], ["a", "numbers", "other"]):
        with pytest.raises(ConfigError, match="cannot be trained on as one") as caught:
            joined([str(tmp_path / name) for name in together], "train")
        assert caught.value.got == "classes cat, cow, owl, rat (not cat, cow, dog, owl)"
        assert "--classes" in caught.value.next_step
