"""Tests that take long: `make soak` runs each module of PARTS; none of it is part of `make test`."""

PARTS = ("tests.soak.marked", "tests.soak.kills", "tests.soak.versions", "tests.soak.audit")
NOT_RUN = 3  # a part that could not do its work here, and says why
