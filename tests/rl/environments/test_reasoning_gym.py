"""reasoning_gym, the real package: its questions as rows, its scores as rewards, and three steps of a run."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archon.data import get_custom_dataset
from archon.rl import AsyncRewardWrapper, GenerationHyperparameters, RLTrainer, get_reward_fn
from archon.rl.config import RLConfig
from archon.rl.rewards.gold import averify_gold
from archon.rl.workflows import resolve_workflow
from archon.schema.errors import ConfigError, DatasetError, RewardError
from archon.training.metrics import read_jsonl
from tests.rl.written import assert_each_prompt_trained_once

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=3&max_digits=2&size=24"


def scored(reward: Callable[..., float], row: dict[str, Any], completion: str) -> float:
    return reward(row["prompt"], completion, [], [], **{k: v for k, v in row.items() if k != "prompt"})


def package_dataset(task: str, seed: int, size: int, **options: Any) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, seed=seed, size=size, **options)


def test_rows_of_the_split_all_are_those_of_the_package() -> None:
    rows = get_custom_dataset(SUMS, split="all", seed=7)
    theirs = package_dataset("chain_sum", 7, 24, min_terms=2, max_terms=3, max_digits=2)
    assert [(row["messages"][-1]["content"], row["answer"], row["entry"]) for row in rows] == [
        (item["question"], item["answer"], item) for item in theirs
    ]


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1), (5, 5 + 12)])
def test_no_question_is_both_trained_on_and_held_out(seeds: tuple[int, int]) -> None:
    """Items of the package are drawn from seed + index, so that other seeds alone give the same questions again."""
    train, test = (
        {row["prompt"] for row in get_custom_dataset(f"{SUMS}0", split=split, seed=seed)}
        for split, seed in zip(("train", "test"), seeds, strict=True)
    )
    assert len(train) > 100 and len(test) > 100 and not train & test


@pytest.mark.parametrize("split", ["train", "test", "all"])
def test_no_answer_has_more_than_its_share_of_the_first_rows_however_many(split: str) -> None:
    """Two thirds of these questions are answered by 1, a fourth by 2, and few by more."""
    path = "reasoning_gym:letter_counting?min_words=2&max_words=4"
    plain = get_custom_dataset(f"{path}&size=120", split=split, seed=3)
    limited = get_custom_dataset(f"{path}&size=120&max_share=0.3", split=split, seed=3)
    answers = [row["answer"] for row in limited]
    assert len(answers) == 120
    assert max(Counter(row["answer"] for row in plain).values()) > 70
    for taken in range(1, 121):
        assert max(Counter(answers[:taken]).values()) <= -(-3 * taken // 10)

    # The others are the questions that come first, in their order, and the same every time.
    drawn = iter(get_custom_dataset(f"{path}&size=3000", split=split, seed=3))
    assert all(any(row["prompt"] == other["prompt"] for other in drawn) for row in limited)
    assert limited == get_custom_dataset(f"{path}&size=120&max_share=0.3", split=split, seed=3)
    assert limited[:40] == [
        row | {"environment": limited[0]["environment"]}
        for row in get_custom_dataset(f"{path}&size=40&max_share=0.3", split=split, seed=3)
    ]
    assert scored(get_reward_fn("reasoning_gym:letter_counting"), limited[0], answers[0]) == 1.0


@pytest.mark.parametrize("task", ["leg_counting", "spell_backward", "countdown", "sudoku", "word_sorting"])
def test_the_reward_is_the_packages_own_score(task: str) -> None:
    """Of the gold answer it is 1, bare or in tags after thoughts; of the next row's answer what the package says."""
    rows = get_custom_dataset(f"reasoning_gym:{task}?size=4")
    reward = get_reward_fn(f"reasoning_gym:{task}")
    scores = package_dataset(task, 0, 1).score_answer
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        assert scored(reward, row, row["answer"]) == 1.0
        assert scored(reward, row, f"<answer>no</answer> I think <answer>\n{row['answer']}</answer>, or not") == 1.0
        wrong = scored(reward, row, other["answer"])
        assert wrong == scores(other["answer"], row["entry"]) and (wrong < 1.0 or row["answer"] == other["answer"])


def test_the_options_of_a_row_are_those_of_its_scorer() -> None:
    """The scorer of `base_conversion`, like several, is a method of the dataset with its options."""
    row = get_custom_dataset("reasoning_gym:countdown?min_numbers=3&max_numbers=3&size=1")[0]
    assert len(row["entry"]["metadata"]["numbers"]) == 3
    assert row["environment"] == "reasoning_gym:countdown?min_numbers=3&max_numbers=3&size=1"
    assert scored(get_reward_fn("reasoning_gym"), row, row["answer"]) == 1.0


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("reasoning_gym:leg_countin", {}, "has no task 'leg_countin'; did you mean leg_counting"),
        ("reasoning_gym", {}, "name a task: there are ab, acre"),
        ("reasoning_gym:gcd?min_nubers=3", {}, "the task gcd has no option 'min_nubers'; did you mean 'min_numbers'"),
        ("reasoning_gym:gcd?min_numbers=-3", {}, "the task refuses min_numbers=-3: "),
        ("reasoning_gym:gcd?size=many", {}, "size is 'many', expected a whole number of at least 1"),
        ("reasoning_gym:gcd?max_share=0", {}, "max_share is 0, expected a fraction above 0 and at most 1"),
        ("reasoning_gym:gcd?max_share=third", {}, "max_share is 'third', expected a fraction"),
        (
            "reasoning_gym:syllogism?max_share=0.4&size=10",
            {},
            "for split train, but size is 10; the task has few different answers: raise max_share",
        ),
        ("reasoning_gym:gcd?size", {}, "after the question mark expected option=value"),
        ("reasoning_gym:gcd?size=1&size=2", {}, "an option is there twice"),
        ("reasoning_gym:gcd?seed=4", {}, "seed is not an option; set train_data.seed"),
        ("reasoning_gym:gcd", {"split": "dev"}, "split is 'dev'; expected one of train, test, all"),
        ("reasoning_gym:gcd", {"subset": "x"}, "subset is 'x'"),
        ("reasoning_gym:gcd", {"data_dir": "x"}, "data_dir is 'x'"),
        (
            "reasoning_gym:gcd?min_numbers=2&max_numbers=2&min_value=3&max_value=4&size=10",
            {"split": "test"},
            "questions contain .* for split test, but size is 10; the task has few different questions",
        ),
    ],
)
def test_what_the_name_gets_wrong_is_said(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DatasetError), match=message):
        get_custom_dataset(path, **options)


def test_rewards_and_workflows_that_do_not_fit_are_refused(speaker: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean leg_counting"):
        get_reward_fn("reasoning_gym:leg_countin")
    with pytest.raises(ConfigError, match="a reward takes no options"):
        get_reward_fn("reasoning_gym:gcd?min_numbers=3")
    with pytest.raises(ConfigError, match="single questions, which the default workflow samples; leave workflow out"):
        resolve_workflow("reasoning_gym:gcd", gconfig=GenerationHyperparameters(), tokenizer=speaker)
    row = get_custom_dataset("reasoning_gym:gcd?size=1")[0]
    with pytest.raises(RewardError, match="cannot score a row of reasoning_gym:gcd"):
        scored(get_reward_fn("reasoning_gym:lcm"), row, "3")
    with pytest.raises(RewardError, match=r"got a row of another dataset; set train_data\.path"):
        scored(get_reward_fn("reasoning_gym:lcm"), {"prompt": "1+1=", "answer": "2"}, "3")


def test_a_missing_package_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning_gym.*pip install 'archon-engine\[envs\]'"):
        get_custom_dataset("reasoning_gym:gcd")


@pytest.mark.slow
def test_three_steps_are_trained_on_the_packages_rewards(short_run: Callable[..., RLConfig]) -> None:
    """In worker processes; the gold answers are checked before the first step, and generator and trainer agree."""
    config = short_run(train_data={"path": SUMS}, reward="reasoning_gym:chain_sum")
    metrics = RLTrainer(config).train()
    assert metrics["version"] == 3
    assert_each_prompt_trained_once(config)
    rows = get_custom_dataset(SUMS)
    entries = {row["prompt"].strip(): row["entry"] for row in rows}
    score = package_dataset("chain_sum", 0, 1).score_answer
    written = read_jsonl(Path(config.run_dir) / "trajectories.jsonl")
    assert len(written) == 12
    for one in written:
        (entry,) = (entry for question, entry in entries.items() if question in one["prompt"])
        said = one["completion"].replace("<|im_end|>", "").strip()
        assert one["reward"] == pytest.approx(score(said, entry))


@pytest.mark.slow
def test_gold_answers_of_all_tasks_score_one() -> None:
    """Of all but five tasks, whose answers the package does not state."""
    from reasoning_gym.factory import DATASETS

    unstated = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
    tasks = sorted(DATASETS.keys() - unstated - {"composite"})
    assert len(tasks) == 100
    rows = [row for task in tasks for row in get_custom_dataset(f"reasoning_gym:{task}?size=3")]
    with AsyncRewardWrapper("reasoning_gym", max_workers=1) as reward:
        assert asyncio.run(averify_gold(reward, rows, None)) == 300
