"""Tests that take long: `make soak` runs each module of PARTS; none of it is part of `make test`."""

PARTS = ("tests.soak.marked", "tests.soak.older", "tests.soak.versions")
