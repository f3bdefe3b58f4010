"""The experts that a generator recorded, on their way to the trainer's routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.micro_batch import micro_batches
from archon.engine.reference import open_reference
from archon.models.layers.routed_experts import to_replay, unknown_expert_id
from archon.rl import RLTrainer
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.config import RLConfig
from archon.rl.experience_buffer import ExperienceBuffer, split_groups
from archon.rl.prompts import Prompt
from archon.rl.trajectories import concat_padded_tensors, join_groups, validate_trajectory
from archon.rl.update import PolicyUpdate
from archon.schema.config import EngineConfig
from archon.schema.errors import BatchError, ConfigError, RolloutError
from tests.rl.conftest import small_run
from tests.rl.objectives import trajectories
from tests.rl.test_router_biases import blank_of
from tests.tolerances import FIRST_RATIO_FP32

LAYERS, TOP_K, EXPERTS = 2, 2, 8


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return blank_of("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def engine(moe: Path) -> ArchonEngine:
    config = {
        "path": str(moe),
        "init_from_scratch": True,
        "device": "cpu",
        "dtype": "float64",
        "optimizer": {"lr": 1e-9},
    }
    made = ArchonEngine(EngineConfig.parse(config))
    made.initialize(10)
    return made


def with_experts(batch: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The batch with random experts of each token."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(*batch["input_ids"].shape, LAYERS, EXPERTS, generator=generator)
    return {**batch, "routed_experts": scores.topk(TOP_K).indices.to(torch.uint8)}


def test_a_run_trains_with_the_generators_experts(moe: Path, tmp_path: Path) -> None:
    run = small_run(moe, tmp_path / "run")
    run["generator"]["record_experts"] = True
    run |= {"total_steps": 2, "algorithm": {"kl": {"coef": 0.0}, "correction": {"kind": "tis"}, "ppo_epochs": 2}}
    metrics = RLTrainer(RLConfig.parse(run)).train()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for record in [record for record in records if "loss" in record]:
        assert record["first_logprob_diff"] <= FIRST_RATIO_FP32
        # All tokens but the last of each answer.
        missing = record["samples"] / record["tokens"]
        assert record["router_replay/share"] == pytest.approx(1 - missing, abs=1e-6)
        assert 0 <= record["router_replay/changed"] < 0.2
    assert metrics["router_replay/share"] > 0.5


def test_the_policy_uses_the_experts_and_the_reference_chooses_for_itself(engine: ArchonEngine) -> None:
    algorithm = AlgorithmConfig.parse({"kl": {"coef": 0.1}, "correction": {"kind": "tis"}})
    reference = open_reference(engine, engine.config)
    update = PolicyUpdate(engine, reference, algorithm, temperature=1.0)
    plain = trajectories()
    given = with_experts(plain)
    without, prepared = update.prepare(plain, 0)[0], update.prepare(given, 0)[0]
    assert torch.equal(prepared["ref_logprobs"], without["ref_logprobs"])
    trained = plain["loss_mask"] > 0
    assert (prepared["prox_logprobs"] - without["prox_logprobs"])[trained].abs().min() > 0
    assert torch.equal(prepared["prox_logprobs"], engine.forward_batch(given, only_trained=True))
    metrics = update.train(prepared, 0)
    assert metrics["router_replay/share"] == 1.0
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-9) or "ratio" not in metrics
    assert "router_replay/share" not in update.train(without, 0)


def test_experts_are_of_the_token_that_is_read_and_padding_and_packing_change_nothing(engine: ArchonEngine) -> None:
    batch = {name: trajectories()[name] for name in ("input_ids", "attention_mask", "loss_mask")}
    given = with_experts(batch)
    together = engine.forward_batch(given)
    for row in range(len(batch["input_ids"])):
        ids = batch["input_ids"][row][batch["attention_mask"][row] != 0]
        experts = given["routed_experts"][row][batch["attention_mask"][row] != 0].to(torch.int16)
        n = len(ids)
        labels = torch.cat([ids[1:], torch.tensor([-100])])
        bounds = torch.tensor([0, n], dtype=torch.int32)
        with torch.no_grad():
            alone = engine.full_model(ids, torch.arange(n), bounds, n, labels=labels, routed_experts=experts)
        found = together[row][batch["attention_mask"][row] != 0]
        torch.testing.assert_close(found[1:], alone.logprobs[:-1], rtol=1e-10, atol=1e-10)


def test_the_balancing_loss_counts_the_experts_given(moe: Path) -> None:
    """All tokens use experts 0 and 1: the loss is E / 2 times the mean probability of both, twice."""
    config = {
        "path": str(moe),
        "init_from_scratch": True,
        "device": "cpu",
        "dtype": "float64",
        "optimizer": {"lr": 1e-9},
    }
    made = ArchonEngine(EngineConfig.parse(config | {"router_aux_loss_coef": 0.1}))
    made.initialize(1)
    batch = with_experts({name: trajectories()[name] for name in ("input_ids", "attention_mask", "loss_mask")})
    batch["routed_experts"][:] = torch.tensor([0, 1], dtype=torch.uint8)
    made.forward_batch(batch)
    stats = made.full_model.router_stats
    tokens = sum(float(one.tokens) for one in stats)
    of_both = sum(float(one.probabilities[:2].sum()) for one in stats) / tokens
    metrics = made.train_batch(batch, CrossEntropyLoss(), loss_token_count)
    assert metrics["router_aux_loss"] == pytest.approx(EXPERTS * of_both, rel=1e-9)
    assert [one.counts.tolist()[2:] for one in stats] == [[0.0] * 6] * LAYERS


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_groups_with_and_without_experts_go_through_the_buffer(dtype: torch.dtype, tmp_path: Path) -> None:
    def group(length: int, seed: int) -> dict[str, Any]:
        given = with_experts(trajectories(), seed)
        own = {name: x[:2, :length] if x.ndim > 1 else x[:2] for name, x in given.items() if name != "group_ids"}
        return {**own, "routed_experts": own["routed_experts"].to(dtype)}

    groups = [group(7, 0), group(9, 1), group(8, 2)]
    del groups[1]["routed_experts"]
    numbered = [{**g, "group_ids": torch.full((2,), n)} for n, g in enumerate(groups)]
    joined = join_groups(numbered)
    assert joined["routed_experts"].dtype == dtype
    assert torch.equal(joined["routed_experts"][:2, :7].long(), groups[0]["routed_experts"].long())
    assert (joined["routed_experts"][:2, 7:].long() == unknown_expert_id(dtype)).all()
    assert (joined["routed_experts"][2:4].long() == unknown_expert_id(dtype)).all()
    buffer = ExperienceBuffer(tmp_path / "groups.sqlite")
    parts = split_groups({**joined, "attention_mask": torch.ones_like(joined["input_ids"])})
    buffer.append(parts, [Prompt(n, {}) for n in range(3)], 1, None)
    read = [episode.trajectories for episode in buffer.read([0, 1, 2])]
    for part, back in zip(parts, read, strict=True):
        assert back is not None and back["routed_experts"].dtype == dtype
        assert torch.equal(back["routed_experts"].long(), part["routed_experts"].long())


def test_padding_of_joined_trajectories_is_unknown() -> None:
    long, short = (
        {"attention_mask": torch.ones(1, n), "routed_experts": torch.zeros(1, n, 1, 1, dtype=torch.uint8)}
        for n in (3, 1)
    )
    assert concat_padded_tensors([long, short])["routed_experts"].flatten().tolist() == [0, 0, 0, 0, 255, 255]


def record_with(*experts: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return a record [4, 6, 2, 2] of experts 0 and 1, and of `experts` for token 2 of row 1 in the second layer."""
    record = torch.tensor([0, 1]).repeat(4, 6, 2, 1)
    record[1, 2, 1] = torch.tensor(experts)
    return record.to(dtype)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (torch.zeros(4, 6, 2, 2, dtype=torch.int64), "int64; expected uint8"),
        (torch.zeros(4, 5, 2, 2, dtype=torch.uint8), "is uint8 (4, 5, 2, 2); expected (4, 6, layers"),
        (torch.zeros(4, 6, 3, 2, dtype=torch.uint8), "has [3, 2] numbers a token; this model has 2 layers"),
        (torch.full((4, 6, 2, 2), 8, dtype=torch.uint8), "names expert 8; this model has 8"),
        (record_with(1, 8), "names expert 8; this model has 8"),
        (record_with(255, 0, dtype=torch.uint16), "names expert 255; this model has 8"),
        (record_with(40_000, 0, dtype=torch.uint16), "names expert 40000; expected less than 32768"),
        (record_with(1, 255), "has the experts 1, unknown for token 8 of the pack in MoE layer 1; expected all"),
        (record_with(255, 1), "has the experts unknown, 1 for token 8 of the pack in MoE layer 1; expected all"),
        (record_with(3, 3), "has the experts 3, 3 for token 8 of the pack in MoE layer 1; expected different"),
    ],
)
def test_experts_of_another_model_are_refused(engine: ArchonEngine, experts: Tensor, message: str) -> None:
    ids = torch.ones(4, 6, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids, "loss_mask": ids, "routed_experts": experts}
    with pytest.raises(BatchError) as refused:
        engine.forward_batch(batch)
    assert message in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_an_unknown_token_has_the_largest_index_of_its_dtype(dtype: torch.dtype) -> None:
    """255 is unknown in a uint8 record and an expert in a uint16 record, whose unknown index is 65535."""
    record = torch.tensor([[[0, 254]], [[255, 255]], [[255, 7]], [[65535, 65535]]])
    narrow = dtype == torch.uint8
    found = to_replay((record.clamp(max=255) if narrow else record).to(dtype))
    assert found.dtype == torch.int16
    assert found.flatten(1).tolist() == [
        [0, 254],
        *([[-1, -1], [-1, 7]] if narrow else [[255] * 2, [255, 7]]),
        [-1, -1],
    ]


def test_a_workflows_experts_are_checked_and_a_dense_model_replays_none(blank: Path, tmp_path: Path) -> None:
    plain = trajectories()
    versions = torch.zeros_like(plain["input_ids"])
    wrong = {**plain, "versions": versions, "routed_experts": torch.zeros(2, 2)}
    with pytest.raises(RolloutError, match=r"'routed_experts' is torch.float32 \(2, 2\), expected uint8 or uint16"):
        validate_trajectory(wrong)
    run = small_run(blank, tmp_path / "run")
    run["generator"]["record_experts"] = True
    with pytest.raises(ConfigError, match=r"no MoE layers.*leave generator.record_experts out"):
        RLTrainer(RLConfig.parse(run)).train()


def test_documents_share_the_computation_of_tokens_that_used_the_same_experts_alone() -> None:
    ids = torch.arange(40).repeat(3, 1)
    same = torch.zeros(3, 40, LAYERS, TOP_K, dtype=torch.uint8)
    other = same.clone()
    other[2, 20, 1] = 5

    def computed(**experts: Tensor) -> int:
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **experts}
        shared = micro_batches(batch, 1000, 50, share_prefixes=True)[1][0].order.prefixes
        assert shared is not None
        return shared.rows.numel()

    assert computed() == computed(routed_experts=same) == 40
    assert computed(routed_experts=other) >= 60
