"""The tests marked `soak`: long documents, faults at random places, other projects' own suites.

`python -m tests.soak.marked [ARGUMENT ...]` runs them; arguments go to pytest.
"""

from __future__ import annotations

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["--soak", *sys.argv[1:]]))
