"""Steps of trajectories: each answer of the model with the observation before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One answer within a row.

    Attributes:
        row: row of the batch.
        tokens: positions of its trained tokens in the row, ascending.
        state: equal for steps of one group with the same observation.
    """

    row: int
    tokens: tuple[int, ...]
    state: int


def split_steps(
    input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, group_ids: Tensor, turn_ids: Tensor | None = None
) -> tuple[Step, ...]:
    """Return the steps of a batch, by row and turn.

    The observation of a step is the input tokens since the previous answer, or the prompt for the first step.

    Args:
        input_ids: int [B, S].
        attention_mask: bool [B, S], False at padding.
        loss_mask: [B, S], 1 at trained tokens.
        group_ids: int [B].
        turn_ids: int [B, S], the turn of each trained token; None: an untrained token ends a turn.
    """
    turns = loss_mask if turn_ids is None else turn_ids
    columns = (x.tolist() for x in (input_ids, attention_mask, loss_mask, turns))
    states: dict[tuple[int, tuple[int, ...]], int] = {}
    steps: list[Step] = []
    for row, (group, *tokens) in enumerate(zip(group_ids.tolist(), *columns, strict=True)):
        for observed, answer in _answers(*tokens):
            steps.append(Step(row, answer, states.setdefault((group, observed), len(states))))
    return tuple(steps)


def _answers(
    ids: list[int], attended: list[int], trained: list[int], turns: list[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the observed tokens and the trained positions of each answer of a row."""
    observed: list[int] = []
    answer: list[int] = []
    for position, token in enumerate(ids):
        if answer and attended[position] and (not trained[position] or turns[position] != turns[answer[-1]]):
            yield tuple(observed), tuple(answer)
            observed, answer = [], []
        if trained[position]:
            answer.append(position)
        elif attended[position]:
            observed.append(token)
    if answer:
        yield tuple(observed), tuple(answer)
