"""Expansion of short forms (tokens and reward of an answer) with recorded logprobs and versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from archon.generation.record import UnusableAnswerError, check_answer
from archon.generation.types import ModelResponse
from archon.rl.trajectories import trajectory_tensors
from archon.rl.workflows.base import drop_failed_samples
from archon.schema.errors import RolloutError

SHORT_FORM = ("input_ids", "output_ids", "reward")


@dataclass
class InteractionWithTokenLogpReward:
    """One answer and its reward; a reward of None is unknown, not 0.

    Attributes:
        model_response: the engine's response.
        reward: a number, or a tensor of one number.
        messages: the conversation, for the user.
        output_message_list: the answer as messages, for the user.
    """

    model_response: ModelResponse | None = None
    reward: Any = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    output_message_list: list[dict[str, Any]] | None = None

    def to_tensor_dict(self) -> dict[str, Tensor]:
        """Return the answer as one trajectory, tensors [1, S] and `rewards` [1].

        Raises:
            RolloutError: answer or reward is missing.
        """
        return trajectory_tensors([_answer(self, "to_tensor_dict")], [_number(self.reward, "to_tensor_dict")])


def _answer(item: InteractionWithTokenLogpReward, where: str) -> ModelResponse:
    if item.model_response is None:
        raise RolloutError(
            f"{where}: the interaction has no model_response; set it to the result of engine.agenerate(request)"
        )
    return item.model_response


def expand_short_form(result: Any, answers: Sequence[ModelResponse], source: str, *, separate: bool = False) -> Any:
    """Return the trajectory tensors of a short form, and any other result unchanged.

    Short forms are `{"input_ids": prompt, "output_ids": answer, "reward": number}`, a list of such rows, and a
    dictionary of `InteractionWithTokenLogpReward` by id. Interactions without a reward are dropped.

    Args:
        result: result of a workflow run.
        answers: all engine responses of this run.
        source: prefix of error messages (`RolloutError`).
        separate: whether each interaction is its own trajectory, instead of a part of one trajectory.
    """
    rows = result if isinstance(result, list) else [result]
    if any(isinstance(row, dict) and "output_ids" in row and "attention_mask" not in row for row in rows):
        return _expand_rows(rows, answers, source)
    if isinstance(result, dict) and any(isinstance(v, InteractionWithTokenLogpReward) for v in result.values()):
        return _expand_interactions(result, source, separate)
    return result


def _expand_rows(rows: Sequence[Any], answers: Sequence[ModelResponse], source: str) -> dict[str, Tensor]:
    recorded: defaultdict[tuple[tuple[int, ...], tuple[int, ...]], list[ModelResponse]] = defaultdict(list)
    for answer in answers:
        recorded[tuple(answer.input_tokens), tuple(answer.output_tokens)].append(answer)
    returned, rewards = [], []
    for index, row in enumerate(rows):
        where = f"{source}: row {index}" if len(rows) > 1 else source
        if missing := [key for key in SHORT_FORM if key not in row]:
            raise RolloutError(f"{where} lacks key {missing[0]!r} of the short form; it has {sorted(map(str, row))}")
        prompt, output = (_token_ids(row[key], key, where) for key in SHORT_FORM[:2])
        same = recorded.get((prompt, output))
        if not same:
            n_same_prompt = sum(tuple(answer.input_tokens) == prompt for answer in answers)
            raise RolloutError(
                f"{where}: the logprobs of the {len(output)} tokens of 'output_ids' are missing: the engine returned "
                f"{len(answers)} answers in this episode, {n_same_prompt} of them to the {len(prompt)} tokens of "
                "'input_ids', and none of these is 'output_ids'; return the tokens of an answer unchanged, or the full "
                "form (attention_mask, loss_mask, logprobs, versions, rewards)"
            )
        returned.append(same.pop(0) if len(same) > 1 else same[0])
        rewards.append(_number(row["reward"], where))
    return _usable_tensors(returned, rewards)


def _expand_interactions(result: dict[str, Any], source: str, separate: bool) -> dict[str, Tensor]:
    for name, item in result.items():
        if not isinstance(item, InteractionWithTokenLogpReward):
            raise RolloutError(
                f"{source}: {name!r} is a {type(item).__name__}, expected an InteractionWithTokenLogpReward like others"
            )
    rewarded = [item for item in result.values() if item.reward is not None]
    if not rewarded:
        raise RolloutError(f"{source}: none of the {len(result)} interactions has a reward; set one, or return None")
    answers = [_answer(item, source) for item in rewarded]
    return _usable_tensors(answers, [_number(item.reward, source) for item in rewarded], one_trajectory=not separate)


def _usable_tensors(
    answers: Sequence[ModelResponse], rewards: Sequence[float], *, one_trajectory: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of usable answers, and count the unusable; raise the first failure if none is usable."""
    outcomes: list[float | BaseException] = []
    for answer, reward in zip(answers, rewards, strict=True):
        try:
            check_answer(answer)
            outcomes.append(reward)
        except UnusableAnswerError as error:
            outcomes.append(error)
    kept = drop_failed_samples(answers, outcomes)
    ids = [0] * len(kept) if one_trajectory else None
    return trajectory_tensors([answer for answer, _ in kept], [reward for _, reward in kept], ids)


def _token_ids(value: Any, key: str, where: str) -> tuple[int, ...]:
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise RolloutError(f"{where}: {key!r} is a {type(value).__name__}, expected a tensor of integers") from None
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or ((ids.is_floating_point() or ids.is_complex()) and ids.numel()):
        raise RolloutError(
            f"{where}: {key!r} is {ids.dtype} of shape {tuple(ids.shape)}, expected integers of shape [L] or [1, L]; "
            "return several answers as a list of such rows"
        )
    return tuple(map(int, ids.tolist()))


def _number(value: Any, where: str) -> float:
    try:
        return float(torch.as_tensor(value, dtype=torch.float64).reshape(()))
    except (TypeError, ValueError, RuntimeError):
        raise RolloutError(f"{where}: 'reward' is {value!r:.80}, expected one number") from None
