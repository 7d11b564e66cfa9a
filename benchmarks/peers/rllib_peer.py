"""IMPALA of RLlib on CartPole-v1, for benchmarks/impala.py: prints environment steps a second as JSON.

Runs in an environment of its own: `pip install "ray[rllib]" torch gymnasium`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import ray
import torch
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--actors", type=int, required=True)
    parser.add_argument("--envs", type=int, required=True)
    parser.add_argument("--unroll", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    # As many CPUs as its processes ask for: the two real ones are shared by them, as by ours.
    ray.init(num_cpus=args.actors + 2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    config = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=args.actors,
            num_envs_per_env_runner=args.envs,
            rollout_fragment_length=args.unroll,
        )
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=args.batch, lr=2e-3, grad_clip=0.5, entropy_coeff=0.01)
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=True)
        )
        .debugging(seed=0)
    )
    algorithm = config.build_algo()
    trained = 0

    def done() -> int:
        found = algorithm.train()
        return int(found["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"]) if "learners" in found else 0

    while trained == 0:  # the first results: its processes have started
        trained = done()
    first, began = trained, time.monotonic()
    while time.monotonic() - began < args.seconds:
        trained = done() or trained
    seconds = time.monotonic() - began
    versions = {"ray": ray.__version__, "torch": torch.__version__}
    print(json.dumps({"env_steps_per_s": (trained - first) / seconds, "versions": versions}))
    sys.stdout.flush()
    ray.shutdown()
    os._exit(0)  # its threads may wait for runners that have ended


if __name__ == "__main__":
    main()
