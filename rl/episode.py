"""`Episode`: one run of a workflow on a prompt, and its serialization between processes.

JSON holds metadata and safetensors the tensors; pickle is not used.
"""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from archon.engine.batch import IMAGES
from archon.models.vision.images import ProcessedImage, is_image_batch
from archon.rl.algorithms.advantages import Groups
from archon.rl.algorithms.config import GroupRule
from archon.rl.episode_context import EpisodeContext
from archon.rl.prompts import Prompt
from archon.rl.rewards.result import REWARD_PART, RewardRaised
from archon.schema.errors import RolloutError, UserError
from archon.schema.user_code import ExitError

HEADER_BYTES = 8
"""Size of the length prefix of the JSON header."""


@dataclass
class Episode:
    """Episode and its result: a group of trajectories, or None if it was rejected or raised `error`.

    `filtered` is True if the run's filter rejected the group.
    """

    prompt: Prompt
    context: EpisodeContext
    trajectories: dict[str, Any] | None = field(default=None, repr=False)
    error: BaseException | None = None
    filtered: bool = False

    @property
    def rewards(self) -> Tensor:
        """Rewards of the group's T trajectories, float64 [T]."""
        return self._by_trajectory("rewards") if self.trajectories else torch.empty(0, dtype=torch.float64)

    def _by_trajectory(self, column: str) -> Tensor:
        """Return the means of a column [B] over each trajectory's rows, float64 [T], without rows that are NaN."""
        group = self.trajectories or {}
        values: Tensor = group[column]
        present = ~values.isnan()
        if "trajectory_ids" not in group:
            return values[present].double()
        one_group = torch.zeros(len(values), dtype=torch.int64)
        return Groups(values[present], one_group[present], group["trajectory_ids"][present]).rewards

    def has_zero_variance(self, rule: GroupRule) -> bool:
        """Return whether all trajectories of the group have the same reward, by part if the rule says so."""
        parts = [name for name in self.trajectories or {} if rule.by_part and name.startswith(REWARD_PART)]
        for rewards in [self._by_trajectory(name) for name in parts] or [self.rewards]:
            if len(rewards) > 0 and bool(rewards.max() > rewards.min()):
                return False
        return True

    def is_trainable(self, rule: GroupRule) -> bool:
        """Return whether the group is part of the training batch."""
        if not self.trajectories or self.filtered:
            return False
        return rule.zero_variance == "keep" or not self.has_zero_variance(rule)


class RemoteError(Exception):
    """Error of another process, with its traceback as a note.

    Attributes:
        kind: name of the error's type.
        one_line: whether the message needs no traceback.
    """

    def __init__(self, kind: str, message: str, one_line: bool, trace: str) -> None:
        super().__init__(message)
        self.kind, self.one_line = kind, one_line
        self.add_note(trace)


def error_kind(error: BaseException) -> str:
    """Return the name of an error's type: the original one of a `RemoteError` or an `ExitError`."""
    if isinstance(error, RemoteError):
        return error.kind
    return type(error.__cause__ if isinstance(error, ExitError) else error).__name__


def is_one_line(error: BaseException) -> bool:
    """Return whether the message alone explains the error; a reward that raised needs its traceback."""
    if isinstance(error, RemoteError):
        return error.one_line
    return isinstance(error, UserError) and not isinstance(error, RewardRaised)


def pack_episodes(episodes: Mapping[int, Episode]) -> bytes:
    """Serialize finished episodes by index; raise `RolloutError` for values that JSON cannot hold."""
    header: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for place, episode in episodes.items():
        context, lists = episode.context, dict[str, Any]()
        images: dict[str, Any] | None = None
        for key, value in (episode.trajectories or {}).items():
            if key == IMAGES and is_image_batch(value):
                images, pixels = pack_images(value)
                tensors |= {f"{place}.{key}.{number}": each for number, each in enumerate(pixels)}
            elif isinstance(value, Tensor):
                # A copy, as safetensors refuses tensors that share memory.
                tensors[f"{place}.{key}"] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            else:
                lists[key] = value
        header.append(
            {
                "place": place,
                "empty": episode.trajectories is None,
                "filtered": episode.filtered,
                "lists": lists,
                "images": images,
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
            f"a workflow's result cannot be sent to other processes: {error}; return tensors, or lists of JSON values"
        ) from None
    return len(text).to_bytes(HEADER_BYTES, "big") + text + save(tensors)


def unpack_episodes(data: bytes, episodes: Sequence[Episode]) -> None:
    """Fill `episodes` with the packed results of another process."""
    start = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big")
    tensors = load(data[start:])
    for item in json.loads(data[HEADER_BYTES:start]):
        episode = episodes[item["place"]]
        context = episode.context
        if not item["empty"]:
            prefix = f"{item['place']}."
            columns = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            lists, images = item["lists"], item["images"]
            if images is not None:
                pixels = [columns.pop(f"{IMAGES}.{number}") for number in range(len(images["grids"]))]
                lists[IMAGES] = unpack_images(images, pixels)
            episode.trajectories = columns | lists
        episode.filtered = item["filtered"]
        context.drops = Counter(item["drops"])
        context.numbers.update(item["numbers"])
        context.first_errors = {kind: RemoteError(*error) for kind, error in item["first_errors"].items()}
        if item["error"] is not None:
            episode.error = RemoteError(*item["error"])


def pack_images(rows: Sequence[Sequence[ProcessedImage]]) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the images of rows as plain data, and the pixels of distinct images."""
    distinct = {image.digest: image for images in rows for image in images}
    numbers = {digest: number for number, digest in enumerate(distinct)}
    places = [[numbers[image.digest] for image in images] for images in rows]
    plain = {"grids": [list(image.grid) for image in distinct.values()], "rows": places}
    pixels = [image.pixel_values.detach().cpu() for image in distinct.values()]
    return plain, [each.clone(memory_format=torch.contiguous_format) for each in pixels]


def unpack_images(plain: Mapping[str, Any], pixels: Sequence[Tensor]) -> list[list[ProcessedImage]]:
    """Restore the images that `pack_images` packed."""
    images = [ProcessedImage(each, (t, h, w)) for each, (t, h, w) in zip(pixels, plain["grids"], strict=True)]
    return [[images[number] for number in row] for row in plain["rows"]]


def _pack_error(error: BaseException) -> tuple[str, str, bool, str]:
    return error_kind(error), str(error), is_one_line(error), "".join(traceback.format_exception(error))
