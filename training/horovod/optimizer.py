"""`hvd.DistributedOptimizer`: Horovod's arguments for `training.steps.distribute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras.src.trainers import trainer

from lockstep.storage.errors import ConfigError
from training.horovod.arguments import absent, check
from training.horovod.compression import Compression, Compressor
from training.horovod.place import here
from training.horovod.reduce import Average, ReduceOp, Sum, op_of
from training.steps.distribute import distribute, exchange_of


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
    under the policy mixed_float16 one that scales the loss around it (see `training.steps.distribute`).

    The mean over ranks, or the sum with `op=hvd.Sum`. With `backward_passes_per_step` k, gradients of k batches are
    added on each rank (their mean, with `average_aggregated_gradients`) and reduced once. A `gradient_predivide_factor`
    changes where the mean divides, never its value: here each rank divides first. `compression` is of whole gradients,
    not of rows (`tf.IndexedSlices`). A collective: all ranks call it.
    """
    given: dict[str, Any] = {"use_locking": use_locking, "device_dense": device_dense, "device_sparse": device_sparse}
    given |= {"num_groups": num_groups, "groups": groups, "process_set": process_set}
    check("DistributedOptimizer", **given)
    if not scale_local_gradients:
        absent("DistributedOptimizer(scale_local_gradients=...)", "False")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "hvd.DistributedOptimizer got no optimizer of Keras 3",
            got=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            allowed="keras.optimizers.*",
            next_step="Use keras.optimizers (tf.keras of this TensorFlow is Keras 3), or hvd.DistributedGradientTape.",
        )
    how, place = op_of(op), here()
    if how not in (Average, Sum):
        absent(f"DistributedOptimizer(op={how.name})", instead="Use op=hvd.Average or op=hvd.Sum.")
    if gradient_predivide_factor != 1.0 and how is Sum:
        check("DistributedOptimizer(op=Sum)", gradient_predivide_factor=gradient_predivide_factor)
    scale = 1.0 if how is Sum else 1.0 / place.world.num_ranks
    if backward_passes_per_step > 1:
        counts = getattr(optimizer, "inner_optimizer", optimizer)
        if counts.built and counts.gradient_accumulation_steps != backward_passes_per_step:
            check("DistributedOptimizer of a built optimizer", backward_passes_per_step=backward_passes_per_step)
        counts.gradient_accumulation_steps = backward_passes_per_step  # Keras' own takes the mean of the batches
        scale *= 1.0 if average_aggregated_gradients else backward_passes_per_step
    compressor = None if compression is Compression.none else compression
    # Scripts begin with weights of their own, which a callback then makes those of one rank.
    distributed = distribute(optimizer, place.new_group(), scale, compression=compressor, same_start=False)
    place.exchanges.append(exchange_of(distributed))
    _without_xla()
    return distributed


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A model saved by Keras, with its optimizer and that one's state, distributed again.

    Where it accumulates gradients of k batches, they are added as by DistributedOptimizer's own default. A collective;
    on ranks that do not load, `DistributedOptimizer` is the other side of it.
    """
    check("load_model", legacy_opts=legacy_opts)
    known = {one.__name__: one for one in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(
            f"the model {filepath} was saved without an optimizer",
            got="a model that is not compiled",
            allowed="a model saved by model.save after compile",
            next_step="Load it by keras.models.load_model, and compile it with hvd.DistributedOptimizer.",
        )
    counts = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    passes = counts.gradient_accumulation_steps or 1
    model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, backward_passes_per_step=passes)
    model.jit_compile = False
    return model


def _without_xla() -> None:
    """Have Keras compile a model whose optimizer calls other ranks without XLA, which knows no such call.

    Keras' `jit_compile="auto"` asks this function whether a model can have it, and warns where a script insisted.
    """
    supports = trainer.model_supports_jit
    if getattr(supports, "knows_ranks", False):
        return

    def unless_distributed(model: Any) -> bool:
        return not hasattr(getattr(model, "optimizer", None), "_lockstep") and bool(supports(model))

    unless_distributed.knows_ranks = True  # type: ignore[attr-defined] # of a function
    trainer.model_supports_jit = unless_distributed
