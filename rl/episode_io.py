"""Serializes episodes between processes: JSON for what is small, safetensors for tensors, no pickle."""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from archon.rl.rewards.result import RewardRaised
from archon.schema.errors import RolloutError, UserError

if TYPE_CHECKING:
    from archon.rl.episode import Episode

_HEADER_BYTES = 8


class RemoteError(Exception):
    """An error in an episode that another process ran: the name of its type, its message, and whether it is one of
    archon's one-line errors; the traceback is a note."""

    def __init__(self, kind: str, message: str, one_line: bool, trace: str) -> None:
        super().__init__(message)
        self.kind, self.one_line = kind, one_line
        self.add_note(trace)


def error_kind(error: BaseException) -> str:
    """Returns the name of an error's type, in whichever process it was raised."""
    return error.kind if isinstance(error, RemoteError) else type(error).__name__


def is_one_line(error: BaseException) -> bool:
    """Whether the message needs no traceback: it names a user's mistake. A reward that raised is the user's code, and
    comes with the traceback of its process."""
    if isinstance(error, RemoteError):
        return error.one_line
    return isinstance(error, UserError) and not isinstance(error, RewardRaised)


def pack_episodes(episodes: Mapping[int, Episode]) -> bytes:
    """Returns finished episodes, by their place among those of a step, as bytes.

    Raises `RolloutError` for a result that JSON cannot hold.
    """
    header: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for place, episode in episodes.items():
        context, lists = episode.context, dict[str, Any]()
        for key, value in (episode.trajectories or {}).items():
            if isinstance(value, Tensor):
                # A copy: one tensor may stand under two keys, which the format refuses.
                tensors[f"{place}.{key}"] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            else:
                lists[key] = value
        header.append(
            {
                "place": place,
                "empty": episode.trajectories is None,
                "lists": lists,
                "drops": context.drops,
                "numbers": context.numbers,
                "first_errors": {kind: _pack_error(error) for kind, error in context.first_errors.items()},
                "error": None if episode.error is None else _pack_error(episode.error),
            }
        )
    try:
        text = json.dumps(header).encode()
    except TypeError as error:
        raise RolloutError(
            f"a workflow's result cannot go from one process to the others: {error}; return tensors, or lists of "
            "what JSON can hold"
        ) from None
    return len(text).to_bytes(_HEADER_BYTES, "big") + text + save(tensors)


def unpack_episodes(data: bytes, episodes: Sequence[Episode]) -> None:
    """Fill `episodes` with those that another process packed; they have the same prompts in the same places."""
    start = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "big")
    tensors = load(data[start:])
    for item in json.loads(data[_HEADER_BYTES:start]):
        episode = episodes[item["place"]]
        context = episode.context
        if not item["empty"]:
            prefix = f"{item['place']}."
            own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            episode.trajectories = own | item["lists"]
        context.drops = Counter(item["drops"])
        context.numbers.update(item["numbers"])
        context.first_errors = {kind: RemoteError(*error) for kind, error in item["first_errors"].items()}
        if item["error"] is not None:
            episode.error = RemoteError(*item["error"])


def _pack_error(error: BaseException) -> tuple[str, str, bool, str]:
    return error_kind(error), str(error), is_one_line(error), "".join(traceback.format_exception(error))
