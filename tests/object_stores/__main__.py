"""`make object-store`: an S3 on this machine until Ctrl-C."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from tests.object_stores.server import serving

PORT = 9580


def main() -> None:
    """Serve, and print what makes Lockstep use it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the server ends too
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), PORT) as server:
        print(f"S3 at {server.endpoint} with the bucket {server.url}; Ctrl-C ends it. In another shell:", flush=True)
        for name, value in server.environment.items():
            print(f"export {name}={value}", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
