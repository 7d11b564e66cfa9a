"""Datasets and runs of an older revision: this one writes the same datasets, verifies the old ones, and resumes runs
that were killed in mid-epoch to the same weights, bit for bit.

`python -m tests.soak.older [REVISION] [--parts local hdfs]` checks the older revision out of this repository's history
into a temporary folder and runs both with this environment's packages. For TFRecord and Parquet, on a local disk and on
a real HDFS: the old code writes a dataset, trains one run to its end and is killed with its two ranks in another one;
this code verifies dataset and run, resumes the run, and its last checkpoint must have the files of the one that was not
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.storage.fs import filesystem
from lockstep.storage.urls import join
from tests.cluster.daemons import Cluster

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "fe0412c53378e3a20b9f597816e666b3baf84b6c"  # the last revision with storage and features at the top level
LIMIT_S = 1800.0
IMAGES = ["data/fashion-mnist/t10k-images-idx3-ubyte.gz", "data/fashion-mnist/t10k-labels-idx1-ubyte.gz"]
WEBLOG = ["--input", "data/weblogs/elastic_apache_combined_8001-9500.log.gz", "--log-format", "combined"]
SOURCES = {  # format -> the job and its arguments, the model, a global batch, epochs, steps between checkpoints
    "tfrecord": (
        "lockstep.jobs.etl_logs",
        [*WEBLOG, "--label", "length(page) > 20", "--split", "80/20"],
        "logistic",
        32,
        30,
        40,
    ),
    "parquet": (
        "lockstep.jobs.etl_images",
        ["--source", "idx", "--input", *IMAGES, "--split", "80/20"],
        "resnet8",
        64,
        2,
        10,
    ),
}


class Difference(Exception):
    """This revision did not do what the older one did."""


def run(code: Path, module: str, *arguments: str, env: dict[str, str]) -> str:
    """Run `python -m MODULE` in a checkout; returns its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=code, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        output = (done.stdout + done.stderr)[-2000:]
        raise Difference(f"{module} in {code.name} exited with {done.returncode}:\n{output}")
    return done.stdout


def train(dataset: str, place: str, form: str) -> list[str]:
    _, _, model, batch, epochs, every = SOURCES[form]
    return ["--dataset", dataset, "--run", place, "--model", model, "--num-ranks", "2", "--global-batch", str(batch),
            "--epochs", str(epochs), "--checkpoint-every", str(every), "--audit", "--launcher", "local"]  # fmt: skip


def checkpoints(place: str) -> list[str]:
    fs, folder = filesystem(place), join(place, "checkpoints")
    if not fs.exists(folder):
        return []
    names = sorted(entry.name for entry in fs.list(folder))
    return [name for name in names if name.startswith("step-")]


def files_of(place: str) -> tuple[str, dict[str, object]]:
    """The newest checkpoint's step and its files with their digests: weights, optimizer, metrics of both ranks."""
    name = checkpoints(place)[-1]
    manifest = json.loads(filesystem(place).read_bytes(join(place, "checkpoints", name, "_manifest.json")))
    return name.split(".")[0], manifest["files"]


def killed(code: Path, arguments: list[str], place: str, env: dict[str, str]) -> str:
    """Train until the second checkpoint is there, then a moment more, and kill driver and ranks at once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.jobs.train", *arguments],
        cwd=code, env=env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: len(checkpoints(place)) >= 2, process)
        time.sleep(0.3)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # ranks end with their parent
        process.wait()
    if "results" in {entry.name for entry in filesystem(place).list(place)}:
        raise Difference(f"{place} was finished before it could be killed; give it more steps")
    return checkpoints(place)[-1]


def wait_for(there: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + LIMIT_S
    while not there():
        if process.poll() is not None or time.monotonic() > until:
            raise Difference(f"no second checkpoint: lockstep train exited with {process.poll()}")
        time.sleep(0.05)


def compare(old: Path, place: str, form: str, env: dict[str, str]) -> None:
    """One format at one place, a local folder or hdfs://."""
    job, arguments, *_ = SOURCES[form]
    master = ["--format", form, "--master", "local[2]"]
    mine, theirs = join(place, f"{form}-new"), join(place, f"{form}-old")
    whole, cut = join(place, f"{form}-whole"), join(place, f"{form}-killed")
    run(old, job, *arguments, *master, "--output", theirs, env=env)
    run(ROOT, job, *arguments, *master, "--output", mine, env=env)
    digests = [json.loads(filesystem(one).read_bytes(join(one, "_manifest.json")))["digest"] for one in (theirs, mine)]
    if len(set(digests)) != 1:
        raise Difference(f"{form}: the old revision wrote the dataset {digests[0]}, this one {digests[1]}")
    print(f"{form}: both write the dataset {digests[0][:16]}...", flush=True)
    run(old, "lockstep.jobs.train", *train(theirs, whole, form), env=env)
    at = killed(old, train(theirs, cut, form), cut, env)
    run(ROOT, "lockstep.jobs.verify", theirs, env=env)
    run(ROOT, "lockstep.jobs.verify", cut, env=env)
    run(ROOT, "lockstep.jobs.train", *train(theirs, cut, form), env=env)
    run(ROOT, "lockstep.jobs.verify", cut, env=env)
    expected, found = files_of(whole), files_of(cut)
    if expected != found:
        raise Difference(f"{form}: the last checkpoint is {found}, without a kill it is {expected}")
    print(f"{form}: killed after {at}, resumed by this revision to {found[0]}: the same files", flush=True)


@contextmanager
def places(parts: Sequence[str], folder: Path) -> Iterator[list[tuple[str, dict[str, str]]]]:
    """Where to work, with the environment of the jobs: a local folder, and an HDFS that is started and ended here."""
    plain = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    found = [(str(folder / "local"), plain)] if "local" in parts else []
    cluster = Cluster(folder / "cluster")
    try:
        if "hdfs" in parts:
            cluster.start_hdfs()
            os.environ.update(cluster.env)
            found.append((f"{cluster.hdfs_url}/older", {**plain, **cluster.env}))
        yield found
    finally:
        cluster.stop()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default=BEFORE)
    parser.add_argument("--parts", nargs="+", choices=("local", "hdfs"), default=["local", "hdfs"])
    parser.add_argument("--formats", nargs="+", choices=sorted(SOURCES), default=sorted(SOURCES))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="lockstep-older-") as temporary:
        old = Path(temporary) / "old"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(old), args.revision], cwd=ROOT, check=True)
        try:
            with places(args.parts, Path(temporary)) as found:
                for place, env in found:
                    print(f"{'hdfs' if place.startswith('hdfs') else 'local disk'}:", flush=True)
                    for form in args.formats:
                        compare(old, place, form, env)
        except Difference as difference:
            print(f"FAILED {difference}")
            return 1
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
