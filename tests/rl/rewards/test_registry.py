"""Reward functions by name and by dotted path; what they may return."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import math
import subprocess
import sys

import pytest
import torch

from archon.rl.rewards import (
    VALID_REWARD_FN,
    AsyncRewardWrapper,
    Reward,
    RewardInvalid,
    as_reward,
    get_reward_fn,
    lookup,
    register_reward,
)
from archon.schema.errors import ConfigError, RewardError
from tests.rl.rewards import faulty


def test_every_valid_name_gives_a_function() -> None:
    names = ["clevr_count_70k", "code_tests", "code_tests_fraction", "countdown", "exact_match", "geometry3k"]
    names += ["gsm8k", "math_verify"]
    assert list(VALID_REWARD_FN) == names
    assert all(callable(get_reward_fn(name)) for name in VALID_REWARD_FN)


def test_a_name_may_have_the_suffix_of_a_function() -> None:
    for name in VALID_REWARD_FN:
        assert get_reward_fn(f"{name}_reward_fn") is get_reward_fn(f"{name}_reward") is get_reward_fn(name)


def test_a_registered_reward_is_found_by_its_name_and_runs_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup._NAMED, "_objects", dict(lookup._NAMED._objects))
    assert register_reward("obedient")(faulty.obey) is faulty.obey
    assert "obedient" in VALID_REWARD_FN and get_reward_fn("obedient_reward_fn") is faulty.obey
    with AsyncRewardWrapper("obedient", max_workers=1) as wrapper:
        assert asyncio.run(wrapper("p", "0.5", [], [])) == 0.5
    with pytest.raises(ConfigError, match="the reward 'gsm8k' is registered already"):
        register_reward("gsm8k")(faulty.obey)


def test_a_dotted_string_gives_the_users_own_function() -> None:
    assert get_reward_fn("tests.rl.rewards.faulty.obey") is faulty.obey


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", r"unknown reward 'gsm9k' \(did you mean 'gsm8k'\?\); expected one of clevr_count_70k, code_tests"),
        ("no.such.module", "cannot load the reward 'no.such.module': No module named 'no'"),
        ("tests.rl.rewards.faulty.missing", "has no attribute 'missing'"),
        ("tests.rl.rewards.faulty.FAULTS", "is a dict, not a function"),
    ],
)
def test_a_reward_that_is_not_there_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        get_reward_fn(name)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"needs the package math-verify.*pip install 'archon-engine\[rl\]'"):
        get_reward_fn("math_verify")


@pytest.mark.parametrize("value", [1, 1.0, True, torch.tensor(1.0), torch.tensor([1.0])])
def test_every_kind_of_number_is_a_reward(value: object) -> None:
    reward = as_reward(value, "f")
    assert reward == 1.0
    assert type(reward) is Reward
    assert reward.parts == {}


def test_dictionaries_are_summed_and_keep_their_parts() -> None:
    reward = as_reward({"correct": 1, "format": 0.25}, "f")
    assert reward == 1.25
    assert reward.parts == {"correct": 1.0, "format": 0.25}
    assert copy.deepcopy(reward).parts == reward.parts
    assert as_reward(reward, "f").parts == reward.parts


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        Reward(math.nan),
        torch.tensor(math.nan),
        torch.tensor([1.0, 2.0]),
        None,
        "1.0",
        [1.0],
        1j,
        {},
        {"correct": math.nan},
        {"correct": None},
        {3: 1.0},
        {"a": 1e308, "b": 1e308},
    ],
    ids=repr,
)
def test_anything_but_finite_numbers_is_an_error_naming_the_function(value: object) -> None:
    with pytest.raises(RewardInvalid, match=r"reward function my\.score ") as caught:
        as_reward(value, "my.score")
    assert isinstance(caught.value, RewardError)
    assert caught.value.kind == "invalid"


def test_rewards_import_neither_torch_nor_transformers() -> None:
    script = (
        "import sys; import archon.rl; from archon.rl.rewards import AsyncRewardWrapper, get_reward_fn, verify_gold; "
        "from archon.rl.rewards.worker import main; get_reward_fn('gsm8k'); get_reward_fn('math_verify'); "
        "print(sorted({'torch', 'transformers', 'numpy', 'sympy', 'pydantic'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
