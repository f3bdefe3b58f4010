"""The steps of trajectories: the model's answers one by one, each with the observation that it answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One answer within a row.

    Attributes:
        row: its row of the batch.
        tokens: the places of its trained tokens in the row, ascending.
        state: int, equal for steps of one group that answer the same observation.
    """

    row: int
    tokens: tuple[int, ...]
    state: int


def split_steps(
    input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, group_ids: Tensor, turn_ids: Tensor | None = None
) -> tuple[Step, ...]:
    """Returns the steps of a batch, row by row and in the order of their turns.

    The observation of a step is the tokens that the model was given since its previous answer; of the first step it is
    the whole prompt.

    Args:
        input_ids: int [B, S].
        attention_mask: bool [B, S], 1 at tokens that are not padding.
        loss_mask: [B, S], 1 at trained tokens.
        group_ids: int [B].
        turn_ids: int [B, S], the turn of each trained token; None: a turn ends where a token is not trained.
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
    """Yields the observed tokens and the places of the trained tokens of each answer of a row."""
    observed: list[int] = []
    answer: list[int] = []
    for place, token in enumerate(ids):
        if answer and attended[place] and (not trained[place] or turns[place] != turns[answer[-1]]):
            yield tuple(observed), tuple(answer)
            observed, answer = [], []
        if trained[place]:
            answer.append(place)
        elif attended[place]:
            observed.append(token)
    if answer:
        yield tuple(observed), tuple(answer)
