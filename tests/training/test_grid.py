"""The grid of ranks: who divides rows with whom, and an exchange in which only those add their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.comm import Communicator
from lockstep.training.exchange.agreement import NonFiniteError
from lockstep.training.world import Grid, World
from tests.training._ring import run_ring

GRIDS = [Grid(data, stages, tensor) for data in (1, 2, 3) for stages in (1, 2, 3) for tensor in (1, 2, 4)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_rank_has_one_place_and_groups_of_one_kind_hold_each_rank_once(grid: Grid) -> None:
    ranks = range(grid.num_ranks)
    assert [grid.rank_at(*grid.place(rank)) for rank in ranks] == list(ranks)
    assert len({grid.place(rank) for rank in ranks}) == grid.num_ranks
    for groups, size in (
        (grid.data_group, grid.data),
        (grid.stage_group, grid.stages),
        (grid.tensor_group, grid.tensor),
        (grid.mates_of, grid.mates),
    ):
        found = {tuple(groups(rank)) for rank in ranks}
        assert sorted(rank for group in found for rank in group) == list(ranks)
        assert {len(group) for group in found} == {size} and all(rank in groups(rank) for rank in ranks)
    assert [rank for rank in ranks if grid.counts(rank)] == grid.counting and len(grid.counting) == grid.data


def test_ranks_that_meet_most_are_neighbours() -> None:
    grid = Grid(2, 2, 2)
    assert [grid.tensor_group(rank) for rank in (0, 2, 6)] == [[0, 1], [2, 3], [6, 7]]
    assert (grid.stage_group(1), grid.data_group(3), grid.mates_of(5)) == ([1, 3], [3, 7], [4, 5, 6, 7])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_data_world_has_the_data_ranks_also_where_hosts_have_unlike_numbers_of_ranks(grid: Grid) -> None:
    hosts = ["a"] * (grid.num_ranks // 3) + ["b"] * (grid.num_ranks - grid.num_ranks // 3)
    for rank in range(grid.num_ranks):
        world = grid.data_world(World.from_hosts(rank, hosts, 3))
        assert (world.rank, world.num_ranks, world.generation) == (grid.place(rank)[0], grid.data, 3)


def test_a_grid_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="an invalid Grid"):
        Grid(0)


def optimizer_of(comm: Communicator, weight: float | None) -> tuple[Any, Any]:
    import keras

    from lockstep.training.exchange.grid_exchange import GridExchange
    from lockstep.training.steps.distribute import distribute

    variable = keras.Variable(np.zeros(3), dtype="float32", name=f"of_{comm.rank % 2}")
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    make = partial(GridExchange, grid=Grid(2, 2), loss_weight=weight)
    distribute(optimizer, comm, 0.5, finalizes=False, same_start=False, make_exchange=make)
    return optimizer, variable


@pytest.mark.slow
def test_gradients_are_added_over_the_data_group_and_loss_and_flags_over_all() -> None:
    """Stages have variables of other names; rank 3 alone asks to stop, and the last stage alone has a loss."""
    from lockstep.training.steps.distribute import exchange_of

    def work(comm: Communicator) -> tuple[Any, ...]:
        import tensorflow as tf

        last = comm.rank % 2
        optimizer, variable = optimizer_of(comm, float(last))
        exchange = exchange_of(optimizer)
        if comm.rank == 3:
            exchange.want("stop")
        loss = tf.constant(float(comm.rank) if last else np.nan)
        optimizer.scale_loss(loss)
        optimizer.apply([tf.constant([1.0, 2.0, 3.0]) * (comm.rank + 1)], [variable])
        agreement = exchange.agreement
        exchange.close()
        assert agreement is not None
        return variable.numpy().tolist(), agreement.loss, agreement.stop

    found = run_ring(4, work)
    assert [values for values, _, _ in found] == [[-2.0, -4.0, -6.0], [-3.0, -6.0, -9.0]] * 2
    assert {tuple(rest) for _, *rest in found} == {(2.0, True)}


@pytest.mark.slow
def test_what_is_not_finite_on_one_stage_ends_the_step_on_all() -> None:
    def work(comm: Communicator) -> str:
        import tensorflow as tf

        from lockstep.training.steps.distribute import exchange_of

        optimizer, variable = optimizer_of(comm, None)
        gradient = tf.constant([np.inf if comm.rank == 2 else 1.0, 2.0, 3.0])
        with pytest.raises((NonFiniteError, tf.errors.OpError)) as caught:
            optimizer.apply([gradient], [variable])
        fault = exchange_of(optimizer).fault()
        exchange_of(optimizer).close()
        assert not variable.numpy().any() and isinstance(fault, NonFiniteError), caught
        return str(fault)

    found = run_ring(4, work)
    assert len(set(found)) == 1 and "the gradient of of_0 is not finite" in found[0] and "rank 2" in found[0]
