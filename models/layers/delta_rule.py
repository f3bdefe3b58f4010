"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) over packed documents.

Each head keeps a matrix S [K, V] that maps keys to values. A token with query q, key k and value v decays S, corrects
the value stored for k by a fraction beta of its error, and reads S with q:

    S_t = e^(g_t) S_{t-1} + beta_t k_t (v_t - e^(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t

In chunks (section 3.3 there; the UT transform of Yang et al. 2024, arXiv:2406.06484): with G_i the sum of g up to token
i of a chunk and D_ij = e^(G_i - G_j) for j <= i, the corrections u of a chunk that starts with S solve one triangular
system,

    u_i + beta_i * sum over j < i of D_ij (k_i k_j) u_j = beta_i (v_i - e^(G_i) S^T k_i)

and o_i = e^(G_i) S^T q_i + sum over j <= i of D_ij (q_i k_j) u_j. All operations run in at least float32.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from torch import Tensor

from archon.models.attention.backend import flash_unsupported_reason
from archon.models.attention.packed.documents import PackedDocuments
from archon.schema.errors import ConfigError

L2_EPS = 1e-6
DeltaRule = Literal["torch", "fla"]
"""Implementation: torch operators on any device, or the CUDA kernels of the package fla."""


def require_delta_rule(rule: DeltaRule, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError where `rule` cannot compute in `dtype` on `device`."""
    if rule == "torch":
        return
    reason = flash_unsupported_reason(device, dtype)  # fla's kernels have the same limits
    if reason is None and importlib.util.find_spec("fla") is None:
        reason = "flash-linear-attention is not installed (pip install 'archon-engine[fla]')"
    if reason is not None:
        raise ConfigError(f"delta_rule = {rule!r} is not available: {reason}; choose torch")


def l2_normalize(x: Tensor) -> Tensor:
    """Return x / sqrt(|x|^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    documents: PackedDocuments,
    state: Tensor | None = None,
    rule: DeltaRule = "torch",
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over packed documents.

    Args:
        q: queries [T, G, K] with H a multiple of G; normalized here and divided by sqrt(K).
        k: keys [T, G, K], normalized here.
        v: values [T, H, V].
        log_decay: [T, H], g in the module's equation.
        beta: [T, H].
        documents: the B documents of the T tokens; the state starts anew in each.
        state: [B, H, K, V] before the first tokens; zeros by default.
        rule: implementation for documents of several tokens.

    Returns:
        o [T, H, V] in the dtype of v, and the documents' last states [B, H, K, V].
    """
    if rule == "fla" and documents.max_seqlen > 1:
        return _fla_delta_rule(q, k, v, log_decay, beta, documents, state)
    wide, dtype = torch.promote_types(v.dtype, torch.float32), v.dtype
    q, k = (l2_normalize(x.to(wide)).repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    q, v, log_decay, beta = q * k.shape[-1] ** -0.5, v.to(wide), log_decay.to(wide), beta.to(wide)
    if state is None:
        state = v.new_zeros(len(documents.lengths), v.shape[1], k.shape[-1], v.shape[-1])
    step = documents.max_seqlen == 1
    out, state = (_single_token_rule if step else _chunks)(q, k, v, log_decay, beta, documents, state.to(wide))
    return out.to(dtype), state


def _fla_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, documents: PackedDocuments, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule` by fla's chunked kernel, which normalizes with the same constant.

    Tested against a reference of its interface (fla-core 0.6). On Hopper fla refuses its backward with Triton before
    3.7.1, which miscompiles it, so gradients are not yet verified on a GPU.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, last = chunk_gated_delta_rule(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        g=log_decay.unsqueeze(0),
        beta=beta.to(v.dtype).unsqueeze(0),
        scale=k.shape[-1] ** -0.5,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=documents.cu_seqlens_int64,
        cu_seqlens_cpu=documents.cu_seqlens_cpu,
    )
    return out.squeeze(0), last


def _single_token_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, documents: PackedDocuments, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule` for documents of one token each, by the definition."""
    state = state * log_decay.exp()[..., None, None]
    held = (k.unsqueeze(-2) @ state).squeeze(-2)
    correction = (v - held) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * correction.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, documents: PackedDocuments, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the rule chunk by chunk: parallel within a chunk, sequential over a document's chunks."""
    chunks = documents.chunks
    # 1. Cut into chunks [N, H, C, ...]; padding has key, value and beta 0, so it changes no state.
    q, k, v, log_decay, beta = (chunks.cut(x) for x in (q, k, v, log_decay, beta))
    total = log_decay.cumsum(-1)
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    # 2. Solve for the corrections; the mask comes before the exponential, which would overflow.
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    from_start = total.exp().unsqueeze(-1)
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.mT) * decay  # its diagonal is ignored (unitriangular)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v * beta.unsqueeze(-1), k_beta * from_start), -1), upper=False, unitriangular=True
    )
    value_part, state_part = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores, reads = (q @ k.mT) * decay, q * from_start
    kept, writes = total[..., -1:].exp().unsqueeze(-1), (k * (total[..., -1:] - total).exp().unsqueeze(-1)).mT

    # 3. Carry the state from chunk to chunk; shorter documents end first.
    outs, ended, first = list[Tensor](), list[Tensor](), 0
    state = state.index_select(0, chunks.order)
    for active in chunks.steps:
        ended.append(state[active:])
        state, now = state[:active], slice(first, first + active)
        corrections = value_part[now] - state_part[now] @ state
        outs.append(reads[now] @ state + scores[now] @ corrections)
        state = state * kept[now] + writes[now] @ corrections
        first += active
    last = torch.cat([state, *reversed(ended)])
    out = torch.cat(outs).transpose(1, 2).flatten(0, 1)
    return out.index_select(0, chunks.positions), last.index_select(0, chunks.rank)
