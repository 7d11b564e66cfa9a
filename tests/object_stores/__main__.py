"""`make object-store`: a store on this machine until Ctrl-C; SERVER=ceph or azure starts another one than moto."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from tests.object_stores.servers import SERVERS, why_not

PORT = 9580


def main() -> None:
    """Serve, and print what makes Lockstep use it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the server ends too
    name = sys.argv[1] if len(sys.argv) > 1 else "moto"
    if (why := why_not(name)) is not None:
        sys.exit(why)
    with tempfile.TemporaryDirectory() as folder, SERVERS[name](Path(folder), PORT) as server:
        kind, where = "Azure" if name == "azure" else "S3", f"{server.endpoint} with the bucket {server.url}"
        print(f"{kind} at {where}; Ctrl-C ends it. In another shell:", flush=True)
        for variable, value in server.environment.items():
            print(f"export {variable}={value}", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
