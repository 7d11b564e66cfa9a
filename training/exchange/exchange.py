"""The exchange of one step: a thread reduces buckets of gradients while later gradients are still computed.

No TensorFlow here: `lockstep.training.steps.reduction` calls `post`, `post_rows` and `finish` from the graph, with
NumPy arrays. docs/decisions/041-keras-on-ranks.md.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.storage.errors import CommunicationError, ConfigError
from lockstep.training.comm.base import Communicator, LinkUse
from lockstep.training.compression.bucket_sum import Tensors
from lockstep.training.compression.method import NONE, Compression
from lockstep.training.exchange.agreement import FLAGS, STOPS, Agreement, Inquiry, NonFiniteError, NonFinitePolicy
from lockstep.training.exchange.buckets import Layout, Slot, all_finite, copy_scaled, scaled
from lockstep.training.exchange.compare_ranks import compare_tensors
from lockstep.training.exchange.compressed import CompressedBuckets
from lockstep.training.exchange.sparse import Rows, Table, sum_rows

Array = NDArray[Any]
GRACE_S = 30.0  # beyond the communicator's own deadline, whose message is better
MAX_SKIPS = 10  # in a row: such a run learns nothing more
# Each skip halves a loss scale, which begins at some tens of thousands: this many have passed all it could repair.
MAX_SCALE_SKIPS = 60


class LentBuffer:
    """A flat, aligned buffer that knows whether views of it are still held."""

    def __init__(self, data: Array) -> None:
        self.data = data
        self._lent: list[weakref.ref[Array]] = []

    def view(self, slot: Slot) -> Array:
        return self.data[slot.start : slot.start + slot.size]

    def lend(self, slot: Slot) -> Array:
        view = self.view(slot).reshape(slot.shape)
        self._lent.append(weakref.ref(view))
        return view

    def is_lent(self) -> bool:
        self._lent = [view for view in self._lent if view() is not None]
        return bool(self._lent)


Task = Callable[[], bool]


class Reducer:
    """Sums buffers in a thread. One thread posts them; `wait` returns their results, or raises, in their order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._posted: queue.SimpleQueue[Array | Task | None] = queue.SimpleQueue()
        self._put_back: list[Task | None] = []  # at most one
        self._reduced: queue.SimpleQueue[BaseException | bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
        self._thread.start()

    def sum(self, flat: Array) -> None:
        """Post a buffer (n,), to be replaced by its sum over all ranks; the result is True. Several may be posted."""
        self._posted.put(flat)
        self._communicator.look_again()

    def run(self, task: Task) -> None:
        """Post another task, which begins when all before it is done."""
        self._posted.put(task)

    def wait(self, posts: int, what: str) -> bool:
        """Wait for the oldest `posts`; returns whether all results are True.

        Raises the first failure, or CommunicationError saying that `what` did not end.
        """
        patience_s = self._communicator.deadline_s + GRACE_S
        all_true = True
        for _ in range(posts):
            try:
                reduced = self._reduced.get(timeout=min(patience_s, threading.TIMEOUT_MAX))
            except queue.Empty:
                raise CommunicationError(
                    f"rank {self._communicator.rank}: {what} did not end",
                    got=f"silence for {patience_s:.0f} s",
                    allowed="an end or an error from the communicator by then",
                    next_step="Look at the other ranks' logs.",
                ) from None
            if isinstance(reduced, BaseException):
                raise reduced
            all_true = all_true and reduced
        return all_true

    def close(self) -> None:
        """End the thread; the communicator stays open."""
        self._posted.put(None)
        self._thread.join(GRACE_S)

    def _work(self) -> None:
        while (posted := self._put_back.pop() if self._put_back else self._posted.get()) is not None:
            try:
                if callable(posted):
                    self._done(posted())
                else:
                    self._communicator.all_reduce_each(partial(self._take, [posted]), self._done)
            except BaseException as error:  # raised again where the step waits
                self._done(error)

    def _take(self, first: list[Array]) -> Array | None:
        if first:
            return first.pop()
        if self._put_back:
            return None
        try:
            posted = self._posted.get_nowait()
        except queue.Empty:
            return None
        if posted is None or callable(posted):
            self._put_back.append(posted)
            return None
        return posted

    def _done(self, result: BaseException | bool = True) -> None:
        self._reduced.put(result)


class Exchange:
    """Sums of one optimizer step over all ranks, and what the ranks agree on with it.

    `scale` is n_r / G (None: 1 / num_ranks, ranks with equal batches): this rank's mean gradients, statistics and loss
    are multiplied by it before the sum, which is then the mean over the global batch. `scaled_loss`: the optimizer
    scales the loss, so that a gradient that is not finite skips the step instead of ending the run.
    """

    delay = 0
    """Steps after which a step's sum is returned."""
    apart = False
    """Whether each rank applies its own gradients, as if it were the only one."""
    sums_metrics = False
    """Whether the states of metrics are sums over all ranks where they are read."""
    served = False
    """Whether parameter servers apply gradients, and not the optimizer."""
    divides = False
    """Whether each rank gets and applies only its part of the sums (lockstep.training.strategies.zero)."""
    takes_rows = True
    """Whether a large table's gradient is sent by rows; else whole."""

    def __init__(
        self,
        communicator: Communicator,
        scale: float | None = None,
        *,
        scaled_loss: bool = False,
        non_finite: NonFinitePolicy = STOPS,
        compression: Compression = NONE,
        data: Communicator | None = None,
    ) -> None:
        """`data`: the ranks whose gradients are added, if they are not all of `communicator`."""
        self.communicator = communicator
        self.data = data = communicator if data is None else data
        """The ranks that divide a step's rows, and add gradients and statistics."""
        self.compression = compression
        """How dense float32 gradients are sent; statistics, control words and rows always travel whole."""
        self.scale = 1.0 / data.num_ranks if scale is None else scale
        self.skips_any = non_finite.skips and not scaled_loss
        """Whatever is not finite skips the step: the caller restores what the step has changed before its end."""
        self.step = 0
        """Optimizer steps done."""
        self.pending = 0
        """Micro-batches accumulated since the last optimizer step; 0 if the last batch ended one."""
        self.skips_in_a_row = 0
        self.agreement: Agreement | None = None
        self.error: BaseException | None = None
        self.meet: Callable[[], None] | None = None
        """Called before this rank waits for others in a step or in the first `use`; raises if they do not come, since
        they make another call on another communicator (lockstep.horovod)."""
        self.waited_s = 0.0
        """Seconds that the last step waited for its sums."""
        self._scaled_loss = scaled_loss
        self._wanted: set[str] = set()
        self._held_loss = 0.0
        self._layout: Layout | None = None
        self._tables: tuple[Table, ...] = ()
        self._names: tuple[str, ...] = ()
        self._pools: list[list[LentBuffer]] = []
        self._current: list[LentBuffer] = []
        self._rows: dict[int, Rows] = {}
        self._reducer = Reducer(data)
        self._safe = True  # no sum can become infinite by this rank's part of the step
        self._here: list[str] = []  # names of this rank's values that are not finite
        self._inquiry = Inquiry(communicator, non_finite)
        self._compressed = CompressedBuckets(communicator, compression)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent over the network so far, in all collectives."""
        return self.communicator.sent_bytes

    def links(self) -> dict[int, LinkUse]:
        """Return the use of the communicator's links."""
        return self.communicator.links()

    def compression_state(self) -> Tensors:
        """What compression keeps on this rank between steps, for a checkpoint."""
        return self._compressed.state()

    def restore_compression(self, parts: Sequence[Tensors], *, divide: bool) -> None:
        """Continue with the `compression_state` among the tensors of `parts`, before the first step.

        `divide`: `parts` are of all ranks of a run with another number of them; else of this rank.
        """
        self._compressed.restore(parts, divide=divide)

    @property
    def alone(self) -> bool:
        """Whether gradients stay in the graph: there is nothing to add."""
        return self.apart or (self.communicator.num_ranks == 1 and self.scale == 1.0)

    @property
    def together(self) -> bool:
        """Whether a step's loss is that of several ranks' rows."""
        return not self.apart

    @property
    def divides_tail(self) -> bool:
        """Whether statistics and control words share no bucket with gradients."""
        return self.delay > 0 or bool(self.compression)

    @property
    def applies(self) -> bool:
        """Whether the step that the ranks have just agreed on has sums to apply."""
        return self.agreement is not None and not self.agreement.skipped

    def factor(self, name: str) -> float:
        """What this rank's gradient or statistic of this name is multiplied by before it is added."""
        return self.scale

    def kept_factor(self, name: str) -> float:
        """What a gradient of this name is multiplied by where it stays in the graph."""
        return 1.0

    def resume(self, step: int) -> None:
        """Continue to count from `step`, the last one of a restored run."""
        self.step = step

    def want(self, flag: str) -> None:
        """Ask all ranks for stop, checkpoint or leave, or report this one `busy`; they agree with the next step."""
        if flag not in FLAGS:
            raise ConfigError(
                "ranks cannot agree on this flag", got=flag, allowed=", ".join(FLAGS), next_step="Use one of these."
            )
        self._wanted.add(flag)

    def withdraw(self, flag: str) -> None:
        """Withdraw a flag that no step has sent yet."""
        self._wanted.discard(flag)

    def hold(self, loss: np.ndarray) -> None:
        """Count a micro-batch whose gradients stay on this rank until the last one of the accumulation."""
        self._held_loss += float(loss)
        self.pending += 1

    def use(self, layout: Layout, names: Sequence[str], tables: Sequence[Table] = ()) -> None:
        """Set the buckets and the tables exchanged by rows; `names` are of gradients and statistics, for errors.

        A graph that is traced again passes the same. The first call is a collective: ConfigError if ranks differ.
        """
        if self._layout is not None and (self._layout, self._tables) != (layout, tuple(tables)):
            raise CommunicationError(
                "the model's gradients changed their shapes or number during the run",
                got=f"{len(layout.gradients)} gradients in {len(layout.sizes)} buckets, {len(tables)} by rows",
                allowed=f"{len(self._layout.gradients)} in {len(self._layout.sizes)} buckets, {len(self._tables)} by "
                "rows, as at the start",
                next_step="Freeze or unfreeze layers between runs, not during one.",
            )
        if self._layout is None:
            slots = (*layout.gradients, *layout.statistics)
            dense = [
                f"{_without_model(name)} {slot.shape} {layout.dtypes[slot.bucket]} in bucket {slot.bucket}"
                for name, slot in zip(names, slots, strict=True)
            ]
            self._meet()
            compare_tensors(
                self.data,
                [*dense, *(f"{_without_model(table.name)} {table.shape} {table.dtype}" for table in tables)],
            )
            self._layout, self._names, self._tables = layout, tuple(names), tuple(tables)
            self._pools = [[] for _ in layout.sizes]
            self._compressed.use(layout)

    def post(self, bucket: int, *gradients: Array) -> None:
        """Take the gradients of a bucket, in the order of `Layout.posted`; returns at once."""
        try:
            layout = self._of_layout()
            while len(self._current) <= bucket:
                self._current.append(self._free_buffer(len(self._current)))
            flat = self._current[bucket]
            for number, gradient in zip(layout.posted(bucket), gradients, strict=True):
                self._fill(flat, layout.gradients[number], gradient, number)
            if bucket < layout.first_tail:
                self._send(bucket, flat.data)
        except BaseException as error:
            self._fail(error)
            raise

    def post_rows(self, number: int, indices: Array, values: Array) -> None:
        """Take the gradient of table `number`: indices (n,), values (n, *row); returns at once."""
        try:
            values = scaled(values, self.factor(self._tables[number].name))
            # The lists of this step: if its sums come late, the next step has begun its own.
            self._reducer.run(partial(self._reduce_rows, number, indices.reshape(-1), values, self._rows, self._here))
        except BaseException as error:
            self._fail(error)
            raise

    def finish(self, loss: Array, *statistics: Array) -> list[Array]:
        """Take the rest and wait: the sums of all gradients, of all statistics, then indices and values of tables.

        Gradients are views of buffers, which are not reused while a view is held. Raises NonFiniteError on every rank,
        or the communicator's error.
        """
        try:
            layout = self._of_layout()
            if self.error is not None:
                raise self.error
            words = self._fill_rest(loss, statistics)
            for bucket in range(layout.first_tail, len(layout.sizes)):
                self._send(bucket, self._current[bucket].data)
            began = time.perf_counter()
            self._meet()
            what = f"the exchange of step {self.step + 1}"
            finite = self._reducer.wait(self._owed(layout), what)
            words = self._of_all(words)
            self.waited_s = time.perf_counter() - began
            finite = finite and words[1] == 0
            gradients = (*self._names[: len(layout.gradients)], *(table.name for table in self._tables))
            self._agree(words.tolist(), [] if finite else self._names_of_wrong(), gradients, loss)
            sums = self._summed(layout)
            # Copies: a variable keeps the memory of a statistic that is assigned to it, and these are small.
            sums += [self._current[slot.bucket].view(slot).reshape(slot.shape).copy() for slot in layout.statistics]
            for number in range(len(self._tables)):
                sums += [self._rows[number].indices, self._rows[number].values]
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._current, self._rows, self._safe, self._here = [], {}, True, []
        return sums

    def agree_alone(self, loss: Array, wrong: list[str], gradients: Sequence[str]) -> None:
        """End the step of a run with one rank, whose gradients stayed in the graph; raises NonFiniteError."""
        try:
            if self.error is not None:
                raise self.error
            self._here = list(wrong)
            self._agree(self._words(loss), wrong, gradients, loss)
        except BaseException as error:
            self._fail(error)
            raise

    def failed(self, error: BaseException) -> None:
        """Note that another collective of the step has failed, and end those of the other ranks."""
        self._fail(self.error or error)

    def fault(self) -> BaseException | None:
        """The error behind a step's failure, as it was raised: TensorFlow repeats only its text."""
        return self.error

    def close(self, reason: BaseException | None = None) -> None:
        """End the thread; the communicator stays open. Steps that were traced with this exchange raise `reason`."""
        self.error = reason or self.error
        self._reducer.close()

    def _meet(self) -> None:
        if self.meet is not None:
            self.meet()

    def _send(self, bucket: int, flat: Array) -> None:
        """Begin to sum a bucket of gradients; every rank has checked its values while it copied them."""
        if self._compressed.has(bucket):
            self._reducer.run(partial(self._compressed.reduce, bucket, flat, self.step + 1))
        else:
            self._reducer.sum(flat)

    def _of_all(self, words: Array) -> Array:
        """The sums over all ranks of the control words, of which `words` are those over the ranks of `data`."""
        return words

    def _owed(self, layout: Layout) -> int:
        """The results of this step that the thread still owes."""
        return len(layout.sizes) + len(self._tables)

    def _summed(self, layout: Layout) -> list[Array]:
        """What the step gets of each gradient's sum."""
        return [self._current[slot.bucket].lend(slot) for slot in layout.gradients]

    def sum_shapes(self, layout: Layout) -> list[tuple[int, ...]]:
        """The shapes of the gradients' sums that `finish` returns."""
        return [slot.shape for slot in layout.gradients]

    def update(self, optimizer: Any, sums: Sequence[Any], variables: Sequence[Any]) -> None:
        """Apply this rank's part of the sums in the step's graph, where the exchange `divides`."""
        raise NotImplementedError

    def _fill_rest(self, loss: Array, statistics: Sequence[Array]) -> Array:
        """Put this step's statistics and control words into their buffers; returns the view of the words."""
        layout = self._of_layout()
        while len(self._current) < len(layout.sizes):
            self._current.append(self._free_buffer(len(self._current)))
        for number, (slot, value) in enumerate(zip(layout.statistics, statistics, strict=True)):
            self._fill(self._current[slot.bucket], slot, value, len(layout.gradients) + number)
        words = self._current[layout.control.bucket].view(layout.control)
        words[:] = self._words(loss)
        words[0] *= self.scale
        words[1] = not self._safe
        return words

    def _words(self, loss: np.ndarray) -> list[float]:
        """This rank's control words without the second: its mean loss over the step's batches, and its flags."""
        words = [(self._held_loss + float(loss)) / (self.pending + 1), 0.0, *(flag in self._wanted for flag in FLAGS)]
        self._wanted.clear()
        return words

    def _agree(self, words: Sequence[float], wrong: list[str], gradients: Collection[str], own_loss: Array) -> None:
        """Set the agreement of the step by the ranks' summed `words`.

        `wrong` names what is not finite, the same on all ranks. With a scaled loss a step is skipped if one of
        `gradients` is in it; a smaller scale would not repair statistics. Ranks exchange the samples involved
        for each step that ends the run or is skipped without a scaled loss; `own_loss` is this rank's. Raises
        NonFiniteError on every rank.
        """
        step, batches = self.step + 1, self.pending + 1
        self.pending, self._held_loss = 0, 0.0
        loss = float(words[0])
        scaled = self._scaled_loss and any(name in gradients for name in wrong)
        if not scaled and not np.isfinite(loss):
            wrong = ["the loss", *wrong]
        skipped = bool(wrong) and (scaled or self.skips_any)
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        most = MAX_SCALE_SKIPS if scaled else MAX_SKIPS
        too_many = self.skips_in_a_row > most
        where = ""
        if wrong and (too_many or not scaled):
            where = self._ask_where(own_loss, skipped=skipped and not too_many)
        if wrong and (too_many or not skipped):
            after = f", after {most} steps in a row that were skipped for this" if too_many else ""
            raise NonFiniteError(
                f"step {step}: {wrong[0]} is not finite{after}",
                got=f"loss {loss}, over {self.communicator.num_ranks} ranks: {where}",
                allowed="finite numbers; all ranks stop at this step, and none has applied it",
                next_step="Lower the learning rate, clip gradients (clipnorm) or look at the data of this step.",
            )
        flags: dict[str, Any] = dict(zip(FLAGS, (bool(word > 0) for word in words[2:]), strict=True))
        self.step = step
        self.agreement = Agreement(step, loss, **flags, skipped=skipped, batches=batches)

    def _fill(self, flat: LentBuffer, slot: Slot, value: Array, number: int) -> None:
        if not copy_scaled(value.reshape(-1), self.factor(self._names[number]), flat.view(slot), self.data.num_ranks):
            self._safe = False
            if not np.isfinite(value).all():
                self._here.append(self._names[number])

    def _ask_where(self, loss: Array, *, skipped: bool) -> str:
        """Which ranks and samples made the step not finite, in words; a collective."""
        order = {name: number for number, name in enumerate(("the loss", *self._names))}
        here = self._here if np.isfinite(loss) else ["the loss", *self._here]
        here = sorted(here, key=lambda name: order.get(name, len(order)))
        return self._inquiry.hold(self.step + 1, here, skipped=skipped)

    def _of_layout(self) -> Layout:
        assert self._layout is not None, "use() comes first"
        return self._layout

    def _fail(self, error: BaseException) -> None:
        self.error = error
        if not isinstance(error, NonFiniteError):  # which every rank raises by itself
            self.communicator.abort(f"rank {self.communicator.rank}, step {self.step + 1}: {error}")

    def _free_buffer(self, bucket: int) -> LentBuffer:
        """A buffer of the bucket that has no reader any more; TensorFlow frees the last step's a little late."""
        pool = self._pools[bucket]
        found = next((flat for flat in pool if not flat.is_lent()), None)
        if found is None:
            layout = self._of_layout()
            # Zeroed: the gaps between slots are summed too. Aligned: TensorFlow takes it without a copy.
            found = LentBuffer(self.communicator.allocate(layout.sizes[bucket], layout.dtypes[bucket]))
            pool.append(found)
        return found

    def _names_of_wrong(self) -> list[str]:
        """The names of all gradients and statistics whose sums are not finite."""
        layout = self._of_layout()
        slots = (*layout.gradients, *layout.statistics)
        sums = [self._current[slot.bucket].view(slot) for slot in slots]
        sums += [self._rows[number].values for number in range(len(self._tables))]
        names = (*self._names, *(table.name for table in self._tables))
        return [name for name, value in zip(names, sums, strict=True) if not np.isfinite(value).all()]

    def _reduce_rows(self, number: int, indices: Array, values: Array, found: dict[int, Rows], here: list[str]) -> bool:
        rows = sum_rows(self.communicator, self._tables[number], indices, values)
        found[number] = rows
        finite = all_finite(rows.values.reshape(-1))
        if not finite and not np.isfinite(values).all():
            here.append(self._tables[number].name)
        return finite


def _without_model(name: str) -> str:
    """A name with only the last two parts of a variable's path: a loaded Sequential lacks the first, its own name."""
    words, space, path = name.rpartition(" ")
    return words + space + "/".join(path.split("/")[-2:])


class SoloExchange:
    """Functions of arrays for the graph of one rank, which sums nothing; `gradients` and `statistics` are names."""

    def __init__(self, exchange: Exchange, gradients: Sequence[str], statistics: Sequence[str]) -> None:
        self._exchange, self.gradients, self._statistics = exchange, tuple(gradients), tuple(statistics)
        self._wrong: set[str] = set()

    def look_at(self, numbers: Sequence[int]) -> Callable[..., np.int32]:
        """A function that notes which of the gradients with these numbers are not finite."""
        names = [self.gradients[number] for number in numbers]

        def look(*gradients: Array) -> np.int32:
            self._note(names, gradients)
            return np.int32(0)

        return look

    def finish(self, loss: Array, *statistics: Array) -> np.int32:
        """End the step: 1 if it is skipped; raises NonFiniteError."""
        self._note(self._statistics, statistics)
        wrong = [name for name in (*self.gradients, *self._statistics) if name in self._wrong]
        self._wrong.clear()
        self._exchange.agree_alone(loss, wrong, self.gradients)
        agreement = self._exchange.agreement
        return np.int32(agreement is not None and agreement.skipped)

    def _note(self, names: Sequence[str], values: Sequence[Array]) -> None:
        self._wrong.update(name for name, value in zip(names, values, strict=True) if not all_finite(value.reshape(-1)))
