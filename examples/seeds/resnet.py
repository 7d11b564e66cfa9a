"""A ResNet in two roles: `train` writes checkpoints, `eval` scores each of them as it appears, until the run ends.

    python examples/seeds/resnet.py train --dataset URL --run URL
    python examples/seeds/resnet.py eval --dataset URL --run URL

The roles share the run's directory and nothing else: each may be a machine, and may be killed and started again.
"""

from __future__ import annotations

import argparse

import lockstep
from lockstep.jobs.evaluate import main as evaluate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("role", choices=("train", "eval"))
parser.add_argument("--dataset", required=True)
parser.add_argument("--run", required=True)
parser.add_argument("--model", default="resnet20")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

if args.role == "train":
    result = lockstep.train(
        args.dataset,
        args.run,
        args.model,
        num_ranks=2,
        global_batch=128,
        epochs=args.epochs,
        checkpoint_every=5,
        augment="crop:2 flip",
    )
    print(f"trained {result.steps} steps")
else:
    evaluate(["--run", args.run, "--dataset", args.dataset, "--follow", "--launcher", "local"])
