"""What takes hours: `make soak` runs each module of PARTS; none of it is a part of `make test`."""

PARTS = ("tests.soak.versions", "tests.soak.older")
