"""What a workflow returned, as one group of trajectories: short forms completed, all of it checked, runs joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from archon.generation.record import UnusableAnswerError, check_answer
from archon.generation.types import ModelResponse
from archon.rl.context import EpisodeContext
from archon.rl.rewards import Reward
from archon.rl.trajectories import (
    InteractionWithTokenLogpReward,
    concat_padded_tensors,
    trajectory_tensors,
    validate_trajectory,
)
from archon.rl.workflows.base import kept_samples
from archon.schema.errors import RolloutError

SHORT_FORM = ("input_ids", "output_ids", "reward")


def completed(result: Any, answers: Sequence[ModelResponse], source: str, *, apart: bool = False) -> Any:
    """A result in one of the short forms as the tensors that it stands for; any other one as it is.

    Short are `{"input_ids": prompt, "output_ids": answer, "reward": number}`, or a list of such rows, and a dictionary
    of `InteractionWithTokenLogpReward` by id. Those interactions without a reward are left out, and the others are
    parts of one trajectory.

    Args:
        answers: all that the engine has answered in this run.
        source: opens the message of the `RolloutError` for what cannot be completed.
        apart: each interaction is a trajectory.
    """
    rows = result if isinstance(result, list) else [result]
    if any(isinstance(row, dict) and "output_ids" in row and "attention_mask" not in row for row in rows):
        return _of_short_rows(rows, answers, source)
    if isinstance(result, dict) and any(isinstance(v, InteractionWithTokenLogpReward) for v in result.values()):
        return _of_interactions(result, source, apart)
    return result


def _of_short_rows(rows: Sequence[Any], answers: Sequence[ModelResponse], source: str) -> dict[str, Tensor]:
    recorded: defaultdict[tuple[tuple[int, ...], tuple[int, ...]], list[ModelResponse]] = defaultdict(list)
    for answer in answers:
        recorded[tuple(answer.input_tokens), tuple(answer.output_tokens)].append(answer)
    found, rewards = [], []
    for index, row in enumerate(rows):
        where = f"{source}: row {index}" if len(rows) > 1 else source
        if missing := [key for key in SHORT_FORM if key not in row]:
            raise RolloutError(f"{where} lacks key {missing[0]!r} of the short form; it has {sorted(map(str, row))}")
        prompt, output = (_token_ids(row[key], key, where) for key in SHORT_FORM[:2])
        same = recorded.get((prompt, output))
        if not same:
            asked = sum(tuple(answer.input_tokens) == prompt for answer in answers)
            raise RolloutError(
                f"{where}: the logprobs of the {len(output)} tokens of 'output_ids' are missing: the engine gave "
                f"{len(answers)} answers in this episode, {asked} of them to the {len(prompt)} tokens of 'input_ids', "
                "and none of these is 'output_ids'; return the tokens of one answer as they are, or the whole form "
                "(attention_mask, loss_mask, logprobs, versions, rewards)"
            )
        found.append(same.pop(0) if len(same) > 1 else same[0])
        rewards.append(_number(row["reward"], where))
    return _scored(found, rewards)


def _of_interactions(result: dict[str, Any], source: str, apart: bool) -> dict[str, Tensor]:
    for name, item in result.items():
        if not isinstance(item, InteractionWithTokenLogpReward):
            raise RolloutError(
                f"{source}: {name!r} is a {type(item).__name__}, expected an InteractionWithTokenLogpReward like others"
            )
    rewarded = [item for item in result.values() if item.reward is not None]
    if not rewarded:
        raise RolloutError(f"{source}: none of the {len(result)} interactions has a reward; set one, or return None")
    return _scored(rewarded, [_number(item.reward, source) for item in rewarded], one_trajectory=not apart)


def _scored(
    answers: Sequence[ModelResponse], rewards: Sequence[float], *, one_trajectory: bool = False
) -> dict[str, Tensor]:
    """Tensors of the answers that can be trained on; others are counted, and the first failure raised where none is."""
    outcomes: list[Reward | BaseException] = []
    for answer, reward in zip(answers, rewards, strict=True):
        try:
            check_answer(answer)
            outcomes.append(Reward(reward))
        except UnusableAnswerError as error:
            outcomes.append(error)
    kept = kept_samples(answers, outcomes)
    ids = [0] * len(kept) if one_trajectory else None
    return trajectory_tensors([answer for answer, _ in kept], [float(reward) for _, reward in kept], ids)


def _token_ids(value: Any, key: str, where: str) -> tuple[int, ...]:
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise RolloutError(f"{where}: {key!r} is a {type(value).__name__}, expected a tensor of integers") from None
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or (ids.is_floating_point() and ids.numel()):
        raise RolloutError(
            f"{where}: {key!r} is {ids.dtype} of shape {tuple(ids.shape)}, expected integers of shape [L] or [1, L]; "
            "several answers are a list of such rows"
        )
    return tuple(map(int, ids.tolist()))


def _number(value: Any, where: str) -> float:
    try:
        return float(torch.as_tensor(value, dtype=torch.float64).reshape(()))
    except (TypeError, ValueError, RuntimeError):
        raise RolloutError(f"{where}: 'reward' is {value!r:.80}, expected one number") from None


def trajectory_ids(result: Mapping[str, Any]) -> Tensor:
    """Int64 [B]: which trajectory each row of a group is (a part of), from 0 on."""
    rows = torch.arange(len(result["rewards"]))
    ids: Tensor = result.get("trajectory_ids", rows).unique(return_inverse=True)[1]
    return ids


def is_one_trajectory(result: Any) -> bool:
    """Whether what a workflow returned is a single trajectory, be it usable or not; False where it is malformed."""
    if isinstance(result, list):
        return len(result) == 1
    if not isinstance(result, dict):
        return False
    if "attention_mask" not in result:  # a short form of one answer, or the parts of one trajectory
        return True
    ids = result.get("trajectory_ids")
    if isinstance(ids, Tensor):
        return len(ids.unique()) == 1
    rewards = result.get("rewards")
    return isinstance(rewards, Tensor) and rewards.numel() == 1


def joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of several runs on one prompt as one group; no trajectory is of two runs."""
    parts, before = [], 0
    for run in runs:
        ids = trajectory_ids(run)
        parts.append({**run, "trajectory_ids": before + ids})
        before += int(ids.max()) + 1
    return concat_padded_tensors(parts)


def checked_result(result: dict[str, Any], context: EpisodeContext, source: str) -> dict[str, Any]:
    """A workflow's result without the rows that cannot be trained on, which are counted; the rest validated.

    Raises `RolloutError` naming key and shape when the result is malformed, or when no row is left.
    """
    return validate_trajectory(_without_unusable_rows(result, context), source)


def _without_unusable_rows(result: dict[str, Any], context: EpisodeContext) -> dict[str, Any]:
    ndims = {"rewards": 1, "logprobs": 2, "loss_mask": 2}
    values = [result.get(name) for name in ndims] if isinstance(result, dict) else []
    tensors = [value for value in values if isinstance(value, Tensor)]
    if [value.ndim for value in tensors] != list(ndims.values()) or len({len(value) for value in tensors}) > 1:
        return result  # validate_trajectory says what is missing or which shape is wrong
    rewards, logprobs, loss_mask = tensors
    usable = {
        "reward_not_finite": rewards.isfinite(),
        "logprob_not_finite": logprobs.isfinite().all(1),
        "no_loss_token": loss_mask.any(1),
    }
    keep = usable["reward_not_finite"] & usable["logprob_not_finite"] & usable["no_loss_token"]
    if keep.all():
        return result
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
