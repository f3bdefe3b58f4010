"""What a batch is worth before it is trained on: `PolicyUpdate.prepare` through real engines, against numbers worked
out by hand and plain loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.rl.algorithms.advantages import AdvantageInputs
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.trajectories import concat_padded_tensors
from archon.rl.update import PolicyUpdate
from tests.rl.formulas import (
    plain_advantages,
    plain_correction,
    plain_kept,
    plain_kl,
    plain_logprobs,
    plain_penalty,
)
from tests.rl.objectives import float64_engine, steps_undone, trajectories
from tests.tolerances import INVARIANCE_FP64

TEMPERATURE = 2.0


class Models(NamedTuple):
    policy: ArchonEngine
    reference: ArchonEngine
    critic: ArchonEngine


def without_layers(path: str, scale: float, **config: Any) -> ArchonEngine:
    """An engine whose layers add nothing and whose token i is embedded as the i-th unit vector, which the last norm
    multiplies by `scale`."""
    engine = float64_engine(path, **config)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if name.startswith("layers."):
                parameter.zero_()
        weights = dict(engine.model.named_parameters())
        weights["tok_embeddings.weight"].copy_(torch.eye(*weights["tok_embeddings.weight"].shape))
        weights["norm.weight"].fill_(scale * math.sqrt(1 / engine.args.dim + engine.args.norm_eps))
    return engine


@pytest.fixture(scope="module")
def known(blank: Path) -> Models:
    """Of 15 tokens and at `TEMPERATURE`, the policy gives the one that repeats the last 8/15 and each other 1/30: odds
    of 16 to 1. The reference gives each 1/15. Behind token i the critic expects i/10."""
    policy = without_layers(str(blank), TEMPERATURE * math.log(16))
    reference = without_layers(str(blank), 0.0)
    critic = without_layers(str(blank), 1.0, is_critic=True)
    assert policy.args.vocab_size == 15 and critic.model.score is not None
    with torch.no_grad():
        critic.model.score.weight.copy_(torch.arange(critic.args.dim).unsqueeze(0) / 10)
    return Models(policy, reference, critic)


@pytest.fixture(scope="module")
def random_models(blank: Path) -> Models:
    return Models(*(float64_engine(str(blank), seed=i, is_critic=i == 2) for i in range(3)))


def answer(tokens: list[int], mask: list[int], probabilities: list[float], reward: float) -> dict[str, Tensor]:
    """A trajectory that the generator gave these probabilities, of trained tokens alone."""
    logprobs = torch.zeros(1, len(tokens), dtype=torch.float64)
    trained = torch.tensor([mask]) == 1
    logprobs[trained] = torch.tensor(probabilities, dtype=torch.float64).log()
    return {
        "input_ids": torch.tensor([tokens]),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool),
        "loss_mask": trained.long(),
        "logprobs": logprobs,
        "rewards": torch.tensor([reward], dtype=torch.float64),
    }


def one_answer() -> dict[str, Tensor]:
    """Behind the prompt 5 the answer 5, 7, then a message, 9, and the answer 9."""
    row = answer([5, 5, 7, 9, 9], [0, 1, 1, 0, 1], [4 / 15, 2 / 15, 8 / 15], reward=1.0)
    return row | {"group_ids": torch.tensor([0])}


def prepared(
    models: Models, batch: dict[str, Tensor], temperature: float = TEMPERATURE, limit: int = 10, **algorithm: Any
) -> tuple[dict[str, Tensor], dict[str, float], float]:
    """What was prepared, its metrics, and the policy loss of the step that follows."""
    config = AlgorithmConfig.parse({"kl": {"coef": 0.0}, "aggregation": "token_mean"} | algorithm)
    critic = models.critic if config.advantage.needs_critic else None
    reference = models.reference if config.kl.coef else None
    update = PolicyUpdate(
        models.policy, reference, config, critic=critic, temperature=temperature, max_new_tokens=limit
    )
    with steps_undone(policy=models.policy, critic=critic):
        found, metrics = update.prepare(batch, step=0)
        return found, metrics, update.train(found, step=0)["policy_loss"]


def earned(found: dict[str, Tensor]) -> list[float]:
    """The return of each trained token, of a batch with advantage gae, γ = 1 and λ = 0: A_t = r_t + V_{t+1} − V_t."""
    values = (found["old_values"] * found["loss_mask"])[found["loss_mask"] == 1]
    following = torch.cat([values[1:], torch.zeros(1, dtype=values.dtype)])
    advantages: Tensor = found["advantages"][found["loss_mask"] == 1]
    return (advantages - following + values).tolist()


EARNED: dict[str, Any] = {"advantage": {"kind": "gae", "gamma": 1.0, "lam": 0.0}}

IN_REWARD = {"place": "reward", "coef": 0.3}


def m2po(max_second_moment: float) -> dict[str, Any]:
    return {"kind": "m2po", "max_second_moment": max_second_moment}


@pytest.mark.parametrize(
    ("recomputed", "kind", "expected"),
    [
        # The reference gives each 1/15, the generator gave 4/15, 2/15 and 8/15: d = ln 4, ln 2, ln 8. Half of each is
        # taken off, and the reward of 1 comes with the last token.
        # k1: −0.693147, −0.346574, 1 − 1.039721.
        (False, "k1", [-0.693147, -0.346574, -0.039721]),
        # k2: d²/2 = 0.960906, 0.240227, 2.162039.
        (False, "k2", [-0.480453, -0.120113, -0.081020]),
        # k3: 1/4 − 1 + ln 4 = 0.636294, 1/2 − 1 + ln 2 = 0.193147, 1/8 − 1 + ln 8 = 1.204442.
        (False, "k3", [-0.318147, -0.096574, 0.397779]),
        # The policy itself gives 8/15 (5 repeats 5), 1/30 (7 does not) and 8/15 (9 repeats 9): d = ln 8, −ln 2, ln 8. A
        # token that the policy likes less than the reference earns by it.
        # k1: −1.039721, +0.346574, 1 − 1.039721.
        (True, "k1", [-1.039721, 0.346574, -0.039721]),
        # k3 of −ln 2: 2 − 1 − 0.693147 = 0.306853.
        (True, "k3", [-0.602221, -0.153426, 0.397779]),
    ],
)
def test_kl_in_the_reward_worked_by_hand(known: Models, recomputed: bool, kind: str, expected: list[float]) -> None:
    correction = {"correction": "tis"} if recomputed else {}
    kl = {"place": "reward", "kind": kind, "coef": 0.5}
    found, _, _ = prepared(known, one_answer(), kl=kl, **EARNED, **correction)
    assert earned(found) == pytest.approx(expected, abs=1e-6)
    assert found["advantages"][found["loss_mask"] == 0].abs().max() == 0


@pytest.mark.parametrize(
    ("algorithm", "weights", "touched"),
    [
        # π_prox = 8/15, 1/30, 8/15 over π_behave = 4/15, 2/15, 8/15: ρ = 2, 1/4 and 1.
        ({"correction": {"kind": "tis", "max_ratio": 1.5}}, [1.5, 0.25, 1.0], 1 / 3),
        ({"correction": {"kind": "tis", "max_ratio": 3.0}}, [2.0, 0.25, 1.0], 0.0),
        ({"correction": {"kind": "icepop", "min_ratio": 0.5, "max_ratio": 3.0}}, [2.0, 0.0, 1.0], 1 / 3),
        ({"correction": {"kind": "icepop", "min_ratio": 0.2, "max_ratio": 1.5}}, [0.0, 0.25, 1.0], 1 / 3),
        # Their product is 1/2.
        ({"correction": {"kind": "sequence_tis", "max_ratio": 2.0}}, [0.5, 0.5, 0.5], 0.0),
        ({"correction": {"kind": "sequence_tis", "max_ratio": 0.4}}, [0.4, 0.4, 0.4], 1.0),
        ({"policy_loss": "decoupled", "correction": {"kind": "tis", "max_ratio": 1.5}}, [1.5, 0.25, 1.0], 1 / 3),
        # (log ρ)² = 0.480453, 1.921812 and 0: the mean of all is 0.80, without the second 0.24 <= 0.5.
        ({"policy_loss": m2po(0.5)}, [1.0, 0.0, 1.0], None),
        ({"policy_loss": m2po(0.9)}, [1.0, 1.0, 1.0], None),
        (
            {"policy_loss": m2po(0.5), "correction": {"kind": "tis", "max_ratio": 1.5}},
            [1.5, 0.0, 1.0],
            1 / 3,
        ),
    ],
)
def test_policy_weights_worked_by_hand(
    known: Models, algorithm: dict[str, Any], weights: list[float], touched: float | None
) -> None:
    """They are what the loss of the step is weighted by, whose ratio to π_prox is 1."""
    kl = {"place": "reward", "kind": "k1", "coef": 0.5}
    found, metrics, policy_loss = prepared(known, one_answer(), kl=kl, **EARNED, **algorithm)
    trained = found["loss_mask"] == 1
    assert found["policy_weights"][trained].tolist() == pytest.approx(weights, abs=1e-6)
    assert metrics.get("correction_fraction") == (None if touched is None else pytest.approx(touched))
    if isinstance(algorithm.get("policy_loss"), dict):
        assert metrics["m2_masked_fraction"] == pytest.approx(weights.count(0.0) / 3)
    elif touched is not None:
        assert metrics["correction_weight"] == pytest.approx(sum(weights) / 3, abs=1e-6)
    advantages = found["advantages"][trained].tolist()
    expected = -math.fsum(a * weight for a, weight in zip(advantages, weights, strict=True)) / 3
    assert policy_loss == pytest.approx(expected, abs=1e-6)


def test_overlong_penalty_is_taken_off_the_reward_worked_by_hand(known: Models) -> None:
    # At most 10 tokens, of which the last 4 are the buffer: 6 tokens cost nothing, 7 a quarter and 10 all of the
    # penalty of 2. Rewards 1, 0.5 and 0 become 1, 0 and −2; the other tokens earn nothing.
    rows = [answer([5] * (1 + n), [0] + [1] * n, [0.5] * n, r) for n, r in ((6, 1.0), (7, 0.5), (10, 0.0))]
    batch = concat_padded_tensors(rows) | {"group_ids": torch.tensor([0, 0, 1])}
    overlong = {"penalty": 2.0, "buffer": 0.4}
    plain, metrics, _ = prepared(known, batch, advantage="dr_grpo", overlong=overlong)
    # Group 0: 1 and 0 about their mean of 1/2; group 1 is one answer, which tells nothing.
    assert plain["advantages"][:, 1].tolist() == pytest.approx([0.5, -0.5, 0.0])
    assert metrics["overlong_fraction"] == pytest.approx(2 / 3)
    found, _, _ = prepared(known, batch, overlong=overlong, **EARNED)
    for row, (length, reward) in enumerate(((6, 1.0), (7, 0.0), (10, -2.0))):
        trajectory_index = {name: value[row : row + 1] for name, value in found.items()}
        assert earned(trajectory_index) == pytest.approx([0.0] * (length - 1) + [reward], abs=1e-6)


def test_returns_worked_by_hand(known: Models) -> None:
    # The critic expects 5/10 behind 5 and 7/10 behind 7, so V = 0.5 before 7 and 0.7 before 9; the reward is 2.
    # γ = λ = 1/2: δ_2 = 2 − 0.7 = 1.3 = A_2; δ_1 = 0.7/2 − 0.5 = −0.15, A_1 = −0.15 + 1.3/4 = 0.175. Returns are A + V:
    # 0.675 and 2. They vary by (1.325/2)² = 0.438906, their errors 0.175 and 1.3 by (1.125/2)² = 0.316406: the critic
    # explains 1 − 0.316406 / 0.438906 = 0.279103 of them.
    batch = answer([5, 7, 9], [0, 1, 1], [0.5, 0.5], reward=2.0) | {"group_ids": torch.tensor([0])}
    found, metrics, _ = prepared(known, batch, advantage={"kind": "gae", "gamma": 0.5, "lam": 0.5})
    assert found["old_values"][0, 1:].tolist() == pytest.approx([0.5, 0.7], abs=1e-6)
    assert found["advantages"].tolist()[0] == pytest.approx([0.0, 0.175, 1.3], abs=1e-6)
    assert found["returns"].tolist()[0] == pytest.approx([0.0, 0.675, 2.0], abs=1e-6)
    assert metrics["explained_variance"] == pytest.approx(0.279103, abs=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"kl": {"kind": "k1", **IN_REWARD}, "correction": {"kind": "tis", "max_ratio": 1.1}},
        {"correction": {"kind": "icepop", "min_ratio": 0.6, "max_ratio": 1.4}},
        {"correction": {"kind": "sequence_tis"}},
        {"policy_loss": {"kind": "decoupled"}, "correction": {"kind": "tis"}},
        {"policy_loss": m2po(0.3)},
        {"policy_loss": m2po(0.3), "correction": {"kind": "tis", "max_ratio": 1.1}},
    ],
    ids=lambda algorithm: "-".join(str(part["kind"]) for part in algorithm.values()) or "none",
)
def test_prepare_equals_plain_loops(random_models: Models, algorithm: dict[str, Any]) -> None:
    """Nine answers of odd lengths, one of them in two turns: everything from the logprobs of plain logits."""
    batch = trajectories()
    batch["loss_mask"][8, 5] = 0
    # A buffer of 4 tokens: quarters are exact in the penalty's float32.
    algorithm = {"kl": IN_REWARD, "overlong": {"penalty": 0.7, "buffer": 0.7}} | algorithm
    gae: dict[str, Any] = {"advantage": {"kind": "gae", "gamma": 0.97, "lam": 0.9}}
    found, metrics, policy_loss = prepared(random_models, batch, temperature=0.8, limit=6, **gae, **algorithm)

    config = AlgorithmConfig.parse(gae | algorithm)
    token_rewards, values = torch.zeros(2, *batch["loss_mask"].shape, dtype=torch.float64)
    weights, log_ratios, penalties = list[float](), list[float](), list[float]()
    for row in range(9):
        trained = (batch["loss_mask"][row] == 1).nonzero().flatten()
        with torch.no_grad():
            prox, ref = (plain_logprobs(engine, batch, row, 0.8)[0] for engine in random_models[:2])
            values[row, trained] = plain_values(random_models.critic, batch, row)[trained - 1]
        generated = batch["logprobs"][row, trained]
        own = prox if config.recomputes_logprobs else generated
        for t, d in zip(trained.tolist(), (own - ref).tolist(), strict=True):
            token_rewards[row, t] = -0.3 * plain_kl(d, config.kl.kind)
        weights += [
            weight for weight, _ in plain_correction((prox - generated).tolist(), generated.tolist(), config.correction)
        ]
        log_ratios += (prox - generated).tolist()
        penalties.append(plain_penalty(len(trained), 6, 4))
    rewards = batch["rewards"] + 0.7 * torch.tensor(penalties, dtype=torch.float64)
    if config.policy_loss.kind == "m2po":
        kept = plain_kept(log_ratios, 0.3)
        assert 0 < sum(kept) < len(kept)
        weights = [weight * keeps for weight, keeps in zip(weights, kept, strict=True)]
        assert metrics["m2_masked_fraction"] == pytest.approx(1 - sum(kept) / len(kept))

    of = AdvantageInputs(rewards, batch["group_ids"], batch["loss_mask"], token_rewards, values)
    advantages = torch.tensor(plain_advantages(of, config.advantage), dtype=torch.float64)
    exactly = {"rtol": INVARIANCE_FP64, "atol": INVARIANCE_FP64}
    torch.testing.assert_close(found["advantages"], advantages, **exactly)
    torch.testing.assert_close(found["returns"], advantages + values, **exactly)
    of_tokens = advantages[batch["loss_mask"] == 1]
    if config.recomputes_logprobs:
        assert found["policy_weights"][batch["loss_mask"] == 1].tolist() == pytest.approx(weights, rel=INVARIANCE_FP64)
        expected = -math.fsum(a * weight for a, weight in zip(of_tokens.tolist(), weights, strict=True)) / len(weights)
        assert policy_loss == pytest.approx(expected, rel=INVARIANCE_FP64)


def plain_values(critic: ArchonEngine, batch: dict[str, Tensor], row: int) -> Tensor:
    """Behind each token of one answer."""
    tokens = batch["input_ids"][row][batch["attention_mask"][row]]
    n = len(tokens)
    return critic.model(tokens, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n).reshape(n)
