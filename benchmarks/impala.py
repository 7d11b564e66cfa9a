"""CartPole-v1 by `lockstep agent`: returns of five seeds, the worth of V-trace at a lag of 8, and steps a second.

python -m benchmarks.impala --seeds 5          whole runs of 500,000 steps
python -m benchmarks.impala --lag 3            in one process, weights 8 updates old, with V-trace and without
python -m benchmarks.impala --speed 3 --rllib /path/to/python     in turns with RLlib's IMPALA
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np

LAG = 8
LAG_RATE = 5e-4  # at the rate of whole runs, 2e-3, both collapse at this lag
ENVS = 8
PEER_S = 15.0


def run_seed(seed: int, actors: int, steps: int) -> dict[str, float]:
    """A whole run by the command; its result, and steps a second after the first report."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder, "run"))
        words = ["--env", "CartPole-v1", "--run", run, "--seed", str(seed), "--steps", str(steps)]
        command = [sys.executable, "-m", "lockstep.jobs.agent", *words, "--actors", str(actors), "--json"]
        began = time.monotonic()
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        result["seconds"] = time.monotonic() - began
        parts = sorted(Path(run, "metrics").glob("*/*.jsonl"))
        rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
        result["per_s"] = statistics.median(row["env_steps_per_s"] for row in rows[1:])
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


def lagged(seed: int, correct: bool, steps: int) -> float:
    """The mean return of the last 100 episodes, if each trajectory is played by weights that are LAG updates old."""
    from lockstep.training.actors.config import AgentConfig
    from lockstep.training.actors.player import PLAYED, Player
    from lockstep.training.actors.updates import Updates
    from lockstep.training.comm import SoloCommunicator

    config = AgentConfig(env="CartPole-v1", run="/nowhere", seed=seed, steps=steps, learning_rate=LAG_RATE)
    player = Player(config.env, config.envs, config.unroll, config.widths, seed=[seed])
    updates = Updates(config, player.envs.shape, SoloCommunicator(), correct=correct)
    returns: deque[float] = deque(maxlen=100)
    past: deque[np.ndarray] = deque(maxlen=LAG + 1)
    done = 0
    while done < steps:
        past.append(updates.weights())
        player.policy.flat[:] = past[0]
        record = player.play()
        updates.update([record], done / steps, [0])
        done += int((record["what"] & PLAYED > 0).sum())
        returns.extend(record["returns"][~np.isnan(record["returns"])].tolist())
    return float(np.mean(returns))


def lag(count: int, steps: int) -> None:
    print(f"| seed | V-trace, lag {LAG} | no correction, lag {LAG} |\n| --- | --- | --- |")
    for seed in range(count):
        print(f"| {seed} | {lagged(seed, True, steps):.1f} | {lagged(seed, False, steps):.1f} |", flush=True)


def speed(turns: int, rllib: str) -> None:
    peer = [rllib, str(Path(__file__).parent / "peers" / "rllib_peer.py"), "--envs", str(ENVS), "--unroll", "50"]
    found: dict[str, list[float]] = {}
    for _ in range(turns):
        for actors in (1, 2):
            ours = run_seed(0, actors, 300_000)["per_s"]
            found.setdefault(f"lockstep agent, {actors} actors", []).append(ours)
            words = [*peer, "--batch", "500", "--actors", str(actors), "--seconds", str(PEER_S)]
            text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            theirs = json.loads(text.splitlines()[-1])
            found.setdefault(f"RLlib IMPALA, {actors} actors {theirs['versions']}", []).append(
                theirs["env_steps_per_s"]
            )
    for name, values in found.items():
        print(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} to {max(values):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, metavar="N")
    parser.add_argument("--lag", type=int, default=0, metavar="N")
    parser.add_argument("--lag-steps", type=int, default=200_000)
    parser.add_argument("--speed", type=int, default=0, metavar="N")
    parser.add_argument("--rllib", metavar="PYTHON")
    args = parser.parse_args()
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    import gymnasium

    print(f"gymnasium {gymnasium.__version__}, NumPy {np.__version__}, {os.cpu_count()} cores", flush=True)
    if args.seeds:
        seeds(args.seeds)
    if args.lag:
        lag(args.lag, args.lag_steps)
    if args.speed:
        speed(args.speed, args.rllib)


if __name__ == "__main__":
    main()
