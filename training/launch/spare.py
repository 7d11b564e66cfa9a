"""A process that has imported what a rank needs, and waits for the order of the next generation."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from training.launch.leftovers import end_left, new_mark
from training.launch.order import Place
from training.launch.process import RankProcess, start_process, write_line


@dataclass(frozen=True, slots=True)
class Waiting:
    """A spare process."""

    process: RankProcess
    mark: str

    def end(self) -> None:
        """Kill it and what it has started."""
        self.process.kill()
        self.process.wait()
        end_left(self.process.pid, self.mark)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Spares:
    """At most one spare process of a supervisor; used as a context manager, at whose end it is killed."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._ranks_per_node = place.hosts.count(place.hosts[place.rank])
        self._preload: str | None = None
        self._wanted = self._closed = False
        self._waiting: Waiting | None = None
        self._changed = threading.Condition()
        # The kernel ends a rank's process with the thread that has started it, so this one stays to the end.
        self._thread = threading.Thread(target=self._keep, name="spare-keeper", daemon=True)

    def __enter__(self) -> Spares:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if (left := self.take()) is not None:
            left.end()

    def follows(self, preload: str | None) -> None:
        """What the next spare shall import: `module:function`, called in it; None for no spare."""
        self._preload = preload

    def ask(self) -> None:
        """Have one started, unless one waits already."""
        with self._changed:
            self._wanted = self._preload is not None
            self._changed.notify_all()

    def take(self) -> Waiting | None:
        """The spare that waits; None where there is none, or it has died."""
        with self._changed:
            taken, self._waiting, self._wanted = self._waiting, None, False
        if taken is not None and taken.process.poll() is not None:
            taken.end()
            return None
        return taken

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._wanted and self._waiting is None))
                if self._closed:
                    return
                mark = new_mark()
                process = start_process(mark, self._ranks_per_node)
                self._waiting, self._wanted = Waiting(process, mark), False
            place = self._place
            write_line(
                process,
                {
                    "parent": os.getpid(),
                    "preload": self._preload,
                    "devices": list(place.devices),
                    "host": place.hosts[place.rank],
                },
            )
