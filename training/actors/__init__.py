"""Reinforcement learning: actors play environments, learners correct their delay by V-trace (IMPALA)."""
