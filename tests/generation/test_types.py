"""Requests, hyperparameters and trajectories: what is refused, and how the refusal reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from archon.rl import GenerationHyperparameters, ModelRequest, concat_padded_tensors
from archon.rl.trajectories import validate_trajectory
from archon.schema.errors import RolloutError


def test_sampling_defaults_are_explicit() -> None:
    g = GenerationHyperparameters()
    assert (g.temperature, g.top_p, g.top_k, g.greedy, g.n_samples, g.min_new_tokens) == (1.0, 1.0, None, False, 1, 0)
    assert (g.stop, g.stop_token_ids, g.seed, g.max_tokens) == ([], [], None, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": -1},
        {"temperature": 1e-30},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": 2**63},
        {"stop_token_ids": [3, -1]},
        {"n_samples": 0},
        {"max_new_tokens": 0},
        {"min_new_tokens": 5, "max_new_tokens": 4},
        {"stop": [""]},
        {"seed": -1},
        {"temprature": 1.0},
    ],
)
def test_wrong_hyperparameters_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        GenerationHyperparameters(**changes)


def test_new_is_a_validated_copy() -> None:
    g = GenerationHyperparameters(stop_token_ids=[3], stop="x")
    changed = g.new(temperature=0.5, n_samples=4)
    assert (changed.temperature, changed.n_samples, changed.stop, changed.stop_token_ids) == (0.5, 4, ["x"], [3])
    changed.stop_token_ids.append(9)
    assert g.stop_token_ids == [3]
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        g.new(temperatur=1)


def test_stop_and_pad_ids_come_from_the_tokenizer() -> None:
    tokenizer = SimpleNamespace(eos_token_id=7, pad_token_id=3)
    g = GenerationHyperparameters(stop_token_ids=[3])
    assert g.new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids == [3, 7]
    tokenizer.pad_token_id = None
    assert GenerationHyperparameters().new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids == [7]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"input_ids": [1], "attention_mask": [1]}, "got a dict with keys .*return_dict=False"),
        ("abc", "got a str"),
        (5, "got a int"),
        ([1, 2.0], r"input_ids\[1\]: got 2.0 \(float\)"),
        ([True], r"input_ids\[0\]: got True \(bool\)"),
        ([[1, 2]], r"input_ids\[0\]: got \[1, 2\] \(list\)"),
        ([1, "2"], r"input_ids\[1\]: got '2'"),
        (torch.tensor([1, 2]), r"tensor of shape \(2,\).*tolist"),
    ],
)
def test_a_request_refuses_anything_but_integers(ids: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        ModelRequest(ids)


def test_a_request_takes_flat_integers_of_any_kind() -> None:
    wanted = ModelRequest(np.array([1, 2], dtype=np.int32))
    assert wanted.input_ids == [1, 2]
    assert {type(i) for i in wanted.input_ids} == {int}
    assert ModelRequest([1]).rid != ModelRequest([1]).rid


def trajectory(length: int = 4, prompt: int = 1, batch: int = 1, **changes: Any) -> dict[str, Any]:
    answer = torch.arange(length) >= prompt
    rows = {
        "input_ids": torch.arange(length),
        "attention_mask": torch.ones(length, dtype=torch.bool),
        "loss_mask": answer.long(),
        "logprobs": -answer.float(),
        "versions": torch.where(answer, 2, -1),
    }
    made = {key: value.expand(batch, -1).clone() for key, value in rows.items()} | {"rewards": torch.ones(batch)}
    return {key: value for key, value in (made | changes).items() if value is not None}


def test_joining_pads_each_field_with_its_own_value() -> None:
    joined = concat_padded_tensors([trajectory(3), trajectory(5, batch=2)])
    assert joined["input_ids"].tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert joined["attention_mask"].tolist()[0] == [True, True, True, False, False]
    assert joined["loss_mask"].tolist()[0] == [0, 1, 1, 0, 0]
    assert joined["logprobs"].tolist()[0] == [0, -1, -1, 0, 0]
    assert joined["versions"].tolist()[0] == [-1, 2, 2, -1, -1]
    assert joined["rewards"].tolist() == [1, 1, 1]
    assert validate_trajectory(joined)["attention_mask"].dtype == torch.bool


def test_joining_keeps_lists_and_rewards_of_one_dimension() -> None:
    parts = [
        trajectory(2, images=["a"], turn_ids=torch.tensor([[-1, 0]])),
        trajectory(3, images=["b"], turn_ids=torch.tensor([[-1, 0, 1]])),
    ]
    joined = concat_padded_tensors(parts)
    assert joined["images"] == ["a", "b"]
    assert joined["turn_ids"].tolist() == [[-1, 0, -1], [-1, 0, 1]]
    # Two rewards next to two tokens: a vector is never taken for a per-token field.
    assert concat_padded_tensors([trajectory(2, batch=2), trajectory(3, batch=3)])["rewards"].shape == (5,)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("key", ["logprobs", "attention_mask"])
def test_joining_says_which_dictionary_lacks_which_key(index: int, key: str) -> None:
    parts = [trajectory() for _ in range(3)]
    del parts[index][key]
    with pytest.raises(
        RolloutError, match=f"dictionary {index} lacks key '{key}', which dictionary {int(index == 0)} has"
    ):
        concat_padded_tensors(parts)


def test_joining_refuses_what_it_cannot_join() -> None:
    with pytest.raises(RolloutError, match="no dictionaries"):
        concat_padded_tensors([])
    with pytest.raises(RolloutError, match="'rewards' of dictionary 0 is a float"):
        concat_padded_tensors([trajectory(rewards=1.0)])
    with pytest.raises(RolloutError, match=r"'extra' has shapes \[\(3,\), \(5,\)\]"):
        concat_padded_tensors([trajectory(extra=torch.ones(1, 3)), trajectory(extra=torch.ones(1, 5))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, "lacks key 'logprobs'"),
        ({"rewards": None}, "lacks key 'rewards'"),
        ({"rewards": 1.0}, "'rewards' is a float, expected a tensor"),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, r"'input_ids' has shape \(4,\), expected \[B, S\]"),
        ({"logprobs": torch.zeros(1, 3)}, r"'logprobs' has shape \(1, 3\), expected \(1, 4\)"),
        ({"rewards": torch.zeros(1, 4)}, r"'rewards' has shape \(1, 4\), expected \(1,\)"),
        ({"versions": torch.zeros(1, 4)}, r"'versions' of shape \(1, 4\) is torch.float32, expected integers"),
        ({"logprobs": torch.full((1, 4), torch.nan)}, r"'logprobs' of shape \(1, 4\) is nan at \(0, 0\)"),
        ({"rewards": torch.tensor([torch.inf])}, r"'rewards' of shape \(1,\) is inf at \(0,\)"),
        ({"loss_mask": torch.full((1, 4), 2)}, "'loss_mask' of shape .* values other than 0 and 1"),
        (
            {"attention_mask": torch.zeros(1, 4, dtype=torch.bool)},
            "'loss_mask' of shape .* is 1 where 'attention_mask' is 0",
        ),
        ({"turn_ids": torch.zeros(1, 2, dtype=torch.long)}, r"'turn_ids' has shape \(1, 2\)"),
    ],
)
def test_a_wrong_trajectory_names_the_key_and_the_shape(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=f"MyWorkflow.*{message}"):
        validate_trajectory(trajectory(**changes), "MyWorkflow")


def test_a_right_trajectory_gets_the_documented_dtypes() -> None:
    given = trajectory(
        input_ids=torch.ones(1, 4, dtype=torch.int32),
        attention_mask=torch.ones(1, 4, dtype=torch.int32),
        loss_mask=torch.ones(1, 4, dtype=torch.bool),
        logprobs=torch.zeros(1, 4, dtype=torch.bfloat16),
        rewards=torch.tensor([1]),
        note=["kept"],
    )
    checked = validate_trajectory(given)
    dtypes = {key: value.dtype for key, value in checked.items() if isinstance(value, torch.Tensor)}
    assert dtypes == {
        "input_ids": torch.int64,
        "attention_mask": torch.bool,
        "loss_mask": torch.int64,
        "logprobs": torch.float32,
        "versions": torch.int64,
        "rewards": torch.float32,
    }
    assert checked["note"] == ["kept"]
    assert validate_trajectory(trajectory(logprobs=torch.zeros(1, 4).double()))["logprobs"].dtype == torch.float64
    with pytest.raises(RolloutError, match="got a list"):
        validate_trajectory([1])
