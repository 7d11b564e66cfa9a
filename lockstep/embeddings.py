"""Embedding tables that ranks divide among them, as layers for a model of your own (docs/embeddings.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.process.faces import face

if TYPE_CHECKING:
    from lockstep.training.embeddings.sharded_embedding import ShardedEmbedding

__all__ = ["ShardedEmbedding"]

if not TYPE_CHECKING:  # a type checker would assume that every name exists
    __getattr__, __dir__ = face(
        __name__, dict.fromkeys(__all__, "lockstep.training.embeddings.sharded_embedding"), __all__
    )
