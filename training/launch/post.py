"""A supervisor that stays at its post, in a Spark task or a thread, while generations of its rank come and go."""

from __future__ import annotations

from collections.abc import Callable

from training.control.line import Line
from training.control.task import RankTask
from training.launch.leftovers import new_mark
from training.launch.order import Place
from training.launch.spare import Spares
from training.launch.supervisor import CONNECT_DEADLINE_S, Supervisor


def keep_post(place: Place, prepare: Callable[[RankTask], None] | None = None) -> int:
    """Carry out the driver's orders, one generation after the other, until it says that none follows.

    `prepare(task)` is called before each. A driver that is gone, or silent for `limits.lost_s`, ends the post too,
    once the rank has ended (which its own connection sees to). Returns the last rank's exit code, 0 before the first.
    Raises CommunicationError when the driver cannot be reached at the start of the session or of a generation.
    """
    limits, code = place.limits, 0
    with Spares(place) as spares:
        deadline_s = min(CONNECT_DEADLINE_S, limits.start_s)
        line = Line(
            place.control, place.secret, place.rank, deadline_s=deadline_s, lost_s=limits.lost_s, on_spare=spares.ask
        )
        try:
            while (document := line.next_order()) is not None:
                waiting = spares.take()
                order = place.order(document, waiting.mark if waiting else new_mark())
                spares.follows(order.task.preload)
                if prepare is not None:
                    prepare(order.task)
                try:
                    code = Supervisor(order, waiting.process if waiting else None).run()
                finally:
                    if waiting is not None:
                        waiting.end()
                line.say_idle()
        finally:
            line.close()
    return code
