"""The state of a run as a tree: nested dictionaries, lists and tuples of tensors and plain values, as JSON and back.

A tensor may be a part of a whole that several ranks hold, and a value may be each rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from archon.checkpoint.safetensors_file import Deferred
from archon.schema.errors import CheckpointError

Box = tuple[slice, ...]
"""Where a part lies in its whole: one slice a dimension."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor of `shape`: `data`, which lies at `box` of it. To be saved it may be deferred."""

    data: Tensor | Deferred
    shape: tuple[int, ...]
    box: Box

    @classmethod
    def of(cls, value: Tensor | Part) -> Part:
        """A tensor is the whole of itself."""
        return value if isinstance(value, Part) else cls(value, tuple(value.shape), whole_box(value.shape))


@dataclass(frozen=True)
class PerRank:
    """A value that each rank has its own of. To be saved it holds this rank's; loaded it holds every rank's."""

    values: tuple[Any, ...]


class Stored(Protocol):
    """A tensor of an open checkpoint: read when asked for, and only what is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, box: Box | None = None) -> Tensor:
        """The part at `box`, by default the whole, on the CPU."""


def whole_box(shape: tuple[int, ...] | torch.Size) -> Box:
    return tuple(slice(0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


Path = tuple[str, ...]


class Encoder:
    """A state as JSON, with what JSON lacks as objects of one `$` key.

    `parts` are the tensors by name, `paths` the keys that lead to each from the root, where they are all strings and
    lead through dictionaries alone; `own` what each `PerRank` became here.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parts: dict[str, Part] = {}
        self.paths: dict[str, Path] = {}
        self.own: list[Any] = []

    def encode(self, value: Any, where: str = "", path: Path | None = ()) -> Any:
        """TypeError for a value that cannot be stored without pickle."""
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, Tensor | Part):
            return {"$tensor": self._add(value, where, path)}
        if isinstance(value, PerRank):
            (own,) = value.values
            self.own.append(self.encode(own, f"{where}@{self.rank}", None))
            return {"$ranks": len(self.own) - 1}
        if isinstance(value, list):
            return [self.encode(item, f"{where}.{i}", None) for i, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"$tuple": self.encode([*value], where, None)}
        if isinstance(value, Mapping):
            plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
            items = {
                key: self.encode(
                    item,
                    f"{where}.{key}" if where else str(key),
                    (*path, key) if plain and path is not None else None,
                )
                for key, item in value.items()
            }
            return items if plain else {"$dict": [[self.encode(key, where, None), v] for key, v in items.items()]}
        raise TypeError(f"state {where!r} is a {type(value).__name__}, which a checkpoint cannot hold without pickle")

    def _add(self, value: Tensor | Part, where: str, path: Path | None) -> str:
        name = where
        while name in self.parts:  # {"a": {"b": x}, "a.b": y}
            name += "'"
        self.parts[name] = Part.of(value)
        if path is not None:
            self.paths[name] = path
        return name


def assemble(tree: Any, paths: Mapping[str, Path], own: list[list[Any]]) -> Any:
    """Rank 0's encoded tree, completed by the tensors that only others hold and by what each rank has of its own."""
    for name, path in paths.items():
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch.setdefault(path[-1], {"$tensor": name})

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {"$ranks"}:
            return {"$ranks": [values[value["$ranks"]] for values in own]}
        return {key: fill(item) for key, item in value.items()}

    return fill(tree) if any(own) else tree


def decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo `encode`, with `tensors` by name."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$float": text}:
            return float(text)
        case {"$ranks": values}:
            return PerRank(tuple(decode(values, tensors)))
        case {"$tuple": items}:
            return tuple(decode(items, tensors))
        case {"$dict": pairs}:
            return {decode(key, tensors): decode(item, tensors) for key, item in pairs}
    return {key: decode(item, tensors) for key, item in value.items()}


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """The tree with `function` applied to whatever is not a container."""
    if isinstance(value, Mapping):
        return {key: map_leaves(item, function) for key, item in value.items()}
    if isinstance(value, list):
        return [map_leaves(item, function) for item in value]
    if isinstance(value, tuple):
        return tuple(map_leaves(item, function) for item in value)
    if isinstance(value, PerRank):
        return PerRank(tuple(map_leaves(item, function) for item in value.values))
    return function(value)


def take(value: Tensor | Part | Stored, box: Box, what: str) -> Tensor:
    """The part at `box` of what a state holds; CheckpointError where it is another rank's part, which only a
    checkpoint can give."""
    if isinstance(value, Tensor):
        return value[box]
    if isinstance(value, Part):
        if value.box != box:
            raise CheckpointError(
                f"{what} is a part of another layout ({value.box}, expected {box}); "
                "save the state and load it from the checkpoint, which any layout can"
            )
        assert isinstance(value.data, Tensor)
        return value.data
    return value.read(box)
