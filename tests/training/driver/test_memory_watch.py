"""Which memory is running out, from samples in order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lockstep.training.driver.memory_watch import MIB, WINDOW, MemoryWatch, growth

SECONDS = 5.0 * np.arange(WINDOW)
NOISE = np.random.default_rng(3).normal(0, 2, WINDOW)


@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        (1000 + 2 * SECONDS + NOISE, 2.0),
        (1000 + 0 * SECONDS + NOISE, 0.0),
        (1000 + 0.1 * SECONDS, 0.0),  # 18 MiB in a window
        (1000 + np.where(SECONDS < 30, 0, 300) + NOISE, 0.0),  # a step up, such as a checkpoint's first copy
        (1000 + 400 * (1 - np.exp(-SECONDS / 30)), 0.0),  # caches that fill
        (1000 + 200 * (np.arange(WINDOW) % 7 == 0), 0.0),  # peaks
        (1000 + 2 * SECONDS + 500 * (np.arange(WINDOW) % 9 == 0), 2.0),  # growth with peaks
        (2000 - 2 * SECONDS, 0.0),
    ],
)
def test_growth_is_what_is_steady(mib: Sequence[float], expected: float) -> None:
    found = growth(list(zip(SECONDS, np.asarray(mib) * MIB, strict=True))) / MIB
    assert found == pytest.approx(expected, rel=0.1)


def row(rss_mib: float, held_mib: float = 0, limit_mib: float = 8192, *, rank: int = 1, step: int = 3) -> dict:
    sizes = {"rss_bytes": rss_mib * MIB, "held_bytes": (held_mib or rss_mib) * MIB, "limit_bytes": limit_mib * MIB}
    return {"rank": rank, "step": step, "host": "host-b", "limit_of": "container", **sizes}


def test_a_growing_rank_is_named_once_with_the_time_that_is_left() -> None:
    watch, notes = MemoryWatch(), []
    for number in range(3 * WINDOW):
        notes += watch.add(row(1000 + 10 * number), 5.0 * number)
    assert len(notes) == 1
    assert notes[0].startswith(
        "the memory of rank 1 on host-b grows by 120 MiB a minute, now 1350 MiB: its container of 8192 MiB is full in "
        "about 57 minutes; next: look for"
    )


def test_growth_that_is_far_from_the_limit_or_before_the_first_step_is_not_named() -> None:
    for limit_mib, step in ((1 << 20, 3), (8192, 0)):
        watch = MemoryWatch()
        for number in range(2 * WINDOW):
            assert watch.add(row(1000 + 10 * number, limit_mib=limit_mib, step=step), 5.0 * number) == []


def test_a_container_that_is_nearly_full_is_named_once_for_its_host() -> None:
    watch = MemoryWatch()
    assert watch.add(row(1000, 7300), 0.0) == []
    [note] = watch.add(row(1000, 7400), 5.0)
    assert note.startswith(
        "rank 1 on host-b may be killed for its memory: its container holds 7400 of 8192 MiB (90%), this rank 1000; "
    )
    assert watch.add(row(1000, 7500), 10.0) == watch.add(row(1000, 7500, rank=0), 10.0) == []


def test_the_part_of_a_container_that_the_cluster_manager_watches_counts_where_it_is_nearer() -> None:
    watch = MemoryWatch(rank_limit_bytes=1200 * MIB)
    assert watch.add(row(1000, 2000), 0.0) == []
    [note] = watch.add(row(1100, 2000), 5.0)
    assert "its part of the container holds 1100 of 1200 MiB (92%)" in note
    assert len(watch.add(row(1100, 2000, rank=0), 5.0)) == 1, "another rank, another part"
