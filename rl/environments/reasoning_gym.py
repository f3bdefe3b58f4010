"""Generated questions and scores of the package reasoning_gym.

`train_data.path: reasoning_gym:TASK` provides rows, and `reward: reasoning_gym:TASK` the package's score.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from archon.data.environments import EnvironmentName, import_environment, parse_environment
from archon.rl.environments.splits import HELD_OUT_EVERY, SIZE, is_held_out, require_split
from archon.schema.errors import ConfigError, DatasetError, RewardError

NO_ANSWER = "(none: many answers are right)"
"""Gold answer of tasks without one; set `rollout.n_gold_checks` to 0 for them."""

_STATED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_DRAWN = 4 * HELD_OUT_EVERY  # maximum number of questions drawn per row
_DRAWN_BALANCED = 5 * _DRAWN  # the same with max_share
_ROW_OPTIONS = {"size", "max_share"}  # options of archon, not of the task


def rows(name: EnvironmentName, split: str, seed: int) -> list[dict[str, Any]]:
    """Return `size` questions of a task (500 by default), generated from `seed`.

    The splits `train` and `test` never share a question; `all` is the result of the package's `create_dataset`. A row
    holds `prompt`, `response`, the `environment` and the package's `entry`. `max_share` below 1 caps the fraction of
    rows with the same answer, for every prefix of the rows (rounded up).

    Raises:
        ConfigError: unknown task or option, or a value that the task refuses.
        DatasetError: unknown split, or too few questions or answers for the requested size.
    """
    require_split(name, split, ("train", "test", "all"))
    size, share = name.integer_option("size", SIZE), _max_answer_fraction(name)
    drawn = size * (_DRAWN_BALANCED if share < 1 else 1 if split == "all" else _DRAWN)
    kept = list(islice(_cap_answer_share(_draw_split(name, seed, drawn, split), share), size))
    if len(kept) < size:
        few, remedy = ("questions", "") if share == 1 else ("answers", "raise max_share, ")
        raise DatasetError(
            f"{name.text}: {drawn} questions contain {len(kept)} for split {split}, but size is {size}; "
            f"the task has few different {few}: {remedy}widen its options, or make size smaller"
        )
    return [
        {
            "prompt": item["question"],
            "response": NO_ANSWER if item["answer"] is None else str(item["answer"]),
            "environment": name.text,
            "entry": item,
        }
        for item in kept
    ]


def _max_answer_fraction(name: EnvironmentName) -> float:
    share = name.options.get("max_share", 1)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"{name.text}: max_share is {share!r}, expected a fraction above 0 and at most 1")
    return float(share)


def _draw_split(name: EnvironmentName, seed: int, drawn: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the questions of a split among the first `drawn` of the task."""
    for item in _dataset(name, seed, drawn):
        if split == "all" or is_held_out(item["question"]) == (split == "test"):
            yield item


def _cap_answer_share(items: Iterable[dict[str, Any]], share: float) -> Iterator[dict[str, Any]]:
    """Yield items, capping every answer at `share` of the output (rounded up)."""
    counts, yielded = Counter[str](), 0
    for item in items:
        answer = str(item["answer"])
        if share == 1 or counts[answer] < math.ceil(round(share * (yielded + 1), 9)):
            counts[answer] += 1
            yielded += 1
            yield item


def reward(name: EnvironmentName) -> Callable[..., float]:
    """Return the reward of a task; the name `reasoning_gym` alone scores rows of any task."""
    if name.options:
        raise ConfigError(
            f"{name.text}: a reward takes no options (every row has them); set reward to {name.family}:{name.task}"
        )
    if name.task:
        name.require_task(import_environment(name, "reasoning_gym.factory").DATASETS)
    return partial(score, name.task)


def make_environment(name: EnvironmentName) -> Callable[[], Any]:
    """Raise ConfigError: the package has single-turn questions only."""
    raise ConfigError(
        f"workflow {name.text}: reasoning_gym has single questions, which the default workflow samples; "
        f"leave workflow out, and set train_data.path and reward to reasoning_gym:{name.task or 'TASK'}"
    )


def score(
    task: str,
    prompt: Any,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    *,
    environment: str = "",
    entry: dict[str, Any] | None = None,
    **data: Any,
) -> float:
    """Score the text in the completion's last `<answer>` tags, or the whole completion."""
    name = parse_environment(environment)
    if name is None or entry is None:
        raise RewardError(
            f"the reward reasoning_gym:{task} got a row of another dataset; set train_data.path (and eval_data.path) "
            f"to reasoning_gym:{task or 'TASK'}"
        )
    if task not in ("", name.task):
        raise RewardError(f"the reward reasoning_gym:{task} cannot score a row of {environment}; set reward to it")
    return float(_scorer(environment)(extract_answer_tag(completions), entry))


def extract_answer_tag(completion: str) -> str:
    """Return the stripped content of the last `<answer>…</answer>`, or the stripped completion."""
    stated = _STATED.findall(completion)
    return str(stated[-1] if stated else completion).strip()


@lru_cache(maxsize=64)
def _scorer(environment: str) -> Callable[[str, dict[str, Any]], float]:
    name = parse_environment(environment)
    assert name is not None
    scorer: Callable[[str, dict[str, Any]], float] = _dataset(name, 0, 1).score_answer
    return scorer


def _dataset(name: EnvironmentName, seed: int, size: int) -> Any:
    """Return the package's dataset for a task with the options in its name."""
    factory = import_environment(name, "reasoning_gym.factory")
    import_environment(name, "reasoning_gym")  # registers the tasks
    name.require_task(factory.DATASETS)
    known = {field.name for field in fields(factory.DATASETS[name.task][1])} - {"seed"} | _ROW_OPTIONS
    if "seed" in name.options:
        raise ConfigError(f"{name.text}: seed is not an option; set train_data.seed (or eval_data.seed)")
    name.require_options(known, f"the task {name.task}")
    options = {option: value for option, value in name.options.items() if option not in _ROW_OPTIONS}
    try:
        return factory.create_dataset(name.task, **options, seed=seed % 2**32, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        values = ", ".join(f"{option}={value!r}" for option, value in options.items()) or "its defaults"
        raise ConfigError(
            f"{name.text}: the task refuses {values}: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error
