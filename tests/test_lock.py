"""requirements.lock names all that is installed, in the pinned versions, by digest and without an index's address."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lockstep.jobs._checks import requirements
from tests.builders.pins import pins

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[\w.]+)(?: ; (?P<marker>[^\\]+?))?"
    r"(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)"
)


def locked() -> dict[str, str]:
    """Package -> version on this Python and machine. Each line of the file is part of an entry, or a comment."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    found, rest = list(LINE.finditer(body)), LINE.sub("", body)
    assert not rest.strip(), f"no entries with digests: {rest.strip()[:200]}"
    here = [match for match in found if match["marker"] is None or Marker(match["marker"]).evaluate()]
    assert len({match["name"] for match in here}) == len(here)
    return {match["name"]: match["version"] for match in here}


def test_the_lock_has_the_pinned_versions() -> None:
    found = locked()
    wrong = {name: pin for name, pin in pins().items() if found.get(canonicalize_name(name)) != pin}
    assert not wrong, f"run scripts/lock.sh: {wrong}"


def test_the_lock_has_all_that_is_needed() -> None:
    """`pip install --require-hashes` refuses a package that the file lacks."""
    from importlib.metadata import requires

    found, seen = locked(), set()
    todo = [Requirement(name) for name in requirements()]
    while todo:
        needed = todo.pop()
        name = canonicalize_name(needed.name)
        assert needed.specifier.contains(found[name], prereleases=True), f"run scripts/lock.sh: {needed}"
        for extra in ("", *needed.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                below = map(Requirement, requires(name) or ())
                todo += [one for one in below if one.marker is None or one.marker.evaluate({"extra": extra})]
    assert len(seen) > len(requirements())
