"""Mixed precision on one process: copies of float32 weights while a unit runs, made by one kernel each pass."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from archon.parallel.activation_checkpoint import apply_activation_checkpointing
from archon.parallel.mixed_precision import apply_mixed_precision
from archon.schema.config import ActivationCheckpointConfig

DIM = 8


class Block(nn.Module):
    """A block with a matrix, a bias and a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.rand(DIM) + 0.5, requires_grad=False)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("a block failed")
        return torch.tanh(self.linear(x)) * self.scale


class Model(nn.Module):
    """Blocks between an embedding and an output that share their matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, DIM)
        self.layers = nn.ModuleDict({"0": Block(), "1": Block()})
        self.wide = nn.Linear(DIM, DIM, bias=False)
        self.wide.full_precision = True  # type: ignore[assignment]
        self.output = nn.Linear(DIM, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers.values():
            x = block(x)
        assert self.wide.weight.dtype == torch.float32
        return self.output(x + self.wide(x.float()).to(x.dtype))


class Operators(TorchDispatchMode):
    """Counter of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


TOKENS = torch.tensor([0, 3, 1, 4, 4])


def build(mode: str = "none", **frees: bool) -> Model:
    model = Model()
    apply_activation_checkpointing([*model.layers.values()], ActivationCheckpointConfig(mode=mode))  # type: ignore[arg-type]
    apply_mixed_precision(model, model.layers, torch.bfloat16, **({"free_blocks": True, "free_root": False} | frees))
    return model


def narrow() -> Model:
    """The model in bfloat16, except its wide matrix."""
    model = Model()
    wide = model.wide.weight.data
    model.bfloat16()
    model.wide.weight.data = wide
    return model


def gradients(model: Model, times: int = 1) -> dict[str, Tensor]:
    """Gradients of the sum over `times` forward passes, one backward pass."""
    sum(model(TOKENS).float().square().sum() for _ in range(times)).backward()  # type: ignore[union-attr]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("free_root", [False, True])
@pytest.mark.parametrize("free_blocks", [False, True])
def test_gradients_are_those_of_a_narrow_model_in_float32(mode: str, free_blocks: bool, free_root: bool) -> None:
    model = build(mode, free_blocks=free_blocks, free_root=free_root)
    expected = gradients(narrow())
    actual = gradients(model)
    assert (
        actual.keys()
        == expected.keys()
        == dict(model.named_parameters()).keys() - {f"layers.{i}.scale" for i in range(2)}
    )
    for name, grad in actual.items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, expected[name].float()), name
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
    assert model.output.weight is model.embedding.weight
    # A second micro-batch is added.
    assert all(torch.equal(grad, 2 * expected[name].float()) for name, grad in gradients(model).items())


def test_a_unit_runs_one_kernel_per_pass_for_its_weights() -> None:
    with Operators() as mixed:
        gradients(build())
    with Operators() as bare:
        gradients(narrow())
    added = mixed.counts - bare.counts
    launches = {name: n for name, n in added.items() if "empty" not in name and "detach" not in name}
    # Blocks copy in the forward, in the backward, and their gradients; the root keeps its copies for the backward.
    assert launches == {"aten._foreach_copy_.default": 2 * 3 + 2}


def test_several_forward_passes_before_a_backward_pass() -> None:
    expected = gradients(narrow(), times=3)
    # The reference adds three gradients in bfloat16, which has 8 bits; masters add them in float32.
    for name, grad in gradients(build(), times=3).items():
        assert torch.allclose(grad, expected[name].float(), rtol=2e-2, atol=1e-2 * float(grad.abs().max())), name


def test_the_backward_pass_reads_masters_as_they_are_and_frees_the_copies() -> None:
    model, copies = build(), list[Tensor]()
    for module in (model.layers["0"].linear, model.output):  # type: ignore[union-attr]
        module.register_forward_hook(lambda module, args, out: copies.append(module.weight.data))  # type: ignore[union-attr]
    loss = model(TOKENS).float().square().sum()
    assert [x.untyped_storage().nbytes() > 0 for x in copies] == [False, True]
    loss.backward()
    assert [x.untyped_storage().nbytes() for x in copies] == [0, 0]


def test_masters_are_back_after_a_failed_forward_and_in_copies_of_the_model() -> None:
    model = build()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert twin(TOKENS).abs().max() > 0 == model(TOKENS).abs().max()
    twin.layers["1"].fails = True  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="a block failed"):
        twin(TOKENS)
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    with torch.inference_mode():
        assert model(TOKENS).dtype == torch.bfloat16


def test_a_unit_without_weights_to_copy_is_left_alone() -> None:
    model = Model()
    model.layers.bfloat16()
    apply_mixed_precision(model, model.layers, torch.bfloat16, free_blocks=True, free_root=False)
    assert [type(block) for block in model.layers.values()] == [Block, Block]
    assert gradients(model)["layers.0.linear.weight"].dtype == torch.bfloat16
