"""The scan of Mamba-2 against its definition, and what documents, states and dtypes must not change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

from archon.models import get_model_spec
from archon.models.layers.mamba import Mamba, MambaLayer
from archon.models.layers.norm import NormSpec
from archon.models.layers.state_space import state_space_scan
from archon.schema.errors import ConfigError
from archon.tools.check.oracle import relative_error
from tests.models.test_delta_net import PACKS, SLOW_DECAY, FixedOutput, documents_of, require_isolated_documents
from tests.tolerances import REORDER_FP64

LAYER = MambaLayer(n_heads=4, n_groups=2, head_dim=5, state_dim=6, kernel_size=4, norm=NormSpec(1e-6))


def token_by_token(
    x: Tensor, bc: tuple[Tensor, Tensor], gates: Tensor, lengths: tuple[int, ...], state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition: one token after another, one document after another, starting from `state` [B, H, N, P]."""
    b, c = (part.repeat_interleave(x.shape[1] // part.shape[1], 1) for part in bc)
    outs, ends, token = [], [], 0
    for document, length in enumerate(lengths):
        now = state[document]
        for t in range(token, token + length):
            log_decay, dt, skip = gates[t].unbind(-1)
            now = torch.exp(log_decay)[:, None, None] * now + torch.einsum("h,hn,hp->hnp", dt, b[t], x[t])
            outs.append(torch.einsum("hnp,hn->hp", now, c[t]) + skip[:, None] * x[t])
        ends.append(now)
        token += length
    return torch.stack(outs), torch.stack(ends)


def random_inputs(lengths: tuple[int, ...]) -> list[Tensor]:
    """x, B, C, logits of the step size, A, D, and a state; float64 with gradients."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    shapes = (tokens, 4, 5), (tokens, 2, 6), (tokens, 2, 6), (tokens, 4), (4,), (4,), (len(lengths), 4, 6, 5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def gates_of(a: Tensor, rate: Tensor, skip: Tensor) -> Tensor:
    dt = F.softplus(a)
    return torch.stack((-rate.exp() * dt, dt, skip.expand_as(dt)), dim=-1)


@pytest.mark.parametrize("rate", [SLOW_DECAY, 3.0])
@pytest.mark.parametrize("lengths", PACKS)
def test_chunks_compute_the_definition_and_its_gradients(lengths: tuple[int, ...], rate: float) -> None:
    inputs = random_inputs(lengths)
    found = []
    for scan in (state_space_scan, token_by_token):
        x, b, c, a, shift, skip, state = inputs
        of = documents_of(lengths) if scan is state_space_scan else lengths
        out, end = scan(x, (b, c), gates_of(a, math.log(rate) + shift, skip), of, state)
        weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view_as(out)
        found.append([out, end, *torch.autograd.grad((out * weight).sum() + end.square().sum(), inputs)])
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected) < REORDER_FP64


def test_a_state_continues_a_document() -> None:
    """Two parts of each document, the second from the first's state, are the whole documents."""
    first, second = (5, 70, 1), (3, 64, 9)
    whole = tuple(a + b for a, b in zip(first, second, strict=True))
    x, b, c, a, shift, skip, _ = (part.detach() for part in random_inputs(whole))
    gates = gates_of(a, math.log(SLOW_DECAY) + shift, skip)
    expected, end = state_space_scan(x, (b, c), gates, documents_of(whole))
    parts = torch.cat([torch.arange(n) < cut for n, cut in zip(whole, first, strict=True)])
    out, state = torch.empty_like(expected), None
    for rows, lengths in ((parts, first), (~parts, second)):
        out[rows], state = state_space_scan(x[rows], (b[rows], c[rows]), gates[rows], documents_of(lengths), state)
    assert relative_error(out, expected) < REORDER_FP64
    assert state is not None and relative_error(state, end) < REORDER_FP64


def slow_layer(dtype: torch.dtype = torch.float32) -> Mamba:
    torch.manual_seed(0)
    module = LAYER.build(0, 24)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.constant_(module.step.A_log, math.log(SLOW_DECAY))
    return module.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(5, 130, 7), (20, 9, 3)])
def test_a_document_does_not_see_the_one_before_it(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    require_isolated_documents(slow_layer(dtype), lengths, dtype)


def test_step_sizes_stay_float32_in_a_bfloat16_model() -> None:
    module = slow_layer(torch.bfloat16)
    assert {name for name, p in module.named_parameters() if p.dtype == torch.float32} == {
        "step.A_log",
        "step.dt_bias",
        "step.D",
    }
    assert module.step(torch.randn(3, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_the_gated_norm_is_computed_in_float32_as_in_transformers() -> None:
    """Bit for bit: a gate that is rounded, or a norm over other features, changes most of it."""
    module = slow_layer(torch.bfloat16)
    x, out = torch.randn(300, 24, dtype=torch.bfloat16), torch.randn(300, 4, 5, dtype=torch.bfloat16)
    reference = GraniteMoeHybridRMSNormGated(20, group_size=10, eps=1e-6).bfloat16()
    reference.weight = module.norm.weight
    seen: list[Tensor] = []
    module.wo.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        module(x, None, FixedOutput(out))
        expected = reference(out.flatten(1), module.wz(x))
    assert seen[0].dtype == torch.bfloat16
    assert (seen[0] == expected).float().mean() > 0.999


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_d_head": 7}, "'mamba_d_head' is 7; expected 8"),
        ({"mamba_n_heads": 5}, "'mamba_n_heads' is 5; expected a divisor of mamba_expand \\* hidden_size 32"),
        ({"mamba_n_groups": 3}, "mamba_groups is 3; expected a divisor of mamba_heads 4"),
        ({"layer_types": ["mamba", "convolution"]}, "'layer_types' is \\['mamba', 'convolution'\\]; expected"),
        ({"layer_types": ["mamba"]}, "layer_types is \\('linear_attention',\\); expected .* each of 2 layers"),
        ({"layer_types": [["mamba"], "mamba"]}, "'layer_types' is "),
        ({"time_step_limit": [0.5, 0.1]}, "mamba_dt_limits are 0.5 and 0.1"),
        ({"time_step_limit": [0.5]}, "'time_step_limit' is \\[0.5\\]; expected the smallest and the largest"),
        ({"time_step_limit": [float("nan"), 1.0]}, "'time_step_limit' is nan; expected a number"),
        ({"position_embedding_type": "alibi"}, "'position_embedding_type' is 'alibi'; expected rope, or nope or null"),
        ({"normalization_function": "layernorm"}, "'normalization_function' is 'layernorm'"),
    ],
)
def test_configs_that_archon_does_not_compute_are_refused(changes: dict[str, Any], message: str) -> None:
    config = {"model_type": "granitemoehybrid", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"intermediate_size": 8, "vocab_size": 11, "mamba_n_heads": 4, "num_local_experts": 0}
    args_class = get_model_spec("granitemoehybrid").model_args_class
    assert args_class.from_hf_config(config).layer_specs[0].mixer.head_dim == 8
    with pytest.raises(ConfigError, match=message):
        args_class.from_hf_config(config | changes)
