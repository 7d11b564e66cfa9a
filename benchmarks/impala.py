"""CartPole-v1 by `lockstep agent`: returns of five seeds, the worth of V-trace at a lag of 8, and steps a second.

python -m benchmarks.impala --seeds 5          whole runs of 500,000 steps
python -m benchmarks.impala --lag 7            in one process: weights 8 updates old, with V-trace and without; lag 0
python -m benchmarks.impala --speed 3 --rllib /path/to/python     in turns with RLlib's IMPALA
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LAG = 8
# Twice the default: at lower rates 8 updates hardly change a policy (rho 0.98), so there is little to correct.
LAG_RATE = 2e-3
LAG_STEPS = 100_000
ENVS, UNROLL = 8, 20  # the defaults
PEER_BATCH = 3 * ENVS * UNROLL  # its default is 500 steps; ours is one trajectory
WARM_S, WINDOW_S = 15.0, 15.0  # Ray takes about 10 s to come to speed
LIMIT_S = 120.0
END_S = 15.0


def run_seed(seed: int, actors: int, steps: int) -> dict[str, float]:
    """A whole run by the command; its result, its seconds, and at which step 450 was seen."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder, "run"))
        words = ["--env", "CartPole-v1", "--run", run, "--seed", str(seed), "--steps", str(steps)]
        command = [sys.executable, "-m", "lockstep.jobs.agent", *words, "--actors", str(actors), "--json"]
        began = time.monotonic()
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        result["seconds"] = time.monotonic() - began
        parts = sorted(Path(run, "metrics").glob("*/*.jsonl"))
        rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
        reached = [row["env_steps"] for row in rows if (row["mean_return"] or 0) >= 450]
        result["reached"] = reached[0] if reached else None
    return result


def seeds(count: int) -> None:
    print("| seed | mean return of the last 100 episodes | 450 seen at step | mean lag | largest lag | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for seed in range(count):
        found = run_seed(seed, 2, 500_000)
        lag = found["lag_sum"] / found["trajectories"]
        cells = (seed, f"{found['mean_return']:.1f}", found["reached"], f"{lag:.1f}", found["lag_max"])
        print(f"| {' | '.join(map(str, cells))} | {found['seconds']:.0f} |", flush=True)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How weights that are `lag` updates old are corrected."""

    name: str
    lag: int
    correct: bool


ARMS = (
    Arm(name="V-trace, lag 8", lag=LAG, correct=True),
    Arm(name="no correction, lag 8", lag=LAG, correct=False),
    Arm(name="lag 0", lag=0, correct=True),
)


def lagged(seed: int, arm: Arm, steps: int) -> dict[str, float]:
    """Play each trajectory with weights that are exactly `arm.lag` updates old (fewer in the first updates, when there
    are none). Returns the mean return of all episodes, of the last 100, and the mean and least rho of an update."""
    from lockstep.training.actors.config import AgentConfig
    from lockstep.training.actors.player import PLAYED, Player
    from lockstep.training.actors.updates import Updates
    from lockstep.training.comm import SoloCommunicator

    config = AgentConfig(env="CartPole-v1", run="/nowhere", seed=seed, steps=steps, learning_rate=LAG_RATE)
    player = Player(config.env, config.envs, config.unroll, config.widths, seed=[seed])
    updates = Updates(config, player.envs.shape, SoloCommunicator(), correct=arm.correct)
    returns: list[float] = []
    rho: list[float] = []
    past: deque[np.ndarray] = deque(maxlen=arm.lag + 1)
    done = 0
    while done < steps:
        past.append(updates.weights())
        player.policy.flat[:] = past[0]
        record = player.play()
        updates.update([record], done / steps, [0])
        rho.append(updates.rho)
        done += int((record["what"] & PLAYED > 0).sum())
        returns.extend(record["returns"][~np.isnan(record["returns"])].tolist())
    found = {"all": float(np.mean(returns)), "last": float(np.mean(returns[-100:]))}
    return found | {"rho": float(np.mean(rho)), "least_rho": min(rho)}


def lag(count: int, first: int, steps: int) -> None:
    """All arms of a seed in turns, then medians and spreads, and in how many seeds V-trace is ahead."""
    print("| seed | arm | mean return of all episodes | of the last 100 | mean rho | least rho of an update |")
    print("| --- | --- | --- | --- | --- | --- |")
    every: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in ARMS}
    for seed in range(first, first + count):
        for arm in ARMS:
            found = lagged(seed, arm, steps)
            every[arm.name].append(found)
            cells = f"{found['all']:.1f} | {found['last']:.1f} | {found['rho']:.3f} | {found['least_rho']:.3f}"
            print(f"| {seed} | {arm.name} | {cells} |", flush=True)
    for name, runs in every.items():
        print(f"| all | {name} | {spread([run['all'] for run in runs])} | {spread([run['last'] for run in runs])} |")
    corrected, plain = every[ARMS[0].name], every[ARMS[1].name]
    ahead = sum(one["all"] > other["all"] for one, other in zip(corrected, plain, strict=True))
    print(f"V-trace is ahead of no correction in {ahead} of {count} seeds, by the mean return of all episodes")


def spread(values: list[float], digits: int = 1) -> str:
    """Median and range."""
    middle, low, high = (f"{one:.{digits}f}" for one in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def steps_per_s(command: list[str]) -> tuple[float, str]:
    """The environment steps a second of a command that prints `N steps ...` from time to time, between its first such
    line after WARM_S seconds of steps and its last one WINDOW_S later; and its first line. It is ended then, or with an
    error after LIMIT_S."""
    began, first, marks = time.monotonic(), "", list[tuple[float, int]]()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    guard = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
    guard.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            first = first or line.strip()
            if found := re.match(r"(\d+) steps", line):
                marks.append((time.monotonic(), int(found[1])))
            marks = [mark for mark in marks if mark[1] > 0]
            if marks and marks[-1][0] - marks[0][0] > WARM_S + WINDOW_S:
                break
    finally:
        guard.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    warm = [mark for mark in marks if mark[0] - marks[0][0] >= WARM_S]
    if len(warm) < 2:
        raise SystemExit(f"{command[:3]} reported steps {len(marks)} times within {time.monotonic() - began:.0f} s")
    (start, before), (end, after) = warm[0], warm[-1]
    return (after - before) / (end - start), first


def speed(turns: int, rllib: str) -> None:
    """Both sides in turns with 1 and 2 actors: the same environments, steps in a trajectory, layers and rate; each with
    batches of about its default size."""
    peer = [rllib, str(Path(__file__).parent / "peers" / "rllib_peer.py"), "--envs", str(ENVS), "--unroll", str(UNROLL)]
    found: dict[str, list[float]] = {}
    for turn in range(turns):
        for actors in (1, 2):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                words = ["--env", "CartPole-v1", "--run", f"{folder}/run", "--actors", str(actors)]
                ours, _ = steps_per_s([sys.executable, "-m", "lockstep.jobs.agent", *words, "--steps", str(10**8)])
            theirs, versions = steps_per_s([*peer, "--batch", str(PEER_BATCH), "--actors", str(actors)])
            sides = {f"lockstep agent, {actors} actors": ours, f"RLlib IMPALA, {actors} actors, {versions}": theirs}
            for name, value in sides.items():
                found.setdefault(name, []).append(value)
                load = os.getloadavg()[0]
                print(f"turn {turn}: {name}: {value:.0f} steps a second, load {load:.1f}", flush=True)
    print("| side | steps a second: median (range) | ratio to ours of the same turn: median (range) |")
    for name, values in found.items():
        mine = next(found[one] for one in found if one.startswith("lockstep") and name.split(", ")[1] in one)
        ratios = [value / own for value, own in zip(values, mine, strict=True)]
        print(f"| {name} | {spread(values)} | {spread(ratios, 2)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, metavar="N")
    parser.add_argument("--lag", type=int, default=0, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="of --lag")
    parser.add_argument("--lag-steps", type=int, default=LAG_STEPS)
    parser.add_argument("--speed", type=int, default=0, metavar="N")
    parser.add_argument("--rllib", metavar="PYTHON")
    args = parser.parse_args()
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    import gymnasium

    print(f"gymnasium {gymnasium.__version__}, NumPy {np.__version__}, {os.cpu_count()} cores", flush=True)
    if args.seeds:
        seeds(args.seeds)
    if args.lag:
        lag(args.lag, args.first_seed, args.lag_steps)
    if args.speed:
        speed(args.speed, args.rllib)


if __name__ == "__main__":
    main()
