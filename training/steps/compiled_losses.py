"""What `compile` made of a model's losses, changed for as long as a step is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras

from training.steps.patching import swapped


@contextmanager
def changed_losses(
    model: keras.Model, changes: Callable[[Any], Iterator[AbstractContextManager[None]]]
) -> Iterator[None]:
    """While this is open, the contexts of `changes(losses)` are, which is asked once the compiled losses are built.

    In a loop of the user's own that is within it: the first loss builds them. A model without losses has no changes.
    """
    losses = model._compile_loss  # Keras has no public way to it
    with ExitStack() as stack:

        def change() -> None:
            for context in changes(losses):
                stack.enter_context(context)

        if losses is not None and losses.built:
            change()
        elif losses is not None:
            plain = losses.build

            def build(*args: Any) -> None:
                plain(*args)
                change()

            stack.enter_context(swapped(losses, "build", build))
        yield
