"""Collectives of TensorFlow, with NCCL on GPUs."""
