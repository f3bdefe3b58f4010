"""The state space dual scan of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) over packed documents.

Each head keeps a matrix S [N, P]. A token with input x [P], step size dt, write vector B [N] and read vector C [N]
decays S, adds to it, and reads it; B and C are shared by the heads of a group:

    S_t = e^(g_t) S_{t-1} + dt_t B_t x_t^T        y_t = S_t^T C_t + D x_t

In chunks (section 6 there): with G_i the sum of g up to token i of a chunk that starts with S,

    y_i = e^(G_i) S^T C_i + sum over j <= i of e^(G_i - G_j) (C_i B_j) dt_j x_j + D x_i

All operations run in at least float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archon.models.attention.packed.documents import PackedDocuments


def state_space_scan(
    x: Tensor, bc: tuple[Tensor, Tensor], gates: Tensor, documents: PackedDocuments, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the scan over packed documents.

    Args:
        x: inputs [T, H, P].
        bc: write and read vectors B and C, each [T, G, N] with H a multiple of G.
        gates: [T, H, 3]: log-decay g, step size dt, and the factor D of the skip connection.
        documents: the B documents of the T tokens; the state starts anew in each.
        state: [B, H, N, P] before the first tokens; zeros by default.

    Returns:
        y [T, H, P] in the dtype of x, and the documents' last states [B, H, N, P].
    """
    wide, heads = torch.promote_types(x.dtype, torch.float32), x.shape[1]
    values, (b, c), (log_decay, dt, skip) = x.to(wide), (part.to(wide) for part in bc), gates.to(wide).unbind(-1)
    if state is None:
        state = values.new_zeros(len(documents.lengths), heads, b.shape[-1], x.shape[-1])
    scan = _single_token_scan if documents.max_seqlen == 1 else _chunks
    out, last = scan(values * dt.unsqueeze(-1), b, c, log_decay, documents, state.to(wide))
    return (out + values * skip.unsqueeze(-1)).to(x.dtype), last


def _single_token_scan(
    x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, documents: PackedDocuments, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `state_space_scan` for documents of one token each, by the definition."""
    b, c = (part.repeat_interleave(x.shape[1] // part.shape[1], 1) for part in (b, c))
    state = state * log_decay.exp()[..., None, None] + b.unsqueeze(-1) * x.unsqueeze(-2)
    return (c.unsqueeze(-2) @ state).squeeze(-2), state


def _chunks(
    x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, documents: PackedDocuments, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the scan chunk by chunk: parallel within a chunk, sequential over a document's chunks."""
    chunks = documents.chunks
    # 1. Cut into chunks [M, H, C, ...]; padding has B and log-decay 0, so it changes no state.
    x, b, c, log_decay = (chunks.cut(part) for part in (x, b, c, log_decay))
    repeat = x.shape[1] // b.shape[1]
    total = log_decay.cumsum(-1)
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=x.device).triu(1)
    # 2. Outputs within the chunks; the mask comes before the exponential, which would overflow.
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    inside = ((c @ b.mT).repeat_interleave(repeat, 1) * decay) @ x
    # 3. What a chunk reads from its first state, keeps of it, and adds to it.
    b, c = b.repeat_interleave(repeat, 1), c.repeat_interleave(repeat, 1)
    reads, kept = c * total.exp().unsqueeze(-1), total[..., -1:].exp().unsqueeze(-1)
    added = (b * (total[..., -1:] - total).exp().unsqueeze(-1)).mT @ x

    # 4. Carry the state from chunk to chunk; shorter documents end first.
    outs, ended, first = list[Tensor](), list[Tensor](), 0
    state = state.index_select(0, chunks.order)
    for active in chunks.steps:
        ended.append(state[active:])
        state, now = state[:active], slice(first, first + active)
        outs.append(inside[now] + reads[now] @ state)
        state = state * kept[now] + added[now]
        first += active
    last = torch.cat([state, *reversed(ended)])
    out = torch.cat(outs).transpose(1, 2).flatten(0, 1)
    return out.index_select(0, chunks.positions), last.index_select(0, chunks.rank)
