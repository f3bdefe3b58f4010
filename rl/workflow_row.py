"""Dataset row for a workflow: a copy that it may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

from archon.rl.rewards.async_wrapper import ARGUMENTS


class WorkflowRow(dict[str, Any]):
    """Row that unpacks into a reward's keyword arguments: `reward_fn(prompt=…, completions=…, **row)`.

    `**`, `dict(row)` and `keys` skip the reward's positional arguments such as `prompt`; `row["prompt"]`, `get`, `in`
    and `items` do not.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        self.where = getattr(row, "where", "this row")  # for errors

    def keys(self) -> Any:
        """Return the column names without the reward's positional arguments."""
        return dict.fromkeys(self).keys()

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if name not in ARGUMENTS)


def copy_containers(value: Any) -> Any:
    """Return a deep copy of dictionaries, lists, tuples and sets; other values (text, tensors, images) are shared."""
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
