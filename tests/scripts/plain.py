"""A script that calls no other rank: it says who it is, reads what came with it and ends as its arguments say."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

RANK = int(os.environ["LOCKSTEP_RANK"])


def main() -> None:
    """Say who this is; the last argument is what rank 1 shall do."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCKSTEP_NUM_RANKS", "MASTER_ADDR", "OMP_NUM_THREADS")
    print("environment", *(os.environ[name] for name in names))
    print("arguments", *sys.argv[1:])
    print("at the terminal:", sys.stdin.read() or "nothing")
    files = os.environ.get("LOCKSTEP_FILES", "")
    if Path(files, "words.txt").exists():
        import beside  # type: ignore[import-not-found]  # it comes by --files

        print("files", beside.WORD, Path(files, "words.txt").read_text().strip(), __file__ == sys.argv[0])
    sys.stderr.write("half a line")
    sys.stderr.flush()
    sys.stdout.buffer.write(b" and \xff\xfe\n 50 %\r100 %\r\n")
    atexit.register(print, "at exit")
    last = sys.argv[-1]
    if last not in ("stopped", "killed"):  # a thread's words could come before the end, on a loaded machine
        threading.Timer(0.3, print, ["a thread's end"]).start()
    if last == "rude":
        be_rude()
    if last == "generations" and os.environ["LOCKSTEP_GENERATION"] == "1":
        raise RuntimeError("the first start fails")
    if RANK != 1:
        if last in ("stopped", "killed", "ctrl-c"):
            time.sleep(120)  # it would wait for rank 1
        return
    if last == "exit 3":
        sys.exit(3)
    if last == "raises":
        raise ValueError("out of luck")
    if last == "interrupts":
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise KeyboardInterrupt
    if last == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if last == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if last == "ctrl-c":
        time.sleep(120)
    sys.exit(0)


def be_rude() -> None:
    """Leave a daemon and a fork that runs to the script's end as well, and close the output."""
    daemon = subprocess.Popen(["sleep", "3600"], start_new_session=True, stdout=subprocess.DEVNULL)
    sys.stdout.write(f"daemon {daemon.pid}\n")
    if os.fork() == 0:
        print("the fork goes its way")
        sys.exit(7)
    os.wait()
    sys.stdout.close()
    os.close(1)
    sys.stderr = None


if __name__ == "__main__":
    main()
