"""The driver's replies to what ranks ask: where the others listen, and what the launch's handler knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.storage.errors import CommunicationError
from training.control.carry import error_to_json
from training.control.protocol import Channel, Tag, try_send
from training.control.rendezvous import Rendezvous
from training.control.task import Handler


class Answers:
    """Of one generation; `fault(error)` is told what the handler has raised. Thread-safe where the handler is."""

    def __init__(self, handler: Handler | None, num_ranks: int, fault: Callable[[BaseException], None]) -> None:
        self._handler, self._fault = handler, fault
        self._rendezvous = Rendezvous(num_ranks)

    def reply(self, rank: int, channel: Channel, document: dict[str, Any]) -> None:
        """Answer one request, however long that takes; an error is told to the rank."""
        kind, fields = str(document["kind"]), dict(document["fields"])
        answer: dict[str, Any] = {"id": int(document["id"])}
        try:
            if kind == "rendezvous":
                within_s = float(fields["within_s"])
                table = self._rendezvous.meet(rank, str(fields["host"]), int(fields["port"]), within_s)
                answer["reply"] = {"table": table}
            else:
                answer["reply"] = self.handle(rank, kind, fields)
        except Exception as error:  # told to the rank; the driver's own faults also end the launch, in `handle`
            answer["error"] = error_to_json(error)
        try_send(channel, Tag.REPLY, answer)

    def handle(self, rank: int, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """What the handler says. What it raises is raised, and ends the launch."""
        try:
            if self._handler is None:
                raise CommunicationError(
                    f"rank {rank} asked for `{kind}`, which this launch does not serve",
                    got=kind,
                    allowed="rendezvous",
                    next_step="Give the launcher a handler.",
                )
            return self._handler(rank, kind, fields)
        except Exception as error:
            self._fault(error)
            raise

    def abort(self, reason: str) -> None:
        """Wake all who wait for other ranks, with an error."""
        self._rendezvous.abort(reason)
