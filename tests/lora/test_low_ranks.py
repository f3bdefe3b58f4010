"""Several adapters of one matrix: each row gets what its own adapter alone would add, and so do its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import archon.models.lora.layers as lora_layers
from archon.models.layers.linear import Linear
from archon.models.layers.moe import ExpertsLayer, GroupedExperts, MoE
from archon.models.lora.layers import LoRALayer, MultiLoRALayer
from archon.models.lora.mapping import NO_LORA, LoRAMapping
from archon.models.lora.model import initializers
from archon.models.lora.targets import LoRASize, parameter_count

CPU = torch.device("cpu")
IN, OUT = 16, 24
RANKS = {"x": (3, 2.0), "y": (8, 0.3), "z": (5, 1.0)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = [*TOLERANCE]
IDS = {
    "sorted": [0, 0, 0, 1, 1, 2, 2, 2, 2],
    "mixed, some without": [2, -1, 0, 2, 2, 0, -1, 0, 2],
    "one, all without but it": [-1, -1, -1, -1, -1, -1, -1, 1, -1],
    "none": [-1] * 9,
}


def random_loras(experts: int | None = None, out_in: tuple[int, int] = (OUT, IN)) -> MultiLoRALayer:
    out_features, in_features = out_in
    loras = {name: LoRALayer(in_features, out_features, rank, scale, experts) for name, (rank, scale) in RANKS.items()}
    for parameter in (p for lora_layer in loras.values() for p in lora_layer.parameters()):
        nn.init.normal_(parameter, std=0.3)
    return MultiLoRALayer(loras)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().double().norm() / b.detach().double().norm().clamp_min(1e-30))


def alone(layer: Linear, loras: MultiLoRALayer, x: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the layer's output computed row by row, with the row's adapter as the layer's only one."""
    rows = []
    for row, index in zip(x, ids, strict=True):
        layer.lora = None if index == NO_LORA else loras[[*RANKS][index]]  # type: ignore[assignment]
        rows.append(layer(row.unsqueeze(0)))
    return torch.cat(rows)


@pytest.fixture(params=["a product a group", "grouped products"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to multiply groups of rows, of which a CPU prefers the first."""
    monkeypatch.setattr(lora_layers, "prefers_loop", lambda x: request.param == "a product a group")
    return request.param


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_each_row_has_its_own_adapter(ids: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, loras = Linear(IN, OUT, bias=True, role="column").to(dtype), random_loras().to(dtype)
    x = torch.randn(len(ids), IN).to(dtype).requires_grad_()
    weights = torch.randn(len(ids), OUT).to(dtype)
    expected = alone(layer, loras, x, ids)
    inputs = [x, *loras.parameters()]
    wanted = torch.autograd.grad(expected, inputs, weights, allow_unused=True)
    layer.lora = loras
    got = layer(x, LoRAMapping.of([*RANKS], torch.tensor(ids), CPU))
    assert relative(got, expected) <= TOLERANCE[dtype]
    for found, want in zip(torch.autograd.grad(got, inputs, weights), wanted, strict=True):
        if want is None:
            assert not found.any(), "an adapter without rows has a gradient, and it is 0"
        else:
            assert relative(found, want) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sorted_rows_get_bit_for_bit_what_their_adapter_alone_adds(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    loras, rows = random_loras().to(dtype), [0] * 5 + [1] * 3 + [2] * 7
    x, out, weights = (torch.randn(len(rows), width, dtype=dtype) for width in (IN, OUT, OUT))
    x.requires_grad_()
    several = loras(out, x, LoRAMapping.of([*RANKS], torch.tensor(rows), CPU))
    grads = torch.autograd.grad(several, [x, *loras.parameters()], weights)
    for index, name in enumerate(RANKS):
        own = slice(rows.index(index), rows.index(index) + rows.count(index))
        single = MultiLoRALayer({name: loras[name]})
        added = single(out[own], x[own], LoRAMapping.of([name], torch.zeros(rows.count(index)).long(), CPU))
        assert torch.equal(several[own], added)
        alone_grads = torch.autograd.grad(added, [x, *single.parameters()], weights[own])
        found = (grads[0][own], *grads[1 + 2 * index : 3 + 2 * index])
        assert all(map(torch.equal, found, (alone_grads[0][own], *alone_grads[1:])))


@pytest.mark.usefixtures("products")
def test_a_batch_names_only_the_adapters_that_it_needs() -> None:
    torch.manual_seed(0)
    layer, loras = Linear(IN, OUT, bias=False, role="row"), random_loras()
    layer.lora, x = loras, torch.randn(4, IN)
    rows = LoRAMapping.of(["z", "unknown", "x"], torch.tensor([0, 2, 1, 0]), CPU)
    got = layer(x, rows)
    assert relative(got, alone(layer, loras, x, [2, 0, -1, 2])) <= 1e-5
    layer.lora = loras
    assert torch.equal(layer(x), layer(x, LoRAMapping.of(["unknown"], torch.tensor([0, 0, 0, 0]), CPU)))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_each_row_of_an_expert_has_its_own_adapter(dtype: torch.dtype) -> None:
    """The mixture's rows with one adapter equal those of the same mixture with that adapter alone."""
    torch.manual_seed(0)
    moe = MoE(IN, ExpertsLayer(n_experts=4, top_k=2, hidden_dim=OUT, shared_hidden_dim=8)).to(dtype)
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.3)
    shapes = {"w1": (OUT, IN), "w2": (IN, OUT), "w3": (OUT, IN)}
    loras = {matrix: random_loras(4, shape).to(dtype) for matrix, shape in shapes.items()}
    parameters = [p for several in loras.values() for p in several.parameters()]
    ids = torch.tensor([2, -1, 0, 2, 2, 0, -1, 0, 2, 1, 1, 0])
    x, weights = (torch.randn(len(ids), IN, dtype=dtype) for _ in range(2))
    moe.experts.lora = nn.ModuleDict(loras)
    got, _ = moe(x, None, LoRAMapping.of([*RANKS], ids, CPU))
    expected = torch.empty_like(got)
    grads = [torch.zeros_like(p) for p in parameters]
    for index, name in [(NO_LORA, None), *enumerate(RANKS)]:
        own = ids == index
        moe.experts.lora = None
        if name is not None:
            moe.experts.lora = nn.ModuleDict({matrix: several[name] for matrix, several in loras.items()})
        out, _ = moe(x[own])
        expected[own] = out.detach()
        if name is not None:
            for total, g in zip(
                grads, torch.autograd.grad(out, parameters, weights[own], allow_unused=True), strict=True
            ):
                total += 0 if g is None else g
    assert relative(got, expected) <= TOLERANCE[dtype]
    for found, want in zip(torch.autograd.grad(got, parameters, weights), grads, strict=True):
        assert relative(found, want) <= 2 * TOLERANCE[dtype]


def test_experts_without_any_adapter_are_the_layer_itself() -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(IN, ExpertsLayer(n_experts=2, top_k=1, hidden_dim=OUT))
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    x, counts = torch.randn(5, IN), torch.tensor([3, 2])
    expected = experts(x, counts)
    experts.lora = nn.ModuleDict({"w1": random_loras(2)})
    assert torch.equal(experts(x, counts), expected)


def test_first_values_are_drawn_for_the_adapter_with_exactly_this_name() -> None:
    names = ("poet", "late_poet", "poets")
    modules = nn.ModuleDict({"lora": MultiLoRALayer({name: LoRALayer(IN, OUT, 2, 1.0) for name in names})})
    for name in names:
        assert [parameter for parameter, _ in initializers(modules, "random", name)] == [
            f"lora.{name}.a",
            f"lora.{name}.b",
        ]


@pytest.mark.parametrize("experts", [None, 3])
def test_parameters_are_counted_of_every_expert(experts: int | None) -> None:
    lora_layer = LoRALayer(IN, OUT, 5, 1.0, experts)
    shape = (OUT, IN) if experts is None else (experts, OUT, IN)
    assert parameter_count(shape, LoRASize(5, 1.0, False)) == sum(p.numel() for p in lora_layer.parameters())
