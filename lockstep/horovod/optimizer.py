"""`hvd.DistributedOptimizer`: Horovod's arguments for `lockstep.training.steps.distribute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import trainer

from lockstep.horovod.arrays import Average, ReduceOp, Sum, op_of
from lockstep.horovod.collectives import Compression, Compressor, allreduce, grouped_allreduce
from lockstep.horovod.runtime import absent, check, runtime
from lockstep.storage.errors import ConfigError
from lockstep.training.steps.distribute import distribute, exchange_of
from lockstep.training.steps.optimizers import without_loss_scale


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras 3 optimizer reduce gradients over all ranks before it applies them; returns the same object, or
    under the policy mixed_float16 one that scales the loss around it (see `lockstep.training.steps.distribute`).

    The mean over ranks, or the sum with `op=hvd.Sum`. With `backward_passes_per_step` k, each rank adds the gradients
    of k batches (their mean, with `average_aggregated_gradients`) and the ranks reduce once. A
    `gradient_predivide_factor` changes where the mean divides, not its value: here each rank divides first.
    `compression` applies to whole gradients, not to rows (`tf.IndexedSlices`). A collective: all ranks must call it.
    """
    given: dict[str, Any] = {"use_locking": use_locking, "device_dense": device_dense, "device_sparse": device_sparse}
    given |= {"num_groups": num_groups, "groups": groups, "process_set": process_set}
    check("DistributedOptimizer", **given)
    if not scale_local_gradients:
        absent("DistributedOptimizer(scale_local_gradients=...)", "False")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "hvd.DistributedOptimizer needs an optimizer of Keras 3",
            got=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            allowed="keras.optimizers.*",
            next_step="Use keras.optimizers (tf.keras of this TensorFlow is Keras 3), or hvd.DistributedGradientTape.",
        )
    how, here = op_of(op), runtime()
    if how not in (Average, Sum):
        absent(f"DistributedOptimizer(op={how.name})", instead="Use op=hvd.Average or op=hvd.Sum.")
    if gradient_predivide_factor != 1.0 and how is Sum:
        check("DistributedOptimizer(op=Sum)", gradient_predivide_factor=gradient_predivide_factor)
    scale = 1.0 if how is Sum else 1.0 / here.world.num_ranks
    if backward_passes_per_step > 1:
        counts = without_loss_scale(optimizer)
        if counts.built and counts.gradient_accumulation_steps != backward_passes_per_step:
            check("DistributedOptimizer of a built optimizer", backward_passes_per_step=backward_passes_per_step)
        counts.gradient_accumulation_steps = backward_passes_per_step  # Keras' own takes the mean of the batches
        scale *= 1.0 if average_aggregated_gradients else backward_passes_per_step
    compressor = None if compression is Compression.none else compression
    # Scripts begin with different weights on each rank; then a callback broadcasts those of one rank.
    group = here.group_of_optimizer()
    distributed = distribute(optimizer, group, scale, compression=compressor, same_start=False)
    exchange = exchange_of(distributed)
    exchange.meet = here.add_exchange(exchange)
    _without_xla()
    return distributed


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A model saved by Keras, with its optimizer and the optimizer's state, distributed again.

    If it accumulates gradients of k batches, they are added as by DistributedOptimizer's default. A collective: ranks
    that load no model must call `DistributedOptimizer` at the same time.
    """
    check("load_model", legacy_opts=legacy_opts)
    known = {one.__name__: one for one in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(
            f"the model {filepath} was saved without an optimizer",
            got="a model that is not compiled",
            allowed="a model saved by model.save after compile",
            next_step="Load it with keras.models.load_model, and compile it with hvd.DistributedOptimizer.",
        )
    counts = without_loss_scale(model.optimizer)
    passes = counts.gradient_accumulation_steps or 1
    model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, backward_passes_per_step=passes)
    model.jit_compile = False
    return model


def _without_xla() -> None:
    """Make Keras compile a model whose optimizer calls other ranks without XLA, which cannot compile such calls.

    Keras' `jit_compile="auto"` asks `trainer.model_supports_jit`, and warns if a script insists.
    """
    supports = trainer.model_supports_jit
    if getattr(supports, "knows_ranks", False):
        return

    def unless_distributed(model: Any) -> bool:
        return not hasattr(getattr(model, "optimizer", None), "_lockstep") and bool(supports(model))

    unless_distributed.knows_ranks = True  # type: ignore[attr-defined] # of a function
    trainer.model_supports_jit = unless_distributed


class DistributedGradientTape:
    """Wraps a tape, before or after it has recorded; all attributes except `gradient` are the tape's own."""

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: type[Compressor] = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
    ) -> None:
        given = {"device_dense": device_dense, "device_sparse": device_sparse, "num_groups": num_groups}
        given |= {"groups": groups, "process_set": process_set}
        check("DistributedGradientTape", **given)
        if not scale_local_gradients:
            absent("DistributedGradientTape(scale_local_gradients=...)", "False")
        runtime()
        self._tape, self._compression, self._sparse_as_dense = gradtape, compression, sparse_as_dense
        self._op, self._before, self._after = op_and_factors("DistributedGradientTape", op, gradient_predivide_factor)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if name in ("register_local_source", "get_local_and_global_gradients"):
            absent(f"tape.{name}", instead="Take local variables' gradients from a tf.GradientTape of their own.")
        return getattr(self._tape, name)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The tape's gradients in the structure of `sources`, reduced over ranks.

        Dense ones are sent together, in one message per dtype; tf.IndexedSlices as the rows of all ranks. None stays
        None, and must be None on all ranks.
        """
        grads = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        return tf.nest.pack_sequence_as(sources, self._reduce(tf.nest.flatten(grads)))

    def _reduce(self, grads: Sequence[Any]) -> list[Any]:
        if self._sparse_as_dense:
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        results = list(grads)
        dense = [i for i, g in enumerate(grads) if g is not None and not isinstance(g, tf.IndexedSlices)]
        missing = [i for i, g in enumerate(grads) if g is None]
        name = f"gradients (none at {missing})" if missing else "gradients"
        reduced = grouped_allreduce(
            [grads[i] for i in dense],
            compression=self._compression,
            op=self._op,
            prescale_factor=self._before,
            postscale_factor=self._after,
            name=name,
        )
        for i, total in zip(dense, reduced, strict=True):
            results[i] = total
        for i, grad in enumerate(grads):
            if isinstance(grad, tf.IndexedSlices):
                results[i] = allreduce(
                    grad, None, "", "", Compression.none, self._op, self._before, self._after, f"gradient {i}"
                )
        return results


def op_and_factors(call: str, op: ReduceOp, predivide: float) -> tuple[ReduceOp, float, float]:
    """The operation with the factors before and after it: a predivided mean is a sum of parts divided before."""
    how = op_of(op)
    if predivide == 1.0:
        return how, 1.0, 1.0
    if how is not Average:
        check(f"{call}(op={how.name})", gradient_predivide_factor=predivide)
    return ReduceOp.Sum, 1.0 / predivide, predivide / runtime().world.num_ranks
