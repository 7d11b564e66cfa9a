"""`hvd.DistributedGradientTape`: a tf.GradientTape whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from training.horovod.arguments import absent, check
from training.horovod.compression import Compression, Compressor
from training.horovod.place import here
from training.horovod.reduce import Average, ReduceOp, allreduce, grouped_allreduce, op_of


class DistributedGradientTape:
    """Wraps a tape, before or after it has recorded; everything but `gradient` is the tape's own."""

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
        here()
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

        Dense ones together, in one message a dtype; tf.IndexedSlices as the rows of all ranks. None stays None and
        must be so on all ranks.
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
    """The operation with the factors before and after it: a predivided mean is a sum of parts that stay small."""
    how = op_of(op)
    if predivide == 1.0:
        return how, 1.0, 1.0
    if how is not Average:
        check(f"{call}(op={how.name})", gradient_predivide_factor=predivide)
    return ReduceOp.Sum, 1.0 / predivide, predivide / here().world.num_ranks
