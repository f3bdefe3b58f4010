"""The experts that a sequence's tokens used, recorded while they are computed."""

from __future__ import annotations

import numpy as np
import torch

from archon.models.args.base import BaseModelArgs
from archon.models.base import BaseArchonModel
from archon.models.layers.routed_experts import routed_experts_dtype, routed_experts_sizes, unknown_expert_id
from archon.schema.errors import RolloutError

Experts = np.ndarray
"""uint8 or uint16 [tokens, layers with experts, experts a token]."""


class ExpertRecord:
    """Routed experts of the first `length` tokens of a sequence.

    A preemption or a weight update recomputes a token, but keeps its recorded experts. The next token was sampled from
    the forward with these experts, so they are consistent with its logprob.
    """

    def __init__(self) -> None:
        self._parts: list[Experts] = []
        self.length = 0

    def add(self, start: int, experts: Experts, kept: int) -> None:
        """Set the experts of at most `length` tokens from `start` on; the first `kept` tokens keep theirs."""
        assert start <= self.length, f"experts of token {start} after only {self.length} tokens"
        first = max(start, min(kept, self.length))
        if first < self.length:
            self._parts = [self.first(first)]
        self._parts.append(experts[first - start :])
        self.length = max(first, start + len(experts))

    def first(self, count: int) -> Experts:
        """Return the experts of the first `count` tokens."""
        return np.concatenate(self._parts)[:count]


class Recorder:
    """Reader of the routed experts of the model's last forward."""

    def __init__(self, model: BaseArchonModel) -> None:
        self._model, self._dtype = model, routed_experts_dtype(model.args)

    def experts(self, rows: int) -> Experts:
        """Return the experts of the first `rows` tokens."""
        experts: Experts = self.on_device(rows).cpu().numpy()
        return experts

    def on_device(self, rows: int) -> torch.Tensor:
        """Return the experts [rows, L, k] of the first `rows` tokens on their device."""
        chosen = [stats.experts[:rows] for stats in self._model.router_stats if stats.experts is not None]
        return torch.stack(chosen, 1).to(self._dtype)


def decode_server_experts(reported: np.ndarray, args: BaseModelArgs, count: int) -> Experts:
    """Convert experts reported by a server to the storage dtype.

    Args:
        reported: integers [n, L, k], for all layers or only layers with experts.
        args: model arguments.
        count: number of tokens to return, from the first.

    Raises:
        RolloutError: the experts do not fit this model.
    """
    layers, top_k, n_experts = routed_experts_sizes(args)
    if reported.ndim == 3 and reported.shape[1] == args.n_layers:
        reported = reported[:, list(args.expert_layers)]
    shape = "×".join(map(str, reported.shape))
    if reported.ndim != 3 or reported.shape[1:] != (layers, top_k) or len(reported) < count:
        raise RolloutError(
            f"reported experts of {count} tokens have shape {shape}; expected {layers} layers and {top_k} "
            "experts per token"
        )
    if reported.dtype.kind not in "iu" or (reported.size and not 0 <= reported.min() <= reported.max() < n_experts):
        raise RolloutError(f"reported experts are outside of 0 to {n_experts - 1}")
    stored: Experts = torch.from_numpy(reported[:count].astype(np.int32)).to(routed_experts_dtype(args)).numpy()
    return stored


def join_records(known: Experts | None, answer: Experts | None) -> Experts | None:
    """Return the known experts of the first tokens, extended by another record of the same tokens and more."""
    if known is None or answer is None:
        return answer if known is None else known
    return np.concatenate((known, answer[len(known) :]))


def pad_records(records: list[Experts | None], length: int) -> torch.Tensor | None:
    """Return records as a column [B, length, L, k], padded with the unknown number; None without records."""
    present = [record for record in records if record is not None]
    if not present:
        return None
    dtype = torch.from_numpy(present[0]).dtype
    column = np.full((len(records), length, *present[0].shape[1:]), unknown_expert_id(dtype), present[0].dtype)
    for row, record in zip(column, records, strict=True):
        if record is not None:
            row[: len(record)] = record
    return torch.from_numpy(column)
