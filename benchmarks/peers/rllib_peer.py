"""IMPALA of RLlib on CartPole-v1, for benchmarks/impala.py: prints after each iteration the environment steps so far.

Runs until it is killed, in an environment of its own: `pip install "ray[rllib]" torch gymnasium`.
"""

from __future__ import annotations

import argparse
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
        .training(train_batch_size_per_learner=args.batch, lr=1e-3, grad_clip=0.5, entropy_coeff=0.01)
        .rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=True)
        )
        .reporting(min_time_s_per_iteration=1)
        .debugging(seed=0)
    )
    algorithm = config.build_algo()
    print(f"ray {ray.__version__}, torch {torch.__version__}", flush=True)
    while True:
        found = algorithm.train().get("env_runners", {})
        print(f"{int(found.get('num_env_steps_sampled_lifetime', 0))} steps at {time.time()}", flush=True)


if __name__ == "__main__":
    main()
