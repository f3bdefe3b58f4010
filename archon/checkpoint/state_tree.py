"""JSON encoding of a training state: nested dictionaries, lists and tuples of tensors and plain values.

A leaf may be a shard of a distributed tensor (`Shard`), or a value that differs by rank (`PerRank`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from archon.checkpoint.safetensors_file import LazyTensor, Region, full_region
from archon.schema.errors import CheckpointError

KeyPath = tuple[str, ...]
"""Dictionary keys from the root to a leaf."""


@dataclass(frozen=True)
class Shard:
    """One rank's `region` of a tensor of `shape`. When saving, `data` may be lazy."""

    data: Tensor | LazyTensor
    shape: tuple[int, ...]
    region: Region

    @classmethod
    def from_value(cls, value: Tensor | LazyTensor | Shard) -> Shard:
        """Wrap a tensor as a shard that covers all of it; return a shard unchanged."""
        return value if isinstance(value, Shard) else cls(value, tuple(value.shape), full_region(value.shape))


@dataclass(frozen=True)
class PerRank:
    """A value that differs by rank: this rank's value when saving, all ranks' values after loading."""

    values: tuple[Any, ...]


class Encoder:
    """Encoder of a state to JSON; unsupported values become objects with one key that starts with `$`.

    Attributes:
        shards: the tensors by their names in the JSON.
        paths: key path of every shard with only string-keyed dictionaries above it.
        per_rank: the encoded `PerRank` values in traversal order.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.shards: dict[str, Shard] = {}
        self.paths: dict[str, KeyPath] = {}
        self.per_rank: list[Any] = []

    def encode(self, value: Any, where: str = "", path: KeyPath | None = ()) -> Any:
        """Encode `value` as JSON-compatible data; raise TypeError for a value that would need pickle."""
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, Tensor | Shard):
            return {"$tensor": self._add(value, where, path)}
        if isinstance(value, PerRank):
            (item,) = value.values
            self.per_rank.append(self.encode(item, f"{where}@{self.rank}", None))
            return {"$ranks": len(self.per_rank) - 1}
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

    def _add(self, value: Tensor | Shard, where: str, path: KeyPath | None) -> str:
        name = where
        while name in self.shards:  # {"a": {"b": x}, "a.b": y}
            name += "'"
        self.shards[name] = Shard.from_value(value)
        if path is not None:
            self.paths[name] = path
        return name


def merge_ranks(tree: Any, paths: Mapping[str, KeyPath], per_rank: list[list[Any]]) -> Any:
    """Add the tensors of other ranks and all ranks' `PerRank` values to rank 0's encoded tree.

    Args:
        tree: the state as encoded on rank 0.
        paths: `Encoder.paths` of all ranks.
        per_rank: `Encoder.per_rank` of each rank.
    """
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
            return {"$ranks": [values[value["$ranks"]] for values in per_rank]}
        return {key: fill(item) for key, item in value.items()}

    return fill(tree) if any(per_rank) else tree


def decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Decode the result of `Encoder.encode`, replacing tensor names by their entries in `tensors`."""
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


def read_all(state: Any) -> Any:
    """Copy a state, reading every `LazyTensor` in full."""
    if isinstance(state, Mapping):
        return {key: read_all(item) for key, item in state.items()}
    if isinstance(state, list):
        return [read_all(item) for item in state]
    if isinstance(state, tuple):
        return tuple(read_all(item) for item in state)
    if isinstance(state, PerRank):
        return PerRank(read_all(state.values))
    return state.read() if isinstance(state, LazyTensor) else state


def select_region(value: Tensor | Shard | LazyTensor, region: Region, name: str) -> Tensor:
    """Return `region` of a tensor in a state.

    Raises:
        CheckpointError: `value` is a shard of another region, so the data is on another rank; the message has `name`.
    """
    if isinstance(value, Tensor):
        return value[region]
    if isinstance(value, Shard):
        if value.region != region:
            raise CheckpointError(
                f"{name} is a shard of another layout (region {value.region}, expected {region}); "
                "save the state and load it from the checkpoint, which works in any layout"
            )
        assert isinstance(value.data, Tensor)
        return value.data
    return value.read(region)
