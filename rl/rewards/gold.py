"""Scores of gold answers before step 0: a verifier must give them at least 1.0."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from archon.rl.rewards.async_wrapper import AsyncRewardWrapper
from archon.rl.rewards.extract import gold_answer
from archon.rl.rewards.result import RewardFailure
from archon.schema.errors import RewardError


def verify_gold(
    reward: AsyncRewardWrapper | Callable[..., Any] | str, rows: Sequence[Mapping[str, Any]], n: int | None = 64
) -> int:
    """Run `averify_gold` outside an event loop."""
    return asyncio.run(averify_gold(reward, rows, n))


async def averify_gold(
    reward: AsyncRewardWrapper | Callable[..., Any] | str, rows: Sequence[Mapping[str, Any]], n: int | None = 64
) -> int:
    """Require that `gold_scores` are at least 1.0; return their number.

    Raises:
        RewardError: no row has an `answer`, or a gold answer scores less or makes the reward fail.
    """
    if not isinstance(reward, AsyncRewardWrapper):
        with AsyncRewardWrapper(reward) as wrapper:
            return await averify_gold(wrapper, rows, n)
    scores = await gold_scores(reward, rows, n)
    if not scores and n != 0:
        raise RewardError(
            f"no row has a gold `answer` to check the reward {reward.name} with; row 0 has: {sorted(rows[0])}"
        )
    for index, score in scores.items():
        if score < 1.0:
            answer = str(rows[index]["answer"])[-80:]
            raise RewardError(
                f"the gold answer of row {index} ({answer!r}) scores {score:g} instead of 1.0 with the reward "
                f"{reward.name}; choose the reward of this dataset, or fix its `answer` column; set "
                "rollout.n_gold_checks=0 for a reward that gives a bare answer less than 1.0"
            )
    return len(scores)


async def gold_scores(
    reward: AsyncRewardWrapper, rows: Sequence[Mapping[str, Any]], n: int | None = 64
) -> dict[int, float]:
    r"""Return the score of the gold answer of `n` evenly spaced rows (None: all), by row number.

    The score is the best of the gold answer in the dataset's form and as `\boxed{…}`. Rows without an `answer` have
    none.

    Raises:
        RewardError: the reward fails on a gold answer, or takes other arguments.
    """
    count = len(rows) if n is None else min(n, len(rows))
    indices = [index * len(rows) // count for index in range(count)]
    checked = [index for index in indices if rows[index].get("answer") is not None]
    if checked:
        reward.require_documented_form()
    scores = await asyncio.gather(*(_score(reward, index, rows[index]) for index in checked))
    return dict(zip(checked, scores, strict=True))


async def _score(reward: AsyncRewardWrapper, index: int, row: Mapping[str, Any]) -> float:
    answer = str(row["answer"])
    best = -math.inf
    for completion in (answer, rf"\boxed{{{gold_answer(answer)[0]}}}"):
        try:
            best = max(best, float(await reward(row.get("prompt", ""), completion, [], [], **row)))
        except RewardFailure as failure:
            message = (
                f"the reward fails on the gold answer of row {index} ({answer[-80:]!r}): {failure}; fix it, or set "
                "rollout.n_gold_checks=0 for a reward that may fail on gold answers"
            )
            raise RewardError(message) from failure
        if best >= 1.0:
            break
    return best
