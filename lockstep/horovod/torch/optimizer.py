"""`hvd.DistributedOptimizer` for PyTorch: gradients are summed bucket after bucket while backward computes the others.

Buckets and their order are fixed, as in DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020): ranks
need not agree on which gradient comes next, as Horovod's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch

from lockstep.horovod.arrays import Average, ReduceOp, Sum, op_of
from lockstep.horovod.runtime import absent, check, runtime
from lockstep.horovod.torch.collectives import Compression, Compressor, after_all, in_turn, tensor_of
from lockstep.storage.errors import ConfigError, require
from lockstep.training.comm.base import Communicator
from lockstep.training.exchange.buckets import lay_out
from lockstep.training.exchange.compare_ranks import compare_tensors
from lockstep.training.exchange.exchange import Reducer

_DTYPES = {
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:
    """Make an optimizer reduce gradients over all ranks before it applies them; returns the same object.

    The mean over ranks, or the sum with `op=hvd.Sum`. With `backward_passes_per_step` k, each rank adds the gradients
    of k backward passes and the ranks reduce once. A `gradient_predivide_factor` changes where the mean divides, not
    its value: here each rank divides first. A parameter without a gradient takes part with zeros. After the step
    `parameter.grad` is a view of a buffer that the next backward pass fills. A collective: all ranks must call it, and
    ConfigError is raised if their parameters differ.

    It gets two methods of Horovod's: `synchronize()` waits for the gradients, to clip them for example;
    `with optimizer.skip_synchronize(): optimizer.step()` then applies them.
    """
    check("DistributedOptimizer", num_groups=num_groups, groups=groups, process_set=process_set)
    how, here = op_of(op), runtime()
    if how not in (Average, Sum):
        absent(f"DistributedOptimizer(op={how.name})", instead="Use op=hvd.Average or op=hvd.Sum.")
    if gradient_predivide_factor != 1.0 and how is Sum:
        check("DistributedOptimizer(op=Sum)", gradient_predivide_factor=gradient_predivide_factor)
    allowed, next_step = "hvd.Compression.none or hvd.Compression.fp16", "Use one of these."
    require(compression in (Compression.none, Compression.fp16), "compression", str(compression), allowed, next_step)
    passes = backward_passes_per_step
    require(passes >= 1, "backward_passes_per_step", str(passes), "1 or more", "Correct backward_passes_per_step.")
    allowed, next_step = "an optimizer of torch.optim", "Wrap each optimizer once, with PyTorch's own inside."
    right = isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, _Distributed)
    require(right, "the optimizer of hvd.DistributedOptimizer", type(optimizer).__name__, allowed, next_step)
    scale = 1.0 if how is Sum else 1.0 / here.world.num_ranks
    named = _named(optimizer, named_parameters)
    group = in_turn(here.group_of_optimizer).result()
    exchange = GradientExchange(group, named, scale, compression.wire, passes, sparse_as_dense)
    check_step = here.add_exchange(exchange)
    exchange.meet = partial(after_all, check_step)
    # Not a new optimizer: schedulers that hold this one, and its state, stay as they are.
    optimizer.register_step_pre_hook(exchange.before_step)
    optimizer.__class__ = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {"_exchange": exchange})
    return optimizer


class _Distributed:
    """The methods that a distributed optimizer has more than its own class."""

    _exchange: GradientExchange

    def synchronize(self) -> None:
        """Wait until `parameter.grad` of all parameters are reduced."""
        self._exchange.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` apply gradients as they are in this context; call `synchronize()` before."""
        self._exchange.applies_as_is = True
        try:
            yield
        finally:
            self._exchange.applies_as_is = False

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients as the optimizer's own method does. Raises ConfigError between backward and step, while
        gradients are exchanged.
        """
        if self._exchange.posted:
            raise ConfigError(
                "zero_grad was called while gradients are exchanged",
                got="optimizer.zero_grad() after backward, before step",
                allowed="zero_grad before backward, or after optimizer.step() or optimizer.synchronize()",
                next_step="Move the call.",
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]  # of torch.optim.Optimizer


def _named(optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None) -> list[tuple[str, Any]]:
    """The optimizer's parameters that learn, with their names, in its order."""
    ours = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    given = [] if named_parameters is None else list(named_parameters)
    names = {id(parameter): name for name, parameter in given}
    twice = sorted({name for name, _ in given if [other for other, _ in given].count(name) > 1})
    allowed, next_step = "each name once", "Give the parameters of several models different names."
    require(not twice, "named_parameters", f"several with the name {', '.join(twice)}", allowed, next_step)
    unnamed = 0 if named_parameters is None else sum(id(parameter) not in names for parameter in ours)
    allowed, next_step = "every parameter of the optimizer", "Pass model.named_parameters() of all its models."
    require(not unnamed, "named_parameters", f"{unnamed} parameters of the optimizer less", allowed, next_step)
    found = [(names.get(id(one), f"parameter {number}"), one) for number, one in enumerate(ours) if one.requires_grad]
    wrong = next((f"{name}: {one.dtype}" for name, one in found if one.dtype not in _DTYPES), "")
    next_step = "Use a real floating type."
    require(not wrong, "hvd.DistributedOptimizer", wrong, ", ".join(map(str, _DTYPES)), next_step)
    return found


class GradientExchange:
    """The gradients of one optimizer, reduced in buckets in reverse order of the parameters."""

    def __init__(
        self,
        communicator: Communicator,
        named: Sequence[tuple[str, Any]],
        scale: float,
        wire: torch.dtype | None,
        passes: int,
        sparse_as_dense: bool,
    ) -> None:
        self.applies_as_is = False
        """Whether `step` leaves gradients as they are."""
        self.posted = 0
        """Buckets whose exchange has begun and not ended."""
        self.meet: Callable[[], None] = lambda: None
        """Called before this rank waits for others' gradients; raises if they make another call."""
        self._communicator, self._scale, self._passes = communicator, scale, passes
        self._sparse_as_dense = sparse_as_dense
        self._error: BaseException | None = None
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._done = [0] * len(named)  # backward passes of each parameter since the last exchange
        self._is_reduced = False
        self._hooks: list[Any] = []
        if communicator.num_ranks == 1:
            return
        dtypes = [_DTYPES[wire if wire and one.element_size() > 2 else one.dtype] for one in self._parameters]
        specs = [(tuple(one.shape), dtype) for one, dtype in zip(self._parameters, dtypes, strict=True)]
        layout = lay_out(specs, (), 0)
        compare_tensors(communicator, [f"{name} {spec}" for name, spec in zip(self._names, specs, strict=True)])
        self._reducer = Reducer(communicator)
        self._slots = layout.gradients
        self._members = [found for bucket in range(len(layout.sizes)) if (found := layout.posted(bucket))]
        self._missing = [len(members) for members in self._members]  # gradients that a bucket waits for
        self._flats = [
            communicator.allocate(size, kind) for size, kind in zip(layout.sizes, layout.dtypes, strict=True)
        ]
        self._views = [
            tensor_of(self._flats[slot.bucket][slot.start : slot.start + slot.size]).view(slot.shape)
            for slot in layout.gradients
        ]
        for number, parameter in enumerate(self._parameters):
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._ready, number)))

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook of the optimizer: reduce the gradients, after the closure if `step` has one."""
        if self.applies_as_is:
            self._is_reduced = False
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._finish_once()
            self._is_reduced = False
            return None

        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.finish()
            return loss

        return args[:1], {**kwargs, "closure": reduced}

    def _finish_once(self) -> None:
        if not self._is_reduced:
            self.finish()

    def finish(self) -> None:
        """Wait until all gradients are reduced."""
        if self._communicator.num_ranks == 1:
            self.meet()  # which only reports progress
            return
        try:
            self._post(everything=True)
            self.meet()
            self._reducer.wait(self.posted, "the exchange of gradients")
        except BaseException as error:
            self._error = error
            self._communicator.abort(f"rank {self._communicator.rank}: {error}")  # or the thread waits on
            raise
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.dtype == view.dtype and parameter.device == view.device:
                parameter.grad = view
            else:
                parameter.grad = view.to(parameter.device, parameter.dtype)
        self.posted, self._is_reduced = 0, True
        self._missing = [len(members) for members in self._members]
        self._done = [0] * len(self._parameters)

    def fault(self) -> BaseException | None:
        """The error behind a step's failure."""
        return self._error

    def close(self) -> None:
        """End the thread; gradients stay on their rank from now on."""
        for hook in self._hooks:
            hook.remove()
        if self._communicator.num_ranks > 1:
            self._reducer.close()

    def _ready(self, number: int, parameter: Any) -> None:
        self._is_reduced = False
        self._done[number] += 1
        if self._done[number] < self._passes:
            return
        if self._done[number] > self._passes:
            raise ConfigError(
                f"{self._names[number]} has more gradients than its optimizer expects before a step",
                got=f"backward pass {self._done[number]}",
                allowed=f"backward_passes_per_step={self._passes}",
                next_step="Call optimizer.step() or optimizer.synchronize(), or raise backward_passes_per_step.",
            )
        self._missing[self._slots[number].bucket] -= 1
        self._post()

    def _post(self, everything: bool = False) -> None:
        """Post the next buckets that are complete, in their order, or all."""
        while self.posted < len(self._members) and (everything or not self._missing[self.posted]):
            with torch.no_grad():
                for number in self._members[self.posted]:
                    self._fill(number)
            self._reducer.sum(self._flats[self.posted])
            self.posted += 1

    def _fill(self, number: int) -> None:
        gradient, view = self._parameters[number].grad, self._views[number]
        if gradient is None:
            view.zero_()
            return
        if gradient.is_sparse:
            if not self._sparse_as_dense:
                raise ConfigError(
                    f"the gradient of {self._names[number]} is sparse",
                    got="an Embedding with sparse=True",
                    allowed="dense gradients",
                    next_step="Pass sparse_as_dense=True to hvd.DistributedOptimizer, or use sparse=False.",
                )
            gradient = gradient.to_dense()
        if gradient.device == view.device:
            torch.mul(gradient, self._scale, out=view)
        else:
            view.copy_(gradient * self._scale)
