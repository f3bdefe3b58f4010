"""The backend fa4, against a reference of the interface of flash-attn-4 4.0.0b36 that computes in float64."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import logging
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from archon.models.attention.meta import PackedAttention, PrefixAttention
from archon.models.attention.packed import fa4
from archon.models.attention.packed.sdpa import sdpa_attention
from archon.models.attention.prefix.cascade import Bounds
from archon.models.attention.prefix.plan import shared_prefixes
from archon.models.attention.registry import available_backends, backend_for_layer, candidates, resolve_backend
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.schema.errors import ConfigError
from archon.tools.check.oracle import relative_error
from tests.models.test_cascade import MathKernel
from tests.models.test_prefix import answers
from tests.tolerances import FLASH_BF16

SCALE, LENGTHS, CUDA = 0.4, (9, 1, 30), torch.device("cuda", 0)
PARAMETERS = {
    "_flash_attn_fwd": """
        q k v qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k min_seqlen_k page_table
        softmax_scale causal softcap window_size_left window_size_right learnable_sink tile_mn mma_pv_is_rs
        intra_wg_overlap num_threads num_splits pack_gqa _arch score_mod mask_mod block_sparse_tensors return_lse
        out lse aux_tensors aux_scalars q_descale k_descale v_descale gather_kv_indices scheduler_metadata
        seqlen_k_per_split disable_scheduler_metadata gather_bwd_recompute_p
    """,
    "_flash_attn_bwd": """
        q k v out dout lse softmax_scale causal softcap window_size_left window_size_right m_block_size n_block_size
        num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP
        AtomLayoutNdKV AtomLayoutMdQ V_in_regs cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q
        max_seqlen_k deterministic dq dk dv score_mod score_mod_bwd mask_mod aux_tensors aux_scalars
        block_sparse_tensors dlse learnable_sink
    """,
}


@pytest.mark.gpu
def test_the_reference_has_the_parameters_of_the_package() -> None:
    source = ast.parse(
        Path(str(importlib.metadata.distribution(fa4.PACKAGE).locate_file("flash_attn/cute/interface.py"))).read_text()
    )
    functions = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef)}
    for name, parameters in PARAMETERS.items():
        assert [x.arg for x in functions[name].args.args] == parameters.split()


def math_kernel(call: dict[str, Any]) -> tuple[MathKernel, list[Tensor], Tensor | None]:
    """The definition for a call, its queries, keys and values in float64, and its sinks."""
    q, k, v = call["q"], call["k"], call["v"]
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and q.dim() == 3 and q.shape[1] % k.shape[1] == 0
    bounds = []
    for side, x in (("q", q), ("k", k)):
        cu_seqlens, longest = call[f"cu_seqlens_{side}"], call[f"max_seqlen_{side}"]
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens[-1] == len(x) and type(longest) is int
        bounds.append(Bounds(cu_seqlens, longest))
    left, right = call["window_size_left"], 0 if call["causal"] else call["window_size_right"]
    assert right in (0, None), "the definition has these"
    spec = AttentionSpec(call["softmax_scale"], None if left is None else left + 1, call["softcap"] or None)
    kernel = MathKernel(*bounds, AttentionSpec(spec.scale, spec.window, spec.soft_cap, causal=right == 0))
    sinks = call.get("learnable_sink")
    return kernel, [x.double() for x in (q, k, v)], None if sinks is None else sinks.double().unsqueeze(1)


def forward(**call: Any) -> tuple[Tensor, Tensor, None, None, None]:
    assert call["return_lse"]
    kernel, qkv, sinks = math_kernel(call)
    out, lse = kernel.forward(*qkv)
    if sinks is not None:
        alone, lse = lse, torch.logaddexp(lse, sinks)
        out = out * (alone - lse).exp().t().unsqueeze(-1)
    return out.bfloat16(), lse.float(), None, None, None


def backward(**call: Any) -> tuple[Tensor, ...]:
    kernel, qkv, sinks = math_kernel(call)
    grad, out, lse = (call[name].double() for name in ("dout", "out", "lse"))
    assert call["lse"].dtype == torch.float32 and call["dout"].dtype == torch.bfloat16
    grads = tuple(x.bfloat16() for x in kernel.backward(grad, *qkv, out, lse))
    if sinks is None:
        return grads
    return *grads, -((sinks - lse).exp() * (grad * out).sum(-1).t()).sum(1).to(call["learnable_sink"].dtype)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the reference as the package, on a Hopper GPU."""

    def bound(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(parameter, kind, default=None) for parameter in PARAMETERS[name].split()]
        signature = inspect.Signature(parameters)
        return lambda *args, **kwargs: function(**signature.bind(*args, **kwargs).arguments)

    interface: Any = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = bound("_flash_attn_fwd", forward)
    interface._flash_attn_bwd = bound("_flash_attn_bwd", backward)
    for name in ("flash_attn", "flash_attn.cute"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # the wheel has no flash_attn/__init__.py
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    has(monkeypatch, "4.0.0b36", 9)


def has(monkeypatch: pytest.MonkeyPatch, version: str | None, capability: int) -> None:
    """Let the machine have this version of the package, and a GPU of this major compute capability."""

    def installed(name: str) -> str:
        if version is None or name != fa4.PACKAGE:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(fa4, "_capability", torch.compiler.assume_constant_result(lambda: capability))
    available_backends.cache_clear()


def draw(total: int, kv_heads: int = 2) -> list[Tensor]:
    return [torch.randn(total, n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (4, kv_heads, kv_heads)]


def packed(lengths: tuple[int, ...] = LENGTHS) -> PackedAttention:
    meta = PackedAttention.from_lengths(lengths, torch.device("cpu"), "fa4")
    meta.backends = candidates("fa4")
    return meta


def check(actual: Tensor, expected: Tensor, inputs: list[Tensor], exact: list[Tensor]) -> None:
    assert actual.dtype == torch.bfloat16 and relative_error(actual.double(), expected) <= FLASH_BF16
    weight = torch.randn_like(expected).bfloat16()
    expected_grads = torch.autograd.grad(expected, exact, weight.double())
    for grad, expected_grad in zip(torch.autograd.grad(actual, inputs, weight), expected_grads, strict=True):
        assert (grad.double() - expected_grad).norm() <= 2 * FLASH_BF16 * expected_grad.norm().clamp(min=1e-2)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 4, 30, 100])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_packed_documents(kv_heads: int, window: int | None, soft_cap: float | None, with_sinks: bool) -> None:
    inputs = draw(40, kv_heads) + ([torch.randn(4, requires_grad=True)] if with_sinks else [])
    exact = [x.detach().double().requires_grad_() for x in inputs]
    actual, expected = (
        attend(*x[:3], AttentionSpec(SCALE, window, soft_cap, *x[3:]))
        for x, attend in (
            (inputs, lambda q, k, v, spec: packed().attend(LayerIndex(0), q, k, v, spec)),
            (exact, lambda q, k, v, spec: sdpa_attention(q, k, v, LENGTHS, spec)),
        )
    )
    check(actual, expected, inputs, exact)


def test_images_attend_in_both_directions() -> None:
    inputs, spec = draw(40), AttentionSpec(SCALE, causal=False)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    check(packed().attend(LayerIndex(0), *inputs, spec), sdpa_attention(*exact, LENGTHS, spec), inputs, exact)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (None, 1.5), (45, None)])
def test_shared_prefixes(window: int | None, soft_cap: float | None, with_sinks: bool) -> None:
    """Two calls merged by their log-sum-exp; with a window one call with more keys than queries."""
    tokens, lengths = answers([40, 60, 6], per_prompt=4, longest=150, seed=1)
    shared = shared_prefixes(tokens, lengths)
    assert shared is not None
    inputs = draw(len(shared.rows)) + ([torch.randn(4, requires_grad=True)] if with_sinks else [])
    exact = [x.detach().double().requires_grad_() for x in inputs]
    meta = PrefixAttention(shared, "fa4")
    meta.backends = candidates("fa4")
    actual = meta.attend(LayerIndex(0), *inputs[:3], AttentionSpec(SCALE, window, soft_cap, *inputs[3:]))
    whole = (x.index_select(0, shared.gather_index) for x in exact[:3])
    expected = sdpa_attention(*whole, lengths, AttentionSpec(SCALE, window, soft_cap, *exact[3:]))
    check(actual.index_select(0, shared.gather_index), expected, inputs, exact)


def test_compiled_code_calls_one_operator_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.fx.experimental._config, "use_duck_shape", False)
    torch._dynamo.reset()
    counters.clear()
    sinks = torch.randn(4, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, meta: PackedAttention) -> Tensor:
        return meta.attend(LayerIndex(0), q * 1, k * 1, v * 1, AttentionSpec(SCALE, 4, sinks=sinks))

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in (LENGTHS, (3, 8), (7, 7, 7, 20)):
        inputs, meta = draw(sum(lengths)), packed(lengths)
        weight = torch.randn_like(inputs[0])
        grads = [torch.autograd.grad(f(*inputs, meta), (*inputs, sinks), weight) for f in (compiled, attend)]
        for actual, expected in zip(*grads, strict=True):
            torch.testing.assert_close(actual, expected)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_operator_and_its_fake() -> None:
    inputs, bounds = draw(40), torch.tensor([0, 9, 10, 40], dtype=torch.int32)
    arguments = torch.randn(4, requires_grad=True), bounds, bounds, [30, 30], SCALE, 4, 1.5, True, "fa4"
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.archon.flash_attention.default, (*inputs, *arguments), test_utils=tests)


def test_auto_prefers_it_on_hopper_and_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.INFO):
        assert resolve_backend("auto", CUDA, torch.bfloat16).name == "fa4"
        assert "attention backend: fa4, else varlen, else sdpa" in caplog.text
        assert "not flash: flash-attn is not installed" in caplog.text
        assert resolve_backend("auto", CUDA, torch.float32).name == "sdpa"
        has(monkeypatch, None, 9)
        assert resolve_backend("auto", CUDA, torch.bfloat16).name == "varlen"
        assert "not fa4: flash-attn-4 is not installed (pip install 'archon-engine[flash-attn-4]')" in caplog.text
        has(monkeypatch, "4.0.0b36", 8)
        assert resolve_backend("auto", CUDA, torch.bfloat16).name == "varlen"
    has(monkeypatch, "4.0.0b35", 9)
    with pytest.raises(ConfigError, match=r"flash-attn-4 is 4\.0\.0b35; expected at least 4\.0\.0b36"):
        resolve_backend("fa4", CUDA, torch.bfloat16)


@pytest.mark.parametrize("broken", ["fa4", "flash"])
def test_auto_skips_a_package_that_cannot_be_imported(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels compiled for another PyTorch fail when they are imported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module = "flash_attn.cute.interface" if broken == "fa4" else "flash_attn.flash_attn_interface"
    monkeypatch.setitem(sys.modules, module, None)
    if broken == "flash":
        sys.modules["flash_attn"].__spec__ = ModuleSpec("flash_attn", None, origin="flash_attn/__init__.py")
    with caplog.at_level(logging.INFO):
        names = [backend.name for backend in available_backends("auto", CUDA, torch.bfloat16)]
    assert broken not in names and "varlen" in names
    assert f"not {broken}: {module} cannot be imported (ModuleNotFoundError: " in caplog.text
    with pytest.raises(ConfigError, match=f"attn_type '{broken}' cannot run here: {module} cannot be imported"):
        resolve_backend(broken, CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "head_dim", "soft_cap", "expected"),
    [
        (9, 192, None, "fa4"),
        (10, 192, None, "varlen"),
        (10, 256, None, "fa4"),
        (10, 256, 3.0, "sdpa"),
        (9, 60, None, "varlen"),
    ],
)
def test_a_layer_that_it_does_not_support(
    monkeypatch: pytest.MonkeyPatch, capability: int, head_dim: int, soft_cap: float | None, expected: str
) -> None:
    """`auto` uses the next backend, an explicit choice is refused."""
    has(monkeypatch, "4.0.0b36", capability)
    spec = AttentionSpec(SCALE, soft_cap=soft_cap)
    available = [candidates(name)[0] for name in ("fa4", "varlen", "sdpa")]
    assert backend_for_layer(available, spec, head_dim).name == expected
    if expected != "fa4":
        with pytest.raises(ConfigError, match=f"attn_type 'fa4' does not support this layer's {head_dim} features"):
            backend_for_layer(candidates("fa4"), spec, head_dim)
