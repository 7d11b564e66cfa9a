"""Open Bandit Dataset: what Thompson sampling earned in its own log, and what its log of random choices says it would.

python -m benchmarks.open_bandit obp-0.4.1-py3-none-any.whl [--obp /path/to/python]

The wheel of obp 0.4.1 (Saito et al., arXiv:2008.07146) has both logs and the priors of the policy that was served. An
interpreter that can import obp computes IPS and SNIPS too; the script ends with an error if they differ.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import yaml  # type: ignore[import-untyped]  # PyYAML has no stubs here
from numpy.typing import NDArray

from lockstep.training.scoring.off_policy import Decisions, policy_value

CAMPAIGNS = ("all", "men", "women")
POSITIONS = 3
DRAWS = 200_000
SAME = 1e-9  # relative: both sum in float64
ORACLE = """
import json, sys
import numpy as np
from obp.ope import InverseProbabilityWeighting, SelfNormalizedInverseProbabilityWeighting
saved = dict(np.load(sys.argv[1]))
ask = dict(reward=saved["reward"], action=saved["action"], position=saved["position"], pscore=saved["pscore"],
           action_dist=np.tile(saved["policy"], (len(saved["reward"]), 1, 1)))
found = {"ips": InverseProbabilityWeighting(), "snips": SelfNormalizedInverseProbabilityWeighting()}
print(json.dumps({name: one.estimate_policy_value(**ask) for name, one in found.items()}))
"""


def served(alpha: NDArray[np.float64], beta: NDArray[np.float64]) -> NDArray[np.float64]:
    """The chance that Thompson sampling puts an item (row) at a position (column): the items with the largest draws of
    Beta(alpha, beta), by simulation."""
    random, counts = np.random.default_rng(0), np.zeros((len(alpha), POSITIONS))
    for _ in range(DRAWS // 1000):
        order = np.argsort(-random.beta(alpha, beta, (1000, len(alpha))), axis=1)
        for position in range(POSITIONS):
            counts[:, position] += np.bincount(order[:, position], minlength=len(alpha))
    return counts / DRAWS


def by_obp(python: str, wheel: Path, log: pd.DataFrame, policy: NDArray[np.float64]) -> dict[str, float]:
    """What obp estimates of the log: {ips, snips}."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "log.npz")
        reward, action, position = (log[name].to_numpy() for name in ("click", "item_id", "position"))
        pscore = log.propensity_score.to_numpy()
        np.savez(place, reward=reward, action=action, position=position - 1, pscore=pscore, policy=policy)
        zipfile.ZipFile(wheel).extractall(folder)
        words = [python, "-c", ORACLE, str(place)]
        done = subprocess.run(words, check=True, capture_output=True, text=True, env={"PYTHONPATH": folder})
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--obp", metavar="PYTHON", help="an interpreter with what obp needs")
    args = parser.parse_args()
    files = zipfile.ZipFile(args.wheel)
    priors = yaml.safe_load(files.read("obp/policy/conf/prior_bts.yaml"))
    print("| campaign | earned in its own log | by the random log: IPS | SNIPS | count as | within IPS's, SNIPS's |")
    print("| --- | --- | --- | --- | --- | --- |")
    for campaign in CAMPAIGNS:
        own, random = (
            pd.read_csv(io.BytesIO(files.read(f"obp/dataset/obd/{name}/{campaign}/{campaign}.csv")), index_col=0)
            for name in ("bts", "random")
        )
        policy = served(*(np.array(priors[campaign][name]) for name in ("alpha", "beta")))
        chosen, zeros = policy[random.item_id, random.position - 1], np.zeros(len(random))
        rewards = random.click.to_numpy(float)
        found = policy_value(Decisions(rewards, random.propensity_score.to_numpy(), chosen, zeros, zeros))
        values = found["values"]
        if args.obp:
            for name, value in by_obp(args.obp, args.wheel, random, policy).items():
                np.testing.assert_allclose(values[name]["value"], value, rtol=SAME)
        earned = float(own.click.mean())
        within = [values[name]["interval"][0] <= earned <= values[name]["interval"][1] for name in ("ips", "snips")]
        inside = ", ".join("yes" if one else "no" for one in within)
        cells = [shown(values[name]["value"], values[name]["interval"]) for name in ("ips", "snips")]
        error = 1.96 * float(own.click.std()) / len(own) ** 0.5
        cells = [campaign, shown(earned, (earned - error, earned + error)), *cells]
        print(f"| {' | '.join(cells)} | {found['effective_samples']:.0f} of {len(random)} | {inside} |", flush=True)
    print("obp computes the same IPS and SNIPS" if args.obp else "obp was not asked")


def shown(value: float, interval: tuple[float, float]) -> str:
    """A value with its 95 % interval."""
    return f"{value:.4f} ({interval[0]:.4f} to {interval[1]:.4f})"


if __name__ == "__main__":
    main()
