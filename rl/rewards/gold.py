"""Check before step 0: the reward must score gold answers with at least 1.0."""

from __future__ import annotations

import asyncio
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
    r"""Score the gold answers of `n` evenly spaced rows (None: all), and return the number of checks.

    The gold answer in the dataset's form or as `\boxed{…}` must score at least 1.0.

    Raises:
        RewardError: a row has no `answer`, or its gold answer scores less or makes the reward fail.
    """
    if not isinstance(reward, AsyncRewardWrapper):
        with AsyncRewardWrapper(reward) as wrapper:
            return await averify_gold(wrapper, rows, n)
    count = len(rows) if n is None else min(n, len(rows))
    indices = [index * len(rows) // count for index in range(count)]
    await asyncio.gather(*(_check(reward, index, rows[index]) for index in indices))
    return count


async def _check(reward: AsyncRewardWrapper, index: int, row: Mapping[str, Any]) -> None:
    if "answer" not in row:
        raise RewardError(
            f"row {index} has no gold `answer` to check the reward {reward.name} with; has: {sorted(row)}"
        )
    answer = str(row["answer"])
    scores = []
    for completion in (answer, rf"\boxed{{{gold_answer(answer)[0]}}}"):
        try:
            scores.append(await reward(row.get("prompt", ""), completion, [], [], **row))
        except RewardFailure as failure:
            message = f"the reward fails on the gold answer of row {index} ({answer[-80:]!r}): {failure}"
            raise RewardError(message) from failure
        if scores[-1] >= 1.0:
            return
    raise RewardError(
        f"the gold answer of row {index} ({answer[-80:]!r}) scores {max(scores):g} instead of 1.0 with the reward "
        f"{reward.name}; choose the reward of this dataset, or fix its `answer` column; set rollout.n_gold_checks=0 "
        "for a reward that gives a bare answer less than 1.0"
    )
