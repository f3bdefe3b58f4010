"""The gated delta rule against its definition, and what documents, states and dtypes must not change."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from archon.models.attention.meta import PackedAttention
from archon.models.attention.packed.documents import PackedDocuments
from archon.models.layers.delta_net import DeltaNet, DeltaNetLayer, causal_convolution
from archon.models.layers.delta_rule import gated_delta_rule, require_delta_rule
from archon.models.layers.norm import NormSpec
from archon.schema.errors import ConfigError
from archon.tools.check.oracle import relative_error
from tests.engine.tiny import make_engine
from tests.tolerances import REORDER_FP64

SLOW_DECAY = 0.05
"""A of a head whose state outlives a document: what leaks from one into the next does not fade."""
LAYER = DeltaNetLayer(n_heads=4, n_key_heads=2, key_dim=6, value_dim=5, kernel_size=4, norm=NormSpec(1e-6))
# Chunks of 64: shorter, equal, one more, two and a part; and packs that need smaller chunks.
PACKS = [(5, 130, 1, 64, 65, 7, 200), (7, 3, 12), (1, 1, 1), (1,), (64, 64), (33, 2)]


def documents_of(lengths: tuple[int, ...]) -> PackedDocuments:
    return PackedDocuments(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths))


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, lengths: tuple[int, ...], state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition: one token after another, one document after another, starting from `state` [B, H, K, V]."""
    repeat = v.shape[1] // q.shape[1]
    q, k = (F.normalize(x, dim=-1, eps=0) for x in (q, k))
    q, k = q.repeat_interleave(repeat, 1) / math.sqrt(q.shape[-1]), k.repeat_interleave(repeat, 1)
    outs, ends, token = [], [], 0
    for document, length in enumerate(lengths):
        now = state[document]
        for t in range(token, token + length):
            now = torch.exp(log_decay[t])[:, None, None] * now
            error = v[t] - torch.einsum("hkv,hk->hv", now, k[t])
            now = now + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
            outs.append(torch.einsum("hkv,hk->hv", now, q[t]))
        ends.append(now)
        token += length
    return torch.stack(outs), torch.stack(ends)


def random_inputs(lengths: tuple[int, ...], *, keys: int = 2, heads: int = 4) -> list[Tensor]:
    """q, k, v, logits of decay and beta, and a state; float64 with gradients. Keys are long, so that the small constant
    in their norm is below the rounding."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens, key_dim, value_dim = sum(lengths), 6, 5

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return x.requires_grad_()

    qk = [draw(tokens, keys, key_dim, scale=1e4) for _ in range(2)]
    return [
        *qk,
        draw(tokens, heads, value_dim),
        draw(tokens, heads),
        draw(tokens, heads),
        draw(len(lengths), heads, key_dim, value_dim),
    ]


@pytest.mark.parametrize("rate", [SLOW_DECAY, 3.0])
@pytest.mark.parametrize("lengths", PACKS)
def test_chunks_compute_the_definition_and_its_gradients(lengths: tuple[int, ...], rate: float) -> None:
    inputs = random_inputs(lengths)
    found = []
    for rule in (gated_delta_rule, token_by_token):
        q, k, v, a, b, state = inputs
        of = documents_of(lengths) if rule is gated_delta_rule else lengths
        out, end = rule(q, k, v, -rate * F.softplus(a), b.sigmoid(), of, state)
        weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view_as(out)
        grads = torch.autograd.grad((out * weight).sum() + end.square().sum(), inputs)
        found.append([out, end, *grads])
    for ours, wanted in zip(*found, strict=True):
        assert relative_error(ours, wanted) < REORDER_FP64


def test_a_state_continues_a_document() -> None:
    """Two halves of each document, the second from the first's state, are the whole documents."""
    first, second = (5, 70, 1), (3, 64, 9)
    whole = tuple(a + b for a, b in zip(first, second, strict=True))
    q, k, v, a, b, _ = (x.detach() for x in random_inputs(whole))
    a, b = -SLOW_DECAY * F.softplus(a), b.sigmoid()
    expected, end = gated_delta_rule(q, k, v, a, b, documents_of(whole))
    halves = torch.cat([torch.arange(n) < cut for n, cut in zip(whole, first, strict=True)])
    out, state = torch.empty_like(expected), None
    for part, lengths in ((halves, first), (~halves, second)):
        rows = [x[part] for x in (q, k, v, a, b)]
        out[part], state = gated_delta_rule(*rows, documents_of(lengths), state)
    assert relative_error(out, expected) < REORDER_FP64
    assert state is not None and relative_error(state, end) < REORDER_FP64


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_the_convolution_is_that_of_each_document_alone(lengths: tuple[int, ...], kernel_size: int) -> None:
    x = torch.randn(sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, kernel_size, dtype=torch.float64, requires_grad=True)
    out, last = causal_convolution(x, weight, documents_of(lengths))
    padded = [F.pad(document, (0, 0, kernel_size - 1, 0)) for document in x.split(lengths)]
    alone = [F.conv1d(rows.t(), weight.unsqueeze(1), groups=6).t() for rows in padded]
    assert relative_error(out, torch.cat(alone)) < REORDER_FP64
    assert torch.equal(last, torch.stack([rows[len(rows) - kernel_size + 1 :] for rows in padded]))
    scale = torch.randn_like(out)
    for ours, wanted in zip(
        torch.autograd.grad((out * scale).sum(), (x, weight)),
        torch.autograd.grad((torch.cat(alone) * scale).sum(), (x, weight)),
        strict=True,
    ):
        assert relative_error(ours, wanted) < REORDER_FP64


def slow_layer(dtype: torch.dtype = torch.float32) -> DeltaNet:
    torch.manual_seed(0)
    module = LAYER.build(0, 24)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.constant_(module.decay.A_log, math.log(SLOW_DECAY))
    return module.to(dtype)


def require_isolated_documents(module: nn.Module, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Change the second document of a pack: the outputs of the others do not change."""
    x = torch.randn(sum(lengths), 24, dtype=dtype)
    other = x.clone()
    before = lengths[0] + lengths[1]
    other[lengths[0] : before] += 1
    bounds = documents_of(lengths)
    out, changed = (module(rows, None, PackedAttention(bounds.cu_seqlens, bounds.max_seqlen)) for rows in (x, other))
    assert torch.equal(out[: lengths[0]], changed[: lengths[0]])
    assert torch.equal(out[before:], changed[before:])
    assert not torch.equal(out[lengths[0] : before], changed[lengths[0] : before])
    # The same tokens as one document: the state does reach as far.
    (length,) = whole = (sum(lengths),)
    one = [module(rows, None, PackedAttention(documents_of(whole).cu_seqlens, length)) for rows in (x, other)]
    assert not torch.equal(one[0][before:], one[1][before:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(5, 130, 7), (20, 9, 3)])
def test_a_document_does_not_see_the_one_before_it(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    require_isolated_documents(slow_layer(dtype), lengths, dtype)


def test_decays_stay_float32_in_a_bfloat16_model() -> None:
    module = slow_layer(torch.bfloat16)
    assert {name for name, p in module.named_parameters() if p.dtype == torch.float32} == {
        "decay.A_log",
        "decay.dt_bias",
    }
    assert module.decay(torch.randn(3, 4, dtype=torch.bfloat16)).dtype == torch.float32
    assert slow_layer(torch.float64).decay.A_log.dtype == torch.float64


class FixedOutput:
    """Attention metadata whose delta rule returns `out` whatever its inputs."""

    lora_mapping = None

    def __init__(self, out: Tensor) -> None:
        self.out = out

    def run_recurrence(self, *_: Any) -> Tensor:
        return self.out


def test_the_output_gate_is_computed_in_float32_as_in_transformers() -> None:
    """The gated norm bit for bit: silu of a gate that is rounded, or rounded after silu, changes a third of it."""
    module = slow_layer(torch.bfloat16)
    x, out = torch.randn(300, 24, dtype=torch.bfloat16), torch.randn(300, 4, 5, dtype=torch.bfloat16)
    reference = Qwen3NextRMSNormGated(5, eps=1e-6).bfloat16()
    reference.weight = module.norm.weight
    seen: list[Tensor] = []
    module.wo.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        module(x, None, FixedOutput(out))
        expected = reference(out, module.wz(x).unflatten(-1, (4, 5))).flatten(-2)
    assert seen[0].dtype == torch.bfloat16
    assert (seen[0] == expected).float().mean() > 0.999


def reference_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The interface of fla-core 0.6's `chunk_gated_delta_rule`, its documented preconditions, and its meaning."""
    tokens, key_heads, key_dim = q.shape[1:]
    heads, value_dim = v.shape[2:]
    assert k.shape == q.shape == (1, tokens, key_heads, key_dim) and v.shape == (1, tokens, heads, value_dim)
    assert g.shape == beta.shape == (1, tokens, heads) and heads % key_heads == 0
    assert q.dtype == k.dtype == v.dtype and use_qk_l2norm_in_kernel and output_final_state
    assert not (use_beta_sigmoid_in_kernel or allow_neg_eigval or state_v_first)
    assert cu_seqlens is not None and cu_seqlens.dtype == torch.int64 and cu_seqlens[-1] == tokens
    assert cu_seqlens_cpu is not None and cu_seqlens_cpu.dtype == torch.int64 and cu_seqlens_cpu.is_cpu
    assert torch.equal(cu_seqlens_cpu, cu_seqlens)
    documents = len(cu_seqlens) - 1
    state = q.new_zeros(documents, heads, key_dim, value_dim) if initial_state is None else initial_state
    assert state.shape == (documents, heads, key_dim, value_dim)
    assert scale == pytest.approx(key_dim**-0.5)
    out, last = token_by_token(q[0], k[0], v[0], g[0], beta[0], tuple(cu_seqlens.diff().tolist()), state)
    return out.unsqueeze(0), last


@pytest.mark.parametrize("with_state", [False, True])
def test_flas_kernel_is_called_as_it_documents_and_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, with_state: bool
) -> None:
    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = reference_fla  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    lengths = (5, 70, 1, 3)
    *inputs, state = random_inputs(lengths)
    q, k, v, decay, beta = inputs
    gates = -F.softplus(decay), beta.sigmoid()
    given = state if with_state else None
    found, expected = (
        gated_delta_rule(q, k, v, *gates, documents_of(lengths), given, rule) for rule in ("fla", "torch")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) <= REORDER_FP64
    wanted = [*inputs, state] if with_state else inputs
    grads, references = (
        torch.autograd.grad(out.sin().sum() + last.cos().sum(), wanted, retain_graph=True)
        for out, last in (found, expected)
    )
    for ours, theirs in zip(grads, references, strict=True):
        assert relative_error(ours, theirs) <= 10 * REORDER_FP64


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"hf": {}}, r"delta_rule = 'fla' computes gated delta nets, and family qwen3 has none; set it to torch"),
        (
            {"hf": {"model_type": "qwen3_5_text", "head_dim": 16, "tie_word_embeddings": False}},
            r"delta_rule = 'fla' is not available: it runs on CUDA only and the model is on cpu; choose torch",
        ),
    ],
)
def test_flas_kernel_is_refused_where_it_cannot_run(tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_engine(tmp_path, delta_rule="fla", **options)
    with pytest.raises(ConfigError, match=r"not installed \(pip install 'archon-engine\[fla\]'\)"):
        require_delta_rule("fla", torch.device("cuda"), torch.bfloat16)
