"""How long the restarts of a launch took, and where their seconds went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.storage import strict
from training.control.failures import RankState

IN_PLACE, ANEW = 1, 2


@dataclass(slots=True)
class Restart:
    """One restart. Times are monotonic seconds of the driver."""

    generation: int
    """The one that was started."""
    level: int
    """1: the supervisors stayed, only ranks are new; 2: all is new, in Spark a new barrier job."""
    failed_at: float
    """The failure was seen."""
    ended_at: float
    """All ranks of the older generation had ended."""
    called_at: float
    """The driver had claimed the generation and asked for its ranks."""
    given_at: float
    """Supervisors that stay were there and idle; or those before them had been ended."""
    seconds: float | None = None
    """From the failure to the first step of all ranks; None where they never came to one."""
    parts: dict[str, float] = field(default_factory=dict)
    """Where `seconds` went, in order: words to seconds, of the rank that came last."""

    def stepped(self, states: Sequence[RankState]) -> None:
        """All ranks have made a step: the restart is over."""
        last = max(states, key=lambda state: state.marks.first_step_at or 0.0)
        marks, joined_at = last.marks, last.joined_at
        assert marks.first_step_at is not None and joined_at is not None
        points = [("end the other ranks", self.failed_at), ("claim", self.ended_at), ("supervisors", self.called_at)]
        points.append(("start the process", self.given_at))
        points.append(("start Python", marks.started_at or joined_at))
        points.append(("import", joined_at))
        points += [("first step" if phase == "train" else phase, at) for phase, at in marks.phases]
        self.seconds = marks.first_step_at - self.failed_at
        ends = [at for _, at in points[1:]] + [marks.first_step_at]
        for (word, at), end in zip(points, ends, strict=True):
            self.parts[word] = self.parts.get(word, 0.0) + end - at

    def to_json(self) -> dict[str, Any]:
        """What the run's result keeps: {generation, level, seconds, parts}."""
        parts = {word: round(seconds, 3) for word, seconds in self.parts.items()}
        seconds = None if self.seconds is None else round(self.seconds, 3)
        return {"generation": self.generation, "level": self.level, "seconds": seconds, "parts": parts}

    def __str__(self) -> str:
        return f"generation {self.generation} was started {told(self.to_json())}"


def told(restart: Mapping[str, Any]) -> str:
    """What `to_json` has made, in words; the parts of a tenth of a second and more."""
    how = "in place (level 1)" if restart["level"] == IN_PLACE else "by new supervisors (level 2)"
    if restart["seconds"] is None:
        return f"{how} and came to no step"
    words = ", ".join(f"{word} {seconds:.1f}" for word, seconds in restart["parts"].items() if seconds >= 0.05)
    return f"{how} and made its first step {restart['seconds']:.1f} s after the failure: {words}"


def checked(restarts: object, where: str) -> list[dict[str, Any]]:
    """A result's list of restarts; raises DataError naming what is not of its type."""
    found: list[dict[str, Any]] = []
    for number, value in enumerate(strict.items(restarts, where=where)):
        place = f"{where}[{number}]"
        restart = strict.obj(value, ("generation", "level", "seconds", "parts"), where=place)
        for name in ("generation", "level"):
            strict.count(restart[name], where=f"{place}: {name}")
        if restart["seconds"] is not None:
            strict.number(restart["seconds"], where=f"{place}: seconds")
        for word, seconds in strict.mapping(restart["parts"], where=f"{place}: parts").items():
            strict.number(seconds, where=f"{place}: {word}")
        found.append(restart)
    return found
