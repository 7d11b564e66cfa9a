"""One collective under way on this rank: its buffer, its program, and which of its frames have come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.comm.tcp.schedule import Program, Send


class Call:
    """Made for one run of `program` over `buf`; the engine counts what is left of it."""

    __slots__ = (
        "_copies",
        "_done",
        "buf",
        "counts",
        "frames",
        "left",
        "number",
        "program",
        "raw",
        "tag",
        "ufunc",
        "what",
    )

    def __init__(
        self, what: str, tag: int, program: Program, buf: NDArray[Any], ufunc: np.ufunc, *, counts: bool = True
    ) -> None:
        self.what, self.tag, self.program, self.buf, self.ufunc = what, tag, program, buf, ufunc
        self.raw: NDArray[np.uint8] = buf.view(np.uint8)
        self.counts = counts
        """Whether it is a collective, of all ranks."""
        self.number = 0
        """Collectives of the communicator before this one, modulo 2**32; set when it begins."""
        self.frames = self.left = len(program.sends) + len(program.receives)
        self._done = bytearray(len(program.receives))
        self._copies: dict[Send, NDArray[np.uint8]] | None = None

    def keep_copies(self) -> None:
        """Copy each frame from now on when it becomes ready: it may have to wait for the frames of another call."""
        self._copies = {}
        self._copy_ready(self.program.sends)

    def payload(self, send: Send) -> NDArray[np.uint8]:
        """What this frame carries, which is ready."""
        if self._copies is not None:
            return self._copies[send]
        return self.raw[send.start * self.buf.itemsize : send.stop * self.buf.itemsize]

    def received(self, number: int) -> None:
        """The receive of this number is done."""
        self._done[number] = 1
        self.left -= 1
        if self._copies is not None:
            self._copy_ready([send for send in self.program.sends if number in send.after])

    def may(self, after: tuple[int, ...]) -> bool:
        """Whether these receives are done."""
        for number in after:  # noqa: SIM110 - this is asked for every frame, and a generator costs as much as the rest
            if not self._done[number]:
                return False
        return True

    def _copy_ready(self, sends: Sequence[Send]) -> None:
        assert self._copies is not None
        for send in sends:
            if self.may(send.after):
                start, stop = send.start * self.buf.itemsize, send.stop * self.buf.itemsize
                self._copies[send] = self.raw[start:stop].copy()


NO_CALL = Call("", 0, Program((), ()), np.empty(0, np.uint8), np.add)
