"""Trajectories as batch-first tensors: workflows return them and the trainer reads them.

Per-token fields are [B, S], per-row fields [B]. Rows with the same trajectory id are parts of one trajectory. Without
ids, each row is a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from archon.engine.batch import IMAGES
from archon.generation.expert_record import pad_records
from archon.generation.record import TokenRecord, UnusableAnswerError
from archon.generation.types import ModelResponse
from archon.models.layers.routed_experts import FIELD, unknown_expert_id
from archon.models.vision.images import is_image_batch
from archon.rl.episode_context import EpisodeContext
from archon.rl.rewards.result import REWARD_PART, part_columns
from archon.schema.errors import RolloutError

_TOKEN_FIELDS: dict[str, torch.dtype] = {
    "input_ids": torch.int64,
    "attention_mask": torch.bool,
    "loss_mask": torch.int64,
    "logprobs": torch.float32,
    "versions": torch.int64,
    "turn_ids": torch.int64,
    "temperatures": torch.float32,
}
_ROW_FIELDS: dict[str, torch.dtype] = {"rewards": torch.float32, "trajectory_ids": torch.int64}
_OPTIONAL_FIELDS = frozenset({"turn_ids", "temperatures", "trajectory_ids"})
_PAD_VALUES = {"versions": -1, "turn_ids": -1}


def concat_padded_tensors(trajectories: Sequence[Mapping[str, Any]], pad_value: float = 0) -> dict[str, Any]:
    """Concatenate dictionaries of batch-first fields, padding per-token fields on the right.

    A field is per-token if its second dimension is the length of `attention_mask`. The padding is `pad_value`, except
    for 0 in `attention_mask`, −1 in `versions` and `turn_ids`, and the unknown expert id in `routed_experts`. Lists
    (images) are concatenated.

    Raises:
        RolloutError: a dictionary lacks a key, or a field is no batch-first tensor or list.
    """
    if not trajectories:
        raise RolloutError("concat_padded_tensors: got no dictionaries, expected at least one")
    keys = list(dict.fromkeys(key for trajectory in trajectories for key in trajectory))
    for index, trajectory in enumerate(trajectories):
        for key in ["attention_mask", *keys]:
            if key not in trajectory:
                owner = next((i for i, candidate in enumerate(trajectories) if key in candidate), None)
                hint = "" if owner is None else f", which dictionary {owner} has"
                raise RolloutError(f"concat_padded_tensors: dictionary {index} lacks key {key!r}{hint}")
    lengths = [trajectory["attention_mask"].shape[1] for trajectory in trajectories]
    joined: dict[str, Any] = {}
    for key in keys:
        values = [trajectory[key] for trajectory in trajectories]
        if all(isinstance(value, list) for value in values):
            joined[key] = [item for value in values for item in value]
            continue
        for index, value in enumerate(values):
            if not isinstance(value, torch.Tensor) or value.ndim == 0:
                raise RolloutError(
                    f"concat_padded_tensors: {key!r} of dictionary {index} is a {type(value).__name__},"
                    " expected a tensor with a batch dimension or a list"
                )
        if all(v.ndim >= 2 and v.shape[1] == length for v, length in zip(values, lengths, strict=True)):
            fill = 0 if key == "attention_mask" else _PAD_VALUES.get(key, pad_value)
            if key == FIELD:
                fill = unknown_expert_id(values[0].dtype)
            values = [_pad_right(value, max(lengths), fill) for value in values]
        shapes = [tuple(value.shape[1:]) for value in values]
        if len(set(shapes)) > 1:
            raise RolloutError(f"concat_padded_tensors: {key!r} has shapes {shapes} after the batch dimension")
        joined[key] = torch.cat(values)
    return joined


def _pad_right(value: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    missing = length - value.shape[1]
    return torch.constant_pad_nd(value, (0, 0) * (value.ndim - 2) + (0, missing), fill) if missing else value


def all_finite(numbers: Tensor) -> bool:
    """Return whether all numbers are finite."""
    # A finite float64 sum proves it at a third of the time of isfinite().
    return math.isfinite(numbers.sum(dtype=torch.float64).item()) or bool(numbers.isfinite().all())


def validate_trajectory(trajectory: Mapping[str, Any], source: str = "trajectory") -> dict[str, Any]:
    """Return a checked copy of a workflow's result with the documented dtypes; other keys are unchanged.

    Raises:
        RolloutError: a key is missing, has the wrong shape or values that are not finite, a mask holds values other
            than 0 and 1, a trained token is masked out, or `images` is not one list per row. The message begins
            with `source` and names key and shape.
    """
    if not isinstance(trajectory, Mapping):
        raise RolloutError(f"{source}: got a {type(trajectory).__name__}, expected a dictionary of tensors")
    checked = dict(trajectory)
    fields = {k: v for k, v in (_TOKEN_FIELDS | _ROW_FIELDS).items() if k in trajectory or k not in _OPTIONAL_FIELDS}
    for key in fields:
        if key not in trajectory:
            raise RolloutError(f"{source} lacks key {key!r}; it has {sorted(map(str, trajectory))}")
        if not isinstance(trajectory[key], torch.Tensor):
            raise RolloutError(f"{source}: {key!r} is a {type(trajectory[key]).__name__}, expected a tensor")
    shape = tuple(trajectory["input_ids"].shape)
    if len(shape) != 2 or 0 in shape:
        raise RolloutError(f"{source}: 'input_ids' has shape {shape}, expected [B, S] with both at least 1")
    if not _images_match_rows(checked, shape[0]):
        raise RolloutError(
            f"{source}: {IMAGES!r} is not one list of processed images per row ({shape[0]} rows); expected the images "
            "of the requests, as archon.data.images reads them; use another key for anything else"
        )
    for key, dtype in fields.items():
        value = trajectory[key]
        expected = shape[:1] if key in _ROW_FIELDS else shape
        if tuple(value.shape) != expected:
            raise RolloutError(
                f"{source}: {key!r} has shape {tuple(value.shape)}, expected {expected} as input_ids is {shape}"
            )
        if not dtype.is_floating_point and value.is_floating_point():
            raise RolloutError(f"{source}: {key!r} of shape {expected} is {value.dtype}, expected integers")
        if key.endswith("_mask") and value.dtype != torch.bool and not bool(((value == 0) | (value == 1)).all()):
            raise RolloutError(f"{source}: {key!r} of shape {expected} holds values other than 0 and 1")
        if value.is_floating_point() and not all_finite(value):
            where = tuple((~value.isfinite()).nonzero()[0].tolist())
            raise RolloutError(f"{source}: {key!r} of shape {expected} is {value[where].item()} at {where}")
        # float64 values of a float64 run keep their precision.
        checked[key] = value.detach().to(torch.promote_types(value.dtype, dtype) if dtype.is_floating_point else dtype)
    for key in [key for key in checked if str(key).startswith(REWARD_PART)]:
        checked[key] = _checked_part(checked[key], shape[:1], f"{source}: {key!r}")
    if (experts := checked.get(FIELD)) is not None:
        _check_experts(experts, shape, source)
    if bool((checked["loss_mask"] > checked["attention_mask"]).any()):
        raise RolloutError(f"{source}: 'loss_mask' of shape {shape} is 1 where 'attention_mask' is 0")
    return checked


def _checked_part(part: Any, shape: tuple[int, ...], where: str) -> Tensor:
    if not isinstance(part, Tensor) or tuple(part.shape) != shape:
        actual = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
        raise RolloutError(f"{where} is {actual}, expected a tensor of shape {shape}: a part of each row's reward")
    if bool(part.isinf().any()):
        raise RolloutError(f"{where} holds an infinite number; expected finite numbers, or NaN for rows without it")
    return part.detach().to(torch.promote_types(part.dtype, torch.float32))


def _images_match_rows(trajectory: Mapping[str, Any], rows: int) -> bool:
    if IMAGES not in trajectory:
        return True
    return is_image_batch(trajectory[IMAGES]) and len(trajectory[IMAGES]) == rows


def _check_experts(experts: Any, shape: tuple[int, ...], source: str) -> None:
    kinds = (torch.uint8, torch.uint16)
    if not isinstance(experts, Tensor) or experts.dtype not in kinds or tuple(experts.shape[:2]) != shape:
        actual = f"{experts.dtype} {tuple(experts.shape)}" if isinstance(experts, Tensor) else type(experts).__name__
        raise RolloutError(f"{source}: {FIELD!r} is {actual}, expected uint8 or uint16 [*{shape}, layers, top_k]")


def trajectory_tensors(
    answers: Sequence[ModelResponse] | Sequence[TokenRecord],
    rewards: Sequence[float],
    trajectory_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the trajectories of one prompt as batch-first tensors padded on the right.

    Args:
        answers: G answers that passed `check_answer`, or G records of several turns.
        rewards: G finite numbers; the parts of a `Reward` become columns.
        trajectory_ids: G integers, equal for parts of one trajectory; None: each row is a trajectory.

    Returns:
        The documented keys of a trajectory; `truncated` bool [G], True if the engine stopped at a length limit;
        `reward/NAME` float [G] for each part of the rewards, NaN where a reward lacks it;
        `routed_experts` [G, S, L, k] if the engine records them; `images`, one list per row, if a prompt has images.
    """
    records = [answer if isinstance(answer, TokenRecord) else TokenRecord.from_response(answer) for answer in answers]
    size = max(len(record.input_ids) for record in records)
    missing = [size - len(record.input_ids) for record in records]
    columns: dict[str, Tensor] = {}
    for name in ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids"):
        fill, dtype = _PAD_VALUES.get(name, 0), np.float32 if name == "logprobs" else np.int64
        rows = [getattr(record, name) + [fill] * n for record, n in zip(records, missing, strict=True)]
        columns[name] = torch.from_numpy(np.array(rows, dtype=dtype))  # half the time of torch.tensor(rows)
    if trajectory_ids is not None:
        columns["trajectory_ids"] = torch.tensor(trajectory_ids)
    experts = pad_records([record.routed_experts for record in records], size)
    group: dict[str, Any] = {
        **columns,
        **({} if experts is None else {FIELD: experts}),
        "attention_mask": torch.from_numpy(np.arange(size) < size - np.array(missing)[:, None]),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        **{name: torch.tensor(part, dtype=torch.float32) for name, part in part_columns(rewards).items()},
        "truncated": torch.from_numpy(np.array([record.truncated for record in records])),
    }
    images = [record.images for record in records]
    return group | {IMAGES: images} if any(images) else group


def join_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate groups of trajectories, filling optional columns that only some groups have.

    The fill is 0 in `temperatures` (the run's temperature), NaN in the parts of rewards, the unknown expert id in
    `routed_experts`, and no images.
    """
    if parts := {name for group in groups for name in group if name.startswith(REWARD_PART)}:
        groups = [
            {name: torch.full_like(group["rewards"], math.nan) for name in sorted(parts)} | {**group}
            for group in groups
        ]
    if any("temperatures" in group for group in groups):
        groups = [{"temperatures": torch.zeros(group["logprobs"].shape), **group} for group in groups]
    if (recorded := next((group[FIELD] for group in groups if FIELD in group), None)) is not None:
        sizes, fill = recorded.shape[2:], unknown_expert_id(recorded.dtype)
        groups = [{FIELD: recorded.new_full((*group["input_ids"].shape, *sizes), fill), **group} for group in groups]
    if any(IMAGES in group for group in groups):
        groups = [{IMAGES: [[] for _ in group["input_ids"]], **group} for group in groups]
    return concat_padded_tensors(groups)


def add_temperatures(group: dict[str, Any], records: Sequence[TokenRecord], temperature: float) -> dict[str, Any]:
    """Add the column `temperatures`, float [B, S], if an answer was not sampled at `temperature`.

    A value of 0 means the run's temperature.
    """
    if all(value in (0.0, temperature) for record in records for value in record.temperatures):
        return group
    column = torch.zeros(group["logprobs"].shape)
    for row, record in enumerate(records):
        column[row, : len(record.temperatures)] = torch.tensor(record.temperatures)
    return {**group, "temperatures": column}


def trajectory_ids(group: Mapping[str, Any]) -> Tensor:
    """Return the trajectory index of each row of a group, int64 [B], from 0."""
    rows = torch.arange(len(group["rewards"]))
    ids: Tensor = group.get("trajectory_ids", rows).unique(return_inverse=True)[1]
    return ids


def require_usable_tensors(result: Any, source: str, extra_fields: Collection[str] = ()) -> None:
    """Raise `RolloutError` for a tensor in a workflow's result that is not dense.

    Documented keys and `extra_fields` must also be real numbers of at least 16 bits.
    """
    numeric = {*_TOKEN_FIELDS, *_ROW_FIELDS, *extra_fields}
    for row in result if isinstance(result, list) else [result]:
        for key, value in row.items() if isinstance(row, Mapping) else ():
            if isinstance(value, Tensor) and (kind := _unusable_kind(value, key in numeric)):
                raise RolloutError(f"{source}: {key!r} is {kind}, expected a dense tensor of ordinary numbers")


def _unusable_kind(value: Tensor, numeric: bool) -> str | None:
    if value.is_nested:
        return "a nested tensor"
    if value.layout != torch.strided:
        return f"a sparse tensor ({value.layout})"
    if value.is_meta:
        return "a tensor of the meta device, which holds no values"
    if value.is_quantized:
        return "a quantized tensor"
    narrow = value.is_floating_point() and value.dtype.itemsize < 2
    return f"of {value.dtype}" if numeric and (value.is_complex() or narrow) else None


def validate_group(result: dict[str, Any], context: EpisodeContext, source: str) -> dict[str, Any]:
    """Validate a workflow's result, dropping rows that cannot be trained on; `context` counts them.

    Raises:
        RolloutError: the result is malformed, or no row is left.
    """
    require_usable_tensors(result, source)
    return validate_trajectory(_drop_unusable_rows(result, context), source)


def _drop_unusable_rows(result: dict[str, Any], context: EpisodeContext) -> dict[str, Any]:
    ndims = {"rewards": 1, "logprobs": 2, "loss_mask": 2}
    values = [result.get(name) for name in ndims] if isinstance(result, dict) else []
    tensors = [value for value in values if isinstance(value, Tensor)]
    if [value.ndim for value in tensors] != list(ndims.values()) or len({len(value) for value in tensors}) > 1:
        return result  # validate_trajectory raises
    rewards, logprobs, loss_mask = tensors
    if not _images_match_rows(result, len(rewards)):
        return result
    if all_finite(rewards) and all_finite(logprobs) and bool(loss_mask.any(1).all()):
        return result
    usable = {
        "reward_not_finite": rewards.isfinite(),
        "logprob_not_finite": logprobs.isfinite().all(1),
        "no_loss_token": loss_mask.any(1),
    }
    keep = torch.stack(list(usable.values())).all(0)
    errors = [
        UnusableAnswerError(kind, f"row {row} of the workflow's result: {kind.replace('_', ' ')}")
        for kind, rows in usable.items()
        for row in (~rows).nonzero().flatten().tolist()
    ]
    for error in errors:
        context.drop(error.kind, error)
    if not keep.any():
        raise errors[0]
    indices = keep.nonzero().flatten().tolist()
    return {
        name: value[keep] if isinstance(value, Tensor) else [value[i] for i in indices]
        for name, value in result.items()
    }
