"""The dataset row that a workflow is given: a copy, which it may change."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

from archon.rl.rewards.async_wrapper import ARGUMENTS


class WorkflowRow(dict[str, Any]):
    """A row that a reward can be called with by keyword: `reward_fn(prompt=…, completions=…, **row)`.

    `prompt`, which archon's rows have, and the names of a reward's other arguments are left out where the row is
    unpacked, copied by `dict`, or gone through by its keys. They are there for `row["prompt"]`, `get`, `in`, `items`.
    """

    def keys(self) -> Any:
        return dict.fromkeys(self).keys()

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if name not in ARGUMENTS)


def copy_containers(value: Any) -> Any:
    """Returns a copy with new dictionaries, lists, tuples and sets, to any depth; everything else (text, tensors,
    images) is shared."""
    copied = value
    if isinstance(value, dict):
        copied = copy(value)
        for name, item in value.items():
            copied[name] = copy_containers(item)
    elif isinstance(value, list):
        copied = copy(value)
        copied[:] = map(copy_containers, value)
    elif type(value) is tuple:
        copied = tuple(map(copy_containers, value))
    elif isinstance(value, set):
        copied = copy(value)
    return copied
