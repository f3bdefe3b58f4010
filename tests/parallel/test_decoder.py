"""The shared parallelize function on one process: its order, its policies, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from archon.models.base import BaseArchonModel
from archon.models.qwen3 import Qwen3Model, Qwen3ModelArgs, parallelize_qwen3
from archon.parallel.activation_checkpoint import apply_activation_checkpointing
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.fsdp import is_sharded
from archon.parallel.mixed_precision import has_mixed_precision
from archon.schema.config import ActivationCheckpointConfig
from archon.schema.errors import ConfigError
from tests.engine.tiny import full_tensor

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def model(**how: Any) -> BaseArchonModel:
    args = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 24, "vocab_size": 11}
    torch.manual_seed(0)
    built = Qwen3Model(Qwen3ModelArgs(**args, head_dim=8, tie_word_embeddings=True))
    built.init_weights()
    parallelize_qwen3(built, how.pop("dims", ArchonParallelDims()), **how)
    return built


def forward(built: nn.Module) -> torch.Tensor:
    ends = torch.tensor([0, len(TOKENS)], dtype=torch.int32)
    return built(TOKENS, torch.arange(len(TOKENS)), ends, len(TOKENS))


def test_one_process_has_mixed_precision_if_the_compute_dtype_differs() -> None:
    assert not has_mixed_precision(model(param_dtype=torch.float32))
    assert has_mixed_precision(model())  # bfloat16 is the default
    assert not is_sharded(model())
    assert forward(model()).dtype == torch.bfloat16
    assert forward(model(param_dtype=torch.float32)).dtype == torch.float32


@pytest.mark.parametrize(("policy", "kept"), [("default", {"root"}), ("always", set()), ("never", {"root", "block"})])
def test_reshard_policies_keep_what_they_say_and_compute_the_same(policy: str, kept: set[str]) -> None:
    built, reference = model(reshard_after_forward_policy=policy), model()
    copies: dict[str, torch.Tensor] = {}
    for name, module in {"root": built.norm, "block": built.layers["0"].ffn_norm}.items():  # type: ignore[union-attr]
        module.register_forward_hook(lambda module, args, out, name=name: copies.update({name: module.weight.data}))
    out = forward(built)
    assert {x.dtype for x in copies.values()} == {torch.bfloat16}
    assert {name for name, x in copies.items() if x.untyped_storage().nbytes()} == kept
    assert torch.equal(out, forward(reference))
    for each in (built, reference):
        forward(each).float().square().sum().backward()
    for (name, ours), (_, theirs) in zip(built.named_parameters(), reference.named_parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(full_tensor(ours.grad), full_tensor(theirs.grad)), name


def test_weights_that_came_apart_are_tied_again() -> None:
    built = Qwen3Model(
        Qwen3ModelArgs(dim=16, n_layers=1, n_heads=2, hidden_dim=24, vocab_size=11, tie_word_embeddings=True)
    )
    assert built.output is not None
    built.output.weight = nn.Parameter(built.tok_embeddings.weight.detach().clone())
    parallelize_qwen3(built, ArchonParallelDims(), param_dtype=torch.float32)
    assert built.output.weight is built.tok_embeddings.weight


def test_what_one_process_cannot_do_is_refused_before_the_model_is_touched() -> None:
    with pytest.raises(ConfigError, match="cpu_offload = true needs sharded parameters"):
        model(cpu_offload=True)
    with pytest.raises(ConfigError, match="must be default, always or never, got 'sometimes'"):
        model(reshard_after_forward_policy="sometimes")


def test_every_nth_block_recomputes_and_stays_the_class_it_was() -> None:
    layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(5)})
    apply_activation_checkpointing([*layers.values()], ActivationCheckpointConfig(mode="selective", selective=2))
    assert [type(block).__name__ for block in layers.values()] == ["Linear", "CheckpointedLinear"] * 2 + ["Linear"]
    assert all(isinstance(block, nn.Linear) for block in layers.values())
    assert len({type(block) for block in layers.values()}) == 2


def test_the_first_blocks_recompute() -> None:
    layers = [nn.Linear(2, 2) for _ in range(5)]
    apply_activation_checkpointing(layers, ActivationCheckpointConfig(mode="selective", selective="first 3"))
    assert [type(block).__name__ for block in layers] == ["CheckpointedLinear"] * 3 + ["Linear"] * 2


def test_auto_is_left_to_the_engine() -> None:
    with pytest.raises(ConfigError, match="auto, which only the engine resolves"):
        model(ac_config=ActivationCheckpointConfig(mode="auto"))
