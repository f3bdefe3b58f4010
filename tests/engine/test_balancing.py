"""Mixtures of experts in the engine: the auxiliary loss as transformers computes it, biases that even the load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import archon
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.micro_batch import micro_batches
from archon.models.layers.moe import expert_biases, load_balancing_loss
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError, ConfigError
from archon.tools.check.layouts import LENGTHS
from archon.tools.check.oracle import build_pair, checkpoint_tensors, pack, random_config, relative_error
from tests.distributed.cases import Case, batch, engine_config, whole_gradients, write_config
from tests.tolerances import PARITY_FP32

# Where every expert is chosen every time, the loss is constant and its gradient rounding.
SEEDS = [
    seed
    for seed in range(12)
    if random_config(seed, "qwen3_moe").num_experts_per_tok < random_config(seed, "qwen3_moe").num_experts
]
RATE = 0.01
SFT = CrossEntropyLoss()


def make_engine(tmp_path: Path, model: str = "moe", **config: Any) -> ArchonEngine:
    options = {"router_bias_update_rate": RATE} | config
    path = write_config(tmp_path / "config", model)
    engine = ArchonEngine(engine_config(Case("d1", model), path, "d1", init_from_scratch=True, seed=3, **options))
    engine.initialize()
    return engine


def train(engine: ArchonEngine, steps: range) -> dict[str, Tensor]:
    for step in steps:
        engine.train_batch(batch(LENGTHS, seed=step), SFT, loss_token_count)
    return {name: tensor.clone() for name, tensor in engine.weights()}


def biases(engine: ArchonEngine) -> dict[str, Tensor]:
    return {name: bias.clone() for name, bias in expert_biases(engine.model).items()}


def chosen(engine: ArchonEngine, data: dict[str, Tensor]) -> list[Tensor]:
    """How often each expert of each sparse layer is chosen for the tokens of a batch, in one pass over all of them."""
    packed, _ = micro_batches(data, 10**6, engine.args.vocab_size)
    engine.model(packed.tokens, packed.positions, packed.cu_seqlens, packed.max_seqlen)
    return [stats.counts for stats in engine.full_model.router_stats]


# The auxiliary loss


@pytest.mark.parametrize("seed", SEEDS)
def test_the_auxiliary_loss_and_its_gradients_are_those_of_transformers(seed: int) -> None:
    config = random_config(seed, "qwen3_moe")
    reference, model, adapter = build_pair(config, seed=seed)
    tokens, positions, cu_seqlens, longest = pack([37], config.vocab_size, seed)
    model(tokens, positions, cu_seqlens, longest)
    archon_loss = load_balancing_loss(model.router_stats)
    out = reference(input_ids=tokens.unsqueeze(0), use_cache=False, output_router_logits=True)
    reference_loss = load_balancing_loss_func(out.router_logits, config.num_experts, config.num_experts_per_tok)
    assert relative_error(archon_loss, reference_loss) <= PARITY_FP32
    archon_loss.backward()
    reference_loss.backward()
    for parameter in (*model.parameters(), *reference.parameters()):  # modules after the last router have none
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    reference_grads = adapter.from_hf(checkpoint_tensors(reference, gradients=True))
    archon_grads = {name: p.grad for name, p in model.named_parameters()}
    scale = max(float(gradient.abs().max()) for gradient in reference_grads.values())
    for name, gradient in reference_grads.items():
        assert float((archon_grads[name] - gradient).abs().max()) <= PARITY_FP32 * scale, name
    assert any(reference_grads[name].abs().max() > 0 for name in reference_grads if "router" in name)


def test_the_engine_adds_the_auxiliary_loss_of_a_micro_batch(tmp_path: Path) -> None:
    """Cross entropy and coefficient times transformers' loss, of one micro-batch, by transformers' own autograd."""
    config = random_config(SEEDS[0], "qwen3_moe")
    reference, _, adapter = build_pair(config, seed=1)
    config.save_pretrained(tmp_path / "in")
    native = adapter.from_hf(checkpoint_tensors(reference))
    spec = archon.models.get_model_spec("qwen3_moe")
    model = spec.model_class(adapter.args)
    model.load_state_dict(native, strict=False)
    archon.save_model(model, tmp_path / "out", like=tmp_path / "in")
    engine = ArchonEngine(
        EngineConfig(path=str(tmp_path / "out"), device="cpu", router_aux_loss_coef=0.3, max_tokens_per_mb=100)
    )
    engine.initialize()
    tokens = pack([29], config.vocab_size, 2)[0]
    data = {name: torch.ones(1, 29, dtype=torch.int64) for name in ("attention_mask", "loss_mask")}
    data["input_ids"] = tokens.unsqueeze(0)
    archon_grads, read = whole_gradients(engine, data, SFT)
    assert read["loss_weight"] == 28.0
    out = reference(input_ids=tokens.unsqueeze(0), use_cache=False, output_router_logits=True)
    entropy = torch.nn.functional.cross_entropy(out.logits[0, :-1], tokens[1:])
    aux = load_balancing_loss_func(out.router_logits, config.num_experts, config.num_experts_per_tok)
    assert read["loss"] == pytest.approx(float(entropy.detach()), rel=PARITY_FP32)
    assert read["router_aux_loss"] == pytest.approx(float(aux.detach()), rel=PARITY_FP32)
    (entropy + 0.3 * aux).backward()
    for name, gradient in adapter.from_hf(checkpoint_tensors(reference, gradients=True)).items():
        assert relative_error(archon_grads[name], gradient) <= PARITY_FP32, name


# Biases


def test_biases_move_against_the_load_of_all_micro_batches(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    assert all(not bias.any() for bias in biases(engine).values())
    expected = {name: torch.zeros_like(bias) for name, bias in biases(engine).items()}
    for step in range(3):
        data = batch(LENGTHS, seed=step)
        for name, counts in zip(expected, chosen(engine, data), strict=True):
            expected[name] += RATE * torch.sign(counts.mean() - counts)
        metrics = engine.train_batch(data, SFT, loss_token_count)
        assert metrics["micro_batches"] > 2
        assert all(torch.equal(bias, expected[name]) for name, bias in biases(engine).items())
    assert len(expected) == 3


def test_biases_even_the_load(tmp_path: Path) -> None:
    """Frozen weights but for the biases: the most loaded expert comes closer to the mean."""
    engine = make_engine(tmp_path, optimizer={"lr": 1e-12})
    data = batch(LENGTHS, seed=0)
    before = [float(counts.max() / counts.mean()) for counts in chosen(engine, data)]
    for _ in range(30):
        engine.train_batch(data, SFT, loss_token_count)
    after = [float(counts.max() / counts.mean()) for counts in chosen(engine, data)]
    assert all(b < 1 + (a - 1) / 2 for a, b in zip(before, after, strict=True)), (before, after)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpoint": {"mode": "full"}},
        {"activation_checkpoint": {"mode": "selective", "selective": "op"}},
        {"max_tokens_per_mb": 200},
    ],
    ids=["recomputed", "recomputed in part", "one micro-batch"],
)
def test_biases_do_not_depend_on_how_the_step_is_computed(tmp_path: Path, changes: dict[str, Any]) -> None:
    engine, other = make_engine(tmp_path), make_engine(tmp_path, **changes)
    data = batch(LENGTHS, seed=0)
    for one in (engine, other):
        one.train_batch(data, SFT, loss_token_count)
    assert all(torch.equal(bias, biases(other)[name]) for name, bias in biases(engine).items())


def test_evaluation_and_skipped_steps_move_no_bias(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    data = batch(LENGTHS, seed=0)
    engine.eval_batch(data, SFT, loss_token_count)
    engine.forward_batch(data)
    engine.model.get_parameter("norm.weight").data.fill_(float("nan"))
    assert engine.train_batch(data, SFT, loss_token_count)["skipped"] == 1
    assert all(not bias.any() for bias in biases(engine).values())


def test_what_a_skipped_step_counted_is_forgotten(tmp_path: Path) -> None:
    engine, plain = make_engine(tmp_path), make_engine(tmp_path)
    norm = engine.model.get_parameter("norm.weight")
    kept = norm.detach().clone()
    norm.data.fill_(float("nan"))
    engine.train_batch(batch(LENGTHS, seed=1), SFT, loss_token_count)
    norm.data.copy_(kept)
    assert all(torch.equal(a, b) for a, b in zip(*(train(e, range(1)).values() for e in (engine, plain)), strict=True))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_resumed_run_keeps_its_biases_and_moving_them_off_the_device_too(tmp_path: Path, dtype: str) -> None:
    engine = make_engine(tmp_path, dtype=dtype)
    train(engine, range(2))
    state = copy.deepcopy(engine.state_dict())
    assert {name for name in state["model"] if "expert_bias" in name} == set(biases(engine))
    engine.offload()
    engine.onload()
    straight = train(engine, range(2, 4))
    resumed = make_engine(tmp_path, dtype=dtype)
    resumed.load_state_dict(state)
    again = train(resumed, range(2, 4))
    assert straight.keys() == again.keys()
    assert all(torch.equal(straight[name], tensor) for name, tensor in again.items())
    assert all(bias.dtype == torch.promote_types(bias.dtype, torch.float32) for bias in biases(resumed).values())


def test_a_state_with_biases_needs_an_engine_with_them_and_the_reverse(tmp_path: Path) -> None:
    balanced, plain = make_engine(tmp_path), make_engine(tmp_path, router_bias_update_rate=0)
    with pytest.raises(CheckpointError, match=r"only the checkpoint has .*set router_bias_update_rate to the rate"):
        plain.load_state_dict(balanced.state_dict())
    with pytest.raises(CheckpointError, match=r"only this engine has .*set router_bias_update_rate to 0"):
        balanced.load_state_dict(plain.state_dict())


def test_a_bias_that_is_not_0_cannot_be_exported(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.save(tmp_path / "fresh")  # biases of 0 change nothing
    archon.save_model(engine.full_model, tmp_path / "fresh_too", like=tmp_path / "config")
    train(engine, range(1))
    with pytest.raises(CheckpointError, match=r"3 balancing biases are not 0 \(layers.0.moe.router.expert_bias"):
        engine.save(tmp_path / "out")
    with pytest.raises(CheckpointError, match="a Hugging Face checkpoint cannot hold them"):
        archon.save_model(engine.full_model, tmp_path / "out", like=tmp_path / "config")
    assert not (tmp_path / "out").exists()
    engine.load(tmp_path / "fresh")
    assert all(not bias.any() for bias in biases(engine).values())
    engine.save(tmp_path / "out")


def test_families_without_experts_and_engines_without_optimizer_have_nothing_to_balance(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router_bias_update_rate = 0\.01 balances experts, and family qwen3 has"):
        make_engine(tmp_path, "dense")
    with pytest.raises(ValueError, match=r"router_bias_update_rate = 0\.01 changes biases after each optimizer step"):
        make_engine(tmp_path, optimizer=None)
