"""Seconds until a run trains on other ranks: an executor is lost for good, then one is added; and slots of this host.

    python -m benchmarks.elastic_slots [--launcher local|spark|torchrun|spare --torch PYTHON]

`spark` starts a standalone master and two workers of one core on this host, kills one worker with its executor
(SIGKILL), and starts it again once the run trains on one rank. `local` writes 1 and then 2 into a slots file.
`torchrun` is the peer: two elastic agents of one process each, one of which is killed and started again. Prints the
seconds from each change to the first step of all ranks. Both have a checkpoint each 15 steps. `spare` kills one of two
executors, which Spark replaces, or one of three with --spare-executors 1, in turns, and prints where the time goes
until the next step of both ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psutil
import pyspark

from benchmarks.random_kills import ROOT, command
from tests.training._tiny import write_table

WAIT_S = 600.0
PORT = 17077


def ended(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started."""
    for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
        child.kill()
    process.kill()
    process.wait()


class Lines:
    """What a driver prints, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.all: list[str] = []
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.all.append(line.rstrip())

    def wait(self, holds: Callable[[list[str]], bool]) -> None:
        """Wait until `holds(lines)`."""
        end = time.monotonic() + WAIT_S
        while not holds(self.all):
            if time.monotonic() > end or self._process.poll() is not None:
                sys.exit("\n".join([*self.all, f"no such line within {WAIT_S:.0f} s"]))
            time.sleep(0.05)


def starts(lines: Sequence[str]) -> int:
    """How many restarts have made a step."""
    return sum("and made its first step" in line for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=("local", "spark", "torchrun", "spare"), default="local")
    parser.add_argument("--torch", metavar="PYTHON", default=".venv-torch/bin/python")
    parser.add_argument("--master", default="local-cluster[{},1,1024]", help="for spare: also yarn")
    args = parser.parse_args(argv)
    if args.launcher == "torchrun":
        return by_torchrun(args.torch)
    if args.launcher == "spare":
        return by_spares(args.master)
    spark = args.launcher == "spark"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable, "SPARK_NO_DAEMONIZE": "1"}
    environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    home = Path(pyspark.__file__).parent
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())

        def start(*call: str) -> subprocess.Popen[str]:
            log = stack.enter_context(open(f"{folder}/spark.log", "a"))
            process = subprocess.Popen(
                [str(home / "bin/spark-class"), *call], env=environment, stdout=log, stderr=log, text=True
            )
            stack.callback(ended, process)
            return process

        def worker() -> subprocess.Popen[str]:
            where = ["--host", "127.0.0.1", "--work-dir", f"{folder}/work", "--webui-port", "0"]
            name = "org.apache.spark.deploy.worker.Worker"
            return start(name, "-c", "1", "-m", "1g", *where, f"spark://127.0.0.1:{PORT}")

        write_table(f"{folder}/data", records={"train": 400, "test": 30})
        call = command(f"{folder}/data", f"{folder}/run", 2, canonical=False)
        call[call.index("--epochs") + 1] = "400"
        slots = Path(folder, "slots")
        slots.write_text("2")
        call += ["--min-ranks", "1", "--max-ranks", "2"]
        workers: list[subprocess.Popen[str]] = []
        if spark:
            at = ["--host", "127.0.0.1", "--port", str(PORT), "--webui-port", "0"]
            start("org.apache.spark.deploy.master.Master", *at)
            workers += [worker(), worker()]
            call[call.index("--launcher") + 1] = "barrier"
            call += ["--master", f"spark://127.0.0.1:{PORT}"]
        else:
            call += ["--slots-file", str(slots)]
        driver = subprocess.Popen(
            call, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        stack.callback(ended, driver)
        lines = Lines(driver)
        lines.wait(lambda found: any("steps" in line and " 0/" not in line for line in found))
        time.sleep(5.0)
        for what, number in (("one slot lost", 1), ("the slot is back", 2)):
            before, began = starts(lines.all), time.monotonic()
            if not spark:
                slots.write_text(str(number))
            elif number == 1:
                ended(workers.pop())
            else:
                workers.append(worker())
            lines.wait(lambda found, before=before: starts(found) > before)  # type: ignore[misc] # bound now
            print(f"{what}: all {number} ranks made a step after {time.monotonic() - began:.1f} s", flush=True)
            time.sleep(3.0)
        driver.send_signal(signal.SIGTERM)
        code = driver.wait(60)
        print("\n".join(line for line in lines.all if not line.startswith("training")))
    print(f"SIGTERM: exit code {code}")
    return 0


def executor_of_a_rank() -> psutil.Process:
    """Java of an executor of this host that has a rank."""
    for one in psutil.process_iter(["cmdline"]):
        if (one.info["cmdline"] or [""])[-1].startswith("rank ") and len(one.parents()) > 2:
            java = one.parents()[2]
            if "CoarseGrainedExecutorBackend" in " ".join(java.cmdline()):
                return java
    sys.exit("no executor has a rank")


def by_spares(master: str, repeats: int = 5) -> int:
    """Measure restarts with and without a spare executor, and print."""
    options = "--conf spark.executor.memoryOverhead=1024m"
    seconds: dict[int, list[float]] = {0: [], 1: []}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    for _ in range(repeats):
        for spares, found in seconds.items():
            with ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                write_table(f"{folder}/data", records={"train": 400, "test": 30})
                call = command(f"{folder}/data", f"{folder}/run", 2, canonical=False)
                call[call.index("--epochs") + 1] = "400"
                call[call.index("--launcher") + 1] = "barrier"
                call += ["--master", master.format(2 + spares), "--spare-executors", str(spares)]
                environment["PYSPARK_SUBMIT_ARGS"] = f"--num-executors {2 + spares} {options} pyspark-shell"
                driver = subprocess.Popen(
                    call, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
                )
                stack.callback(ended, driver)
                lines = Lines(driver)
                lines.wait(lambda found: any(re.search(r" [1-9]\d*/\d+ steps", line) for line in found))
                time.sleep(8.0)  # for the spare's import
                executor_of_a_rank().kill()
                lines.wait(lambda found: starts(found) > 0)
                [line] = [line for line in lines.all if "and made its first step" in line]
                found.append(float(line.partition("first step ")[2].split()[0]))
                print(f"{spares} spares: {line}", flush=True)
    for spares, found in seconds.items():
        print(f"{spares} spares: median {median(found):.1f} s, {min(found):.1f} to {max(found):.1f}")
    return 0


def by_torchrun(python: str) -> int:
    """Measure torchrun's elastic agents and print."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context(open(folder / "log", "a"))

        def agent() -> subprocess.Popen[str]:
            flags = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-id=one"]
            script = [str(Path(__file__).parent / "peers" / "elastic_torch.py"), str(folder), "15"]
            call = [python, "-m", "torch.distributed.run", *flags, f"--rdzv-endpoint=127.0.0.1:{PORT}", *script]
            process = subprocess.Popen(call, stdout=log, stderr=log, text=True)
            stack.callback(ended, process)
            return process

        def wait(world: int, after: float) -> tuple[float, int]:
            """The moment and number of the first step of `world` ranks after a moment."""
            end = time.monotonic() + WAIT_S
            while time.monotonic() < end:
                for at, step, ranks in _lines(folder / "steps"):
                    if at > after and ranks == world:
                        return at, step
                time.sleep(0.05)
            sys.exit(f"no step of {world} ranks within {WAIT_S:.0f} s\n{(folder / 'log').read_text()[-3000:]}")

        agents = [agent()]
        time.sleep(1.0)  # the first one serves the rendezvous
        agents.append(agent())
        wait(2, 0.0)
        for what, number in (("one slot lost", 1), ("the slot is back", 2)):
            time.sleep(8.0)
            began = time.monotonic()
            before = max(step for at, step, _ in _lines(folder / "steps") if at <= began)
            if number == 1:
                ended(agents.pop())
            else:
                agents.append(agent())
            at, step = wait(number, began)
            print(f"{what}: all {number} ranks made a step after {at - began:.1f} s; {max(0, before + 1 - step)} steps "
                  "are repeated", flush=True)  # fmt: skip
    return 0


def _lines(file: Path) -> list[tuple[float, int, int]]:
    whole = file.read_text().splitlines() if file.exists() else []
    return [(float(at), int(step), int(ranks)) for at, step, ranks in (line.split() for line in whole if line)]


if __name__ == "__main__":
    sys.exit(main())
