"""Cuts a functional or sequential Keras model into stages for a pipeline: models of its own layers and variables.

A place for a cut is a position in the order of the graph's operations. What crosses it are the tensors that a later
operation uses, or that the model returns, and that depend on weights. The model's inputs, and what they alone decide
(masks, places), do not cross: each stage reads and computes them from its own batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import keras
import numpy as np
from keras.src.backend import get_keras_mask
from keras.src.models.functional import Functional  # not public: keras.Model is also that of subclasses

from lockstep.storage.errors import ConfigError

MOST_TENSORS = 4  # that may cross a cut
NEARLY = 1.05  # times the least cost of the longest stage: among such cuts the bytes decide
Node = Any


@dataclass(frozen=True, slots=True)
class Place:
    """A position between two operations of a model's graph."""

    position: int
    """The number of operations before it."""
    after: str
    """The name of the operation before it."""
    tensors: tuple[Any, ...]
    """The Keras tensors that cross it, in the order in which they are made."""
    fault: str
    """Why the model cannot be cut here; empty if it can."""

    @property
    def row_bytes(self) -> int:
        """The bytes of a row that cross."""
        return sum(_elements(one.shape[1:]) * np.dtype(_numpy_dtype(one)).itemsize for one in self.tensors)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a model."""

    number: int
    stages: int
    model: keras.Model
    """From the list [*inputs, *received] to the list `sent`; of the last stage to what the whole model returns."""
    inputs: tuple[int, ...]
    """The numbers of the whole model's inputs that this stage reads."""
    received: tuple[Any, ...]
    """The Keras tensors that the stage before sends."""
    sent: tuple[Any, ...]
    """The Keras tensors for the stage after it."""

    @property
    def is_last(self) -> bool:
        """Whether it computes the model's outputs and its loss."""
        return self.number + 1 == self.stages


class Graph:
    """The operations of a model that depend on its weights, in the order in which Keras computes them."""

    def __init__(self, model: keras.Model) -> None:
        """Raise ConfigError for a model that is no graph of layers."""
        self.model = model
        self.functional = _functional_of(model)
        self.nodes: list[Node] = []
        free = {id(one) for one in self.functional.inputs}
        for depth in sorted(self.functional._nodes_by_depth, reverse=True):
            for node in self.functional._nodes_by_depth[depth]:
                if node.is_input:
                    continue
                if not _variables(node) and all(id(one) in free for one in node.input_tensors):
                    free |= {id(one) for one in node.output_tensors}
                else:
                    self.nodes.append(node)
        self.places = [self._place(position, free) for position in range(1, len(self.nodes))]

    def _place(self, position: int, free: set[int]) -> Place:
        before, after = self.nodes[:position], self.nodes[position:]
        used = {id(one) for node in after for one in node.input_tensors} | {id(one) for one in self.functional.outputs}
        made = [one for node in before for one in node.output_tensors if id(one) in used and id(one) not in free]
        shared = {id(one) for node in before for one in _variables(node)}
        shared &= {id(one) for node in after for one in _variables(node)}
        fault = ""
        if len(made) > MOST_TENSORS:
            fault = f"{len(made)} tensors cross: {', '.join(_maker(one) for one in made[:10])}"
        elif shared:
            fault = "layers before and after it share variables"
        elif any(get_keras_mask(one) is not None for one in made):
            fault = "a tensor that crosses has a mask"
        elif any(not keras.backend.is_float_dtype(one.dtype) or None in one.shape[1:] for one in made):
            fault = "a tensor that crosses is not of floats, or its rows have no fixed shape"
        return Place(position, before[-1].operation.name, tuple(made), fault)

    def stage(self, cuts: Sequence[Place], number: int) -> Stage:
        """Stage `number` of those that these cuts make."""
        received = cuts[number - 1].tensors if number else ()
        is_last = number == len(cuts)
        sent = () if is_last else cuts[number].tensors
        returned = list(self.functional.outputs) if is_last else list(sent)
        inputs = self._inputs_of(returned, {id(one) for one in received})
        made = keras.Model(
            [*(self.functional.inputs[i] for i in inputs), *received],
            self.functional.output if is_last else list(sent),
            name=f"{self.model.name}_stage_{number}",
        )
        return Stage(number, len(cuts) + 1, made, tuple(inputs), tuple(received), tuple(sent))

    def _inputs_of(self, returned: Sequence[Any], known: set[int]) -> list[int]:
        makers = {id(one): node for nodes in self.functional._nodes_by_depth.values() for node in nodes
                  for one in node.output_tensors}  # fmt: skip
        numbers = {id(one): number for number, one in enumerate(self.functional.inputs)}
        found, seen, waiting = set(), set(known), list(returned)
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if id(one) in numbers:
                found.add(numbers[id(one)])
            else:
                waiting += makers[id(one)].input_tensors
        return sorted(found)


def reckoned_costs(graph: Graph) -> list[float]:
    """The operations' shares of a step's time, as reckoned: the same in each process, unlike measured times.

    Two for each number of a kernel and each position that it is applied at, one for each number of an output.
    """
    costs = []
    for node in graph.nodes:
        operation, outputs = node.operation, node.output_tensors
        kernels = sum(_elements(one.shape) for one in _variables(node) if len(one.shape) > 1)
        if isinstance(operation, keras.layers.Embedding):
            kernels = 0
        positions = max(_elements(one.shape[1:-1]) for one in outputs)
        costs.append(float(2 * kernels * positions + sum(_elements(one.shape[1:]) for one in outputs)))
    return costs


def cuts_of(graph: Graph, stages: int, costs: Sequence[float], after: Sequence[str] = ()) -> list[Place]:
    """The stages - 1 places that make the longest stage as short as it can be; fewest bytes among nearly such ones.

    `costs` are of the graph's operations. With `after`, the cuts are after these layers. Raises ConfigError if the
    model cannot be cut there, or into so many stages.
    """
    if after:
        return [_named(graph, name) for name in _in_order(graph, after, stages)]
    allowed = [place for place in graph.places if not place.fault]
    trained = [any(one.trainable for one in _variables(node)) for node in graph.nodes]
    sums, counts = np.concatenate([[0.0], np.cumsum(costs)]), np.concatenate([[0], np.cumsum(trained)])
    edges = [0, *(place.position for place in allowed), len(graph.nodes)]
    crossing = [0, *(place.row_bytes for place in allowed), 0]

    def best(limit: float | None) -> tuple[float, list[int]]:
        """The least of the longest stage, or with a `limit` of it the least bytes; with numbers of the edges."""
        found: list[tuple[float, list[int]]] = [(math.inf, [])] * len(edges)
        found[0] = (0.0, [0])
        for _ in range(stages):
            then: list[tuple[float, list[int]]] = [(math.inf, [])] * len(edges)
            for stop in range(1, len(edges)):
                for start in range(stop):
                    cost = sums[edges[stop]] - sums[edges[start]]
                    if not found[start][1] or counts[edges[stop]] == counts[edges[start]]:
                        continue  # a stage that trains nothing has no gradients to exchange
                    if limit is None:
                        value = max(found[start][0], cost)
                    else:
                        value = found[start][0] + crossing[stop] if cost <= limit else math.inf
                    if value < then[stop][0]:
                        then[stop] = (value, [*found[start][1], stop])
            found = then
        return found[-1]

    longest, chosen = best(None)
    if not chosen:
        raise _uncut(graph, stages)
    _, chosen = best(longest * NEARLY)
    return [allowed[edge - 1] for edge in chosen[1:-1]]


def _in_order(graph: Graph, after: Sequence[str], stages: int) -> list[str]:
    positions = {place.after: place.position for place in graph.places}
    known = [name for name in after if name in positions]
    ordered = sorted(known, key=lambda name: positions[name])
    if len(after) != stages - 1 or ordered != list(after) or len(set(after)) != len(after):
        raise ConfigError(
            "--cut-after does not name the layers after which the stages of --pipeline-stages end",
            got=", ".join(after),
            allowed=f"{stages - 1} different layers of the model in order, such as {', '.join(list(positions)[:20])}",
            next_step="Correct the names, or leave out --cut-after.",
        )
    return ordered


def _named(graph: Graph, name: str) -> Place:
    place = [one for one in graph.places if one.after == name][-1]
    if place.fault:
        raise ConfigError(
            f"the model {graph.model.name} cannot be cut after {name}",
            got=place.fault,
            allowed=f"a place where up to {MOST_TENSORS} tensors of floats without a mask cross; no layer is shared",
            next_step="Name another layer, or leave out --cut-after.",
        )
    return place


def _uncut(graph: Graph, stages: int) -> ConfigError:
    faults = [f"after {place.after}: {place.fault}" for place in graph.places if place.fault]
    return ConfigError(
        f"the model {graph.model.name} cannot be cut into {stages} stages with trained weights in each",
        got=f"{len(graph.nodes)} operations, {len(graph.places) - len(faults)} places; {'; '.join(faults[:5])}",
        allowed=f"{stages - 1} places where up to {MOST_TENSORS} tensors of floats without a mask cross",
        next_step="Use fewer --pipeline-stages, or a model whose layers follow each other.",
    )


def costs_of_stages(graph: Graph, cuts: Sequence[Place], costs: Sequence[float]) -> list[float]:
    """Each stage's sum of the `costs` of its operations."""
    edges = [0, *(place.position for place in cuts), len(graph.nodes)]
    return [float(sum(costs[start:stop])) for start, stop in pairwise(edges)]


def variables_of_stages(graph: Graph, cuts: Sequence[Place]) -> list[list[keras.Variable]]:
    """The weights of each stage, trained or not; each weight of the model is in one stage."""
    edges = [0, *(place.position for place in cuts), len(graph.nodes)]
    found: list[list[keras.Variable]] = []
    for start, stop in pairwise(edges):
        inside = {id(one) for node in graph.nodes[start:stop] for one in _weights(node)}
        found.append([one for one in graph.model.weights if id(one) in inside])
    if sum(len(one) for one in found) != len(graph.model.weights):
        inside = {id(one) for part in found for one in part}
        raise ConfigError(
            f"the model {graph.model.name} has weights that are in no layer of its graph",
            got=", ".join(one.path for one in graph.model.weights if id(one) not in inside)[:300],
            allowed="weights of layers between the model's inputs and outputs",
            next_step="Leave out --pipeline-stages, or make them part of a layer.",
        )
    return found


def _functional_of(model: keras.Model) -> Any:
    inner = model._functional if isinstance(model, keras.Sequential) else model
    kind = type(model)
    if not isinstance(inner, Functional) or kind.call not in (Functional.call, keras.Sequential.call):
        raise ConfigError(
            f"the model {model.name} is no graph of layers that can be cut into stages",
            got=f"{kind.__name__}, {'a call of its own' if isinstance(inner, Functional) else 'no functional model'}",
            allowed="keras.Sequential with an Input, or keras.Model(inputs, outputs)",
            next_step="Build the model by keras.Model(inputs, outputs), or leave out --pipeline-stages.",
        )
    return inner


def _variables(node: Node) -> list[Any]:
    """The variables of a node's layer, states of random draws among them; an operation has none."""
    return list(getattr(node.operation, "variables", ()))


def _weights(node: Node) -> list[Any]:
    return list(getattr(node.operation, "weights", ()))


def _maker(tensor: Any) -> str:
    return str(tensor._keras_history.operation.name)


def _elements(shape: Sequence[int | None]) -> int:
    return math.prod(size or 1 for size in shape)


def _numpy_dtype(tensor: Any) -> str:
    return "uint16" if tensor.dtype == "bfloat16" else str(tensor.dtype)
