"""Gradients in fewer bytes on the wire, as `hvd.Compression` names the ways."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """How a tensor is made smaller before it is reduced, and brought back afterwards."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to reduce, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The reduced tensor in its own dtype again."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Floats of 32 and 64 bits as float16: sums are rounded to 11 bits, and above 65,504 they are infinite."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return (
            (tf.cast(tensor, tf.float16), tensor.dtype) if tensor.dtype in (tf.float32, tf.float64) else (tensor, None)
        )

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The known ways."""

    none = NoneCompressor
    fp16 = FP16Compressor
