"""Hugging Face tensors of several parameters: each way to store them, against the same made by plain indexing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from archon.models.hf.fused_tensors import Fused, Placement, place_parts
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.schema.errors import CheckpointError
from tests.models.fused_family import WAYS, adapter_of, checkpoint_by_hand, random_native

QKV = "model.language_model.layers.1.self_attn.qkv_proj.weight"


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.fixture
def fused() -> tuple[BaseStateDictAdapter, dict[str, Tensor]]:
    """An adapter of a family with one tensor for queries, keys and values, and parameters."""
    adapter = adapter_of(WAYS["ranges of rows"])
    return adapter, random_native(adapter)


@pytest.mark.parametrize("name", WAYS)
def test_parameters_become_the_tensors_made_by_hand_and_come_back_bitwise(name: str) -> None:
    adapter = adapter_of(WAYS[name])
    native = random_native(adapter)
    state = checkpoint_by_hand(WAYS[name], native)
    assert adapter.hf_shapes() == {key: tuple(tensor.shape) for key, tensor in state.items()}
    assert_same(adapter.to_hf(native), state)
    assert_same(adapter.from_hf(state), native)
    assert_same(adapter.from_hf(dict(reversed(state.items()))), native)


@pytest.mark.parametrize("name", WAYS)
def test_export_yields_each_tensor_once_in_whatever_order_the_parameters_come(name: str) -> None:
    adapter = adapter_of(WAYS[name])
    native = random_native(adapter)
    pairs = [*adapter.export(reversed(native.items()))]
    assert len(pairs) == len(adapter.hf_shapes())
    assert_same(dict(pairs), adapter.to_hf(native))


def test_a_tensor_of_three_parameters_comes_with_the_third(
    fused: tuple[BaseStateDictAdapter, dict[str, Tensor]],
) -> None:
    adapter, native = fused
    q, k, v = (f"layers.1.attention.{name}.weight" for name in ("wq", "wk", "wv"))
    assert [hf for hf, _ in adapter.export((name, native[name]) for name in (k, v, q))] == [QKV]
    with pytest.raises(CheckpointError, match=f"'{QKV}' cannot be exported without the parameters '{v}'"):
        list(adapter.export((name, native[name]) for name in (q, k)))


def test_a_parameter_given_twice_or_in_another_dtype_is_refused(
    fused: tuple[BaseStateDictAdapter, dict[str, Tensor]],
) -> None:
    adapter, native = fused
    q, k = ((name, native[name]) for name in ("layers.1.attention.wq.weight", "layers.1.attention.wk.weight"))
    with pytest.raises(CheckpointError, match=r"'layers.1.attention.wq.weight' occurs twice"):
        list(adapter.export([q, k, q]))
    with pytest.raises(
        CheckpointError, match=r"'layers.1.attention.wk.weight' is torch.bfloat16, other parts of .* torch.float32"
    ):
        list(adapter.export([q, (k[0], k[1].bfloat16())]))


def test_one_of_several_parameters_alone_cannot_be_converted(
    fused: tuple[BaseStateDictAdapter, dict[str, Tensor]],
) -> None:
    adapter, native = fused
    with pytest.raises(CheckpointError, match=rf"fused tensor '{QKV}'; .* with export"):
        adapter.convert_single_to_hf("layers.1.attention.wq.weight", native["layers.1.attention.wq.weight"])
    wo = native["layers.1.attention.wo.weight"]
    assert adapter.convert_single_to_hf("layers.1.attention.wo.weight", wo) == [
        ("model.language_model.layers.1.self_attn.o_proj.weight", wo)
    ]


@pytest.mark.parametrize("key", [QKV.replace("qkv_proj", "q_proj"), QKV.replace("model.language_model.", "model.")])
def test_the_names_that_a_fused_one_replaces_are_unknown(
    fused: tuple[BaseStateDictAdapter, dict[str, Tensor]], key: str
) -> None:
    adapter, native = fused
    with pytest.raises(CheckpointError, match=f"unknown key '{key}'"):
        adapter.from_hf(adapter.to_hf(native) | {key: torch.zeros(24, 24)})


def test_a_fused_tensor_of_another_shape_is_named(fused: tuple[BaseStateDictAdapter, dict[str, Tensor]]) -> None:
    adapter, native = fused
    state = adapter.to_hf(native)
    with pytest.raises(CheckpointError, match=rf"'{QKV}' has shape \(24, 40\), expected \(40, 24\)"):
        adapter.from_hf(state | {QKV: state[QKV].t()})


@pytest.mark.parametrize(
    ("fused", "shapes", "why"),
    [
        (Fused(("a",), dim=2), [(4, 4)], "too few dimensions"),
        (Fused(("a",), transposed=True), [(4,)], "too few dimensions"),
        (Fused(("a", "b")), [(4, 4), (4, 5)], "differ outside dimension 0"),
        (Fused(("a", "b"), blocks=3), [(6, 4), (4, 4)], "3 blocks do not divide"),
        (Fused(("a", "b"), blocks=lambda args: 0), [(6, 4), (4, 4)], "0 blocks do not divide"),
        (Fused(("a", "b"), interleaved=True), [(2, 4), (4, 4)], "need equal sizes"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(fused: Fused, shapes: list[tuple[int, ...]], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        place_parts(fused, shapes, None)


def test_a_declaration_with_a_part_that_the_model_lacks_is_refused() -> None:
    for part, why in [("layers.{}.nothing", "holds .*, but this model has no 'layers"), ("norm.weight", "indices")]:
        adapter = adapter_of(WAYS["ranges of rows"])
        both = Fused(("layers.{}.attention_norm.weight", part))
        adapter.from_hf_map = {**adapter.from_hf_map, "both.{}": both}  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=rf"'both.[{{][}}]' in FusedAdapter .*{why}"):
            adapter.hf_shapes()


SHAPES = {"matrix": ((6, 5), 0), "columns": ((4, 6), 1), "stack": ((2, 6, 5), 1), "vector": ((6,), 0)}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 6])
@pytest.mark.parametrize("kind", SHAPES)
def test_every_region_of_a_parameter_is_selected_from_its_tensor(kind: str, blocks: int, transposed: bool) -> None:
    """Every part that a rank could hold: any range of rows, with any range of columns."""
    shape, dim = SHAPES[kind]
    if transposed and len(shape) == 1:
        return
    parts = [Placement(dim, blocks, 6 // blocks * i, 6 // blocks, 12 // blocks, transposed) for i in range(2)]
    parameters = [torch.randn(shape) for _ in parts]
    tensor = torch.empty(parts[0].hf_shape(shape))
    for placement, parameter in zip(parts, parameters, strict=True):
        placement.insert(parameter, tensor)
    for placement, parameter in zip(parts, parameters, strict=True):
        assert torch.equal(placement.extract(tensor), parameter)
        for start in range(6):
            for stop in range(start, 7):
                own = [slice(0, size) for size in shape]
                own[dim] = slice(start, stop)
                own[dim - 1] = slice(1, shape[dim - 1]) if len(shape) > 1 else own[dim - 1]
                local = torch.full_like(parameter[tuple(own)], torch.nan)
                for part in placement.selections(shape, tuple(own), local, transposed=transposed):
                    part.target.copy_(tensor.view(part.shape)[part.region])
                assert torch.equal(local, parameter[tuple(own)])
