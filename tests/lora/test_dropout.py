"""Dropout of a LoRA's input: PEFT's place and scale, the same masks in every run and layout, none outside training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from archon.checkpoint.native import find_checkpoint, open_state
from archon.checkpoint.peft.export import export_lora
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.memory.activations import LoRAMatrix, MicroBatchShard, lora_tensors
from archon.models.layers.feed_forward import DenseLayer
from archon.models.layers.linear import Linear
from archon.models.lora.dropout import LoRADropout, hash_text, token_keys
from archon.models.lora.layers import LoRALayer
from archon.models.lora.mapping import LoRAMapping
from archon.parallel.layout import parse_layout
from archon.schema.errors import ConfigError
from tests.engine.tiny import make_engine, sft_batch
from tests.lora.oracle import TOLERANCE, base_of, difference
from tests.lora.oracle import engine_of as oracle_engine
from tests.lora.tiny import MOE, engine_of, train

P = 0.3
DROPOUT: dict[str, Any] = {"rank": 4, "alpha": 8.0, "init": "random", "dropout": P}


def gradients(engine: Any, batch: Any = None) -> dict[str, Tensor]:
    grads, _ = engine.gradients(sft_batch() if batch is None else batch, CrossEntropyLoss(), loss_token_count)
    return grads


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-10) -> bool:
    return a.keys() == b.keys() and all(difference(a[name], b[name]) <= tolerance for name in a)


class Masked(nn.Module):
    """Dropout with the masks of an archon layer."""

    def __init__(self, dropout: LoRADropout, keys: Tensor) -> None:
        super().__init__()
        self.dropout, self.keys = dropout, keys

    def forward(self, x: Tensor) -> Tensor:
        return x * self.dropout.keep(self.keys, 0, x.shape[-1]) / (1 - self.dropout.probability)


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3"])
def test_gradients_are_pefts_with_the_same_masks(model_type: str, tmp_path: Path) -> None:
    base = base_of(model_type, tmp_path / "base")
    names = ["q_proj" if model_type == "qwen3" else "kv_b_proj", "o_proj"]
    lora = DROPOUT | {"targets": names}
    engine = oracle_engine(base, lora=lora, optimizer={})
    engine.save(tmp_path / "lora", "peft")
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["lora_dropout"] == P
    tokens = torch.arange(3, 40)
    batch = {"input_ids": tokens[None], "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool)}
    batch["loss_mask"] = batch["attention_mask"].long()
    grads = gradients(engine, batch)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    model = peft.PeftModel.from_pretrained(whole, tmp_path / "lora", is_trainable=True)
    keys = token_keys(tokens, [len(tokens)], hash_text("0 0"))
    pairs = []
    for name in engine.lora:
        hf = engine.adapter.hf_names(name)[0].removesuffix(".weight")
        layer = model.get_submodule(f"base_model.model.{hf}")
        assert isinstance(layer.lora_dropout["default"], nn.Dropout) and layer.lora_dropout["default"].p == P
        layer.lora_dropout["default"] = Masked(LoRADropout(P, hash_text(name)), keys)
        own = name.removesuffix("weight") + "lora."
        pairs += [(own + part, getattr(layer, f"lora_{part.upper()}")["default"].weight) for part in "ab"]
    model(tokens[None], labels=tokens[None]).loss.backward()
    assert max(difference(grads[name], weight.grad) for name, weight in pairs) <= TOLERANCE
    other = gradients(oracle_engine(base, lora=lora | {"dropout": 0.0}, optimizer={}), batch)
    assert not same(grads, other, 0.01)


def test_masks_drop_the_expected_share_independently() -> None:
    keys = token_keys(torch.zeros(600, dtype=torch.int64), [300, 300], 5)
    dropout = LoRADropout(P, 7)
    keep = dropout.keep(keys, 0, 512)
    assert torch.equal(keep[:300], keep[300:]), "equal documents"
    assert torch.equal(keep[:, 100:300], dropout.keep(keys, 100, 200)), "a shard of the features"
    kept = keep[:300].double()
    assert abs(kept.mean() - 0.7) < 0.005
    for dim, count in ((0, 300), (1, 512)):
        assert abs(kept.mean(dim) - 0.7).max() < 5 * (0.21 / count) ** 0.5
    for other in (LoRADropout(P, 8).keep(keys, 0, 512)[:300], keep[:300].roll(1, 0), keep[:300].roll(1, 1)):
        assert abs((kept - 0.7).mul(other.double() - 0.7).mean()) < 0.003
    assert not torch.equal(keys, token_keys(torch.zeros(600, dtype=torch.int64), [300, 300], 6))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dropout")
    make_engine(folder / "made", dtype="float64").save(folder / "base")
    return str(folder / "base")


def test_micro_batches_recomputation_order_and_prefixes_change_nothing(wide: str) -> None:
    options: dict[str, Any] = {"lora": DROPOUT, "dtype": "float64"}
    batch = sft_batch((9, 9, 12, 5))
    batch["input_ids"][1, :6] = batch["input_ids"][0, :6]
    plain = gradients(engine_of(wide, share_prefixes=False, max_tokens_per_mb=64, **options), batch)
    for change in (
        {"share_prefixes": True},
        {"share_prefixes": False, "max_tokens_per_mb": 12},
        {"share_prefixes": False, "activation_checkpoint": {"mode": "full"}},
    ):
        assert same(plain, gradients(engine_of(wide, **options, **change), batch)), change
    mirrored = {name: x.flip(0) for name, x in batch.items()}
    assert same(plain, gradients(engine_of(wide, **options), mirrored))


def test_only_training_drops_each_step_anew_and_a_resumed_run_is_the_same(wide: str, tmp_path: Path) -> None:
    engine, plain = (engine_of(wide, lora=DROPOUT | {"dropout": p}) for p in (P, 0.0))
    batch = sft_batch()
    assert torch.equal(engine.forward_batch(batch), plain.forward_batch(batch))
    first = gradients(engine)
    assert same(first, gradients(engine), 0.0)
    assert not same(first, gradients(engine_of(wide, lora=DROPOUT | {"seed": 0}, optimizer=None)), 0.01), "no training"
    engine.step = 1
    assert not same(first, gradients(engine), 0.01)
    engine.step = 0
    train(engine, 2)
    engine.save(tmp_path / "native", format="native")
    losses = train(engine, 2, first=2)
    other = engine_of(wide, lora=DROPOUT)
    folder = find_checkpoint(tmp_path / "native")
    assert folder is not None
    with open_state(folder, other.fingerprint) as (_, state):
        other.load_state_dict(state["engine"])
    assert train(other, 2, first=2) == losses
    assert same(dict(engine.lora_weights()), dict(other.lora_weights()), 0.0)
    export_lora(folder, tmp_path / "out", wide)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_dropout"] == P
    loaded, silent = (engine_of(wide, lora={"path": str(tmp_path / "out")} | more) for more in ({}, {"dropout": 0.0}))
    found = [module.dropout for module in loaded.model.modules() if isinstance(module, LoRALayer)]
    assert found and all(dropout is not None and dropout.probability == P for dropout in found)
    assert not same(gradients(loaded), gradients(silent), 0.01)


def test_dropout_that_training_cannot_apply_is_refused(wide: str, tmp_path: Path) -> None:
    make_engine(tmp_path / "made", hf=MOE).save(tmp_path / "moe")
    with pytest.raises(
        ConfigError, match=r"lora\.dropout is 0\.3, and LoRA matrices of experts do not support dropout"
    ):
        engine_of(str(tmp_path / "moe"), lora=DROPOUT)
    gradients(engine_of(str(tmp_path / "moe"), lora=DROPOUT | {"targets": ["q_proj"]}))
    with pytest.raises(ConfigError, match=r"lora\.loras\.x\.dropout is 0\.3, and multi-LoRA trains without dropout"):
        engine_of(wide, lora={"loras": {"x": DROPOUT}})
    with pytest.raises(ConfigError, match="compiled blocks do not support dropout"):
        engine_of(wide, lora=DROPOUT, compile=True)


@pytest.mark.parametrize("role", ["column", "latent"])
def test_predicted_memory_is_what_autograd_keeps(role: Any) -> None:
    def kept(probability: float) -> int:
        layer = Linear(24, 16, bias=False, role=role)
        layer.weight.requires_grad_(False)
        layer.lora = LoRALayer(24, 16, 4, 1.0)
        layer.lora.dropout = LoRADropout(probability, 7) if probability else None
        x = torch.randn(10, 24, requires_grad=True)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.shape[0] == 10:
                saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = layer(x, LoRAMapping.for_dropout(torch.arange(10), x.device))
        assert out.requires_grad
        return sum(size for pointer, size in saved.items() if pointer != x.data_ptr())

    shard = MicroBatchShard(parse_layout("d1"), 10, 4)
    sizes = []
    for has_dropout in (False, True):
        matrix = LoRAMatrix("attention.wq", role, 24, 16, 4, has_dropout)
        sizes.append(sum(tensor.bytes for tensor in lora_tensors(matrix, DenseLayer(8), shard) if tensor.saved))
    assert sizes == [kept(0.0), kept(P)]
