"""Documents that begin alike: what they begin with is computed once.

The answers to one prompt, or examples behind one system prompt, repeat it token by token. Under causal attention the
hidden states of equal beginnings are equal, so that the layers need only one copy of each and, of every document, the
rest. (For reinforcement: Prefix Grouper, Liu et al. 2025, arXiv:2506.05433.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.sdpa import attend_alike

WORTH = 0.1
"""The part of a pack's tokens that sharing must save."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Which of a pack's T tokens are computed, U of them: first the shared beginnings, the shortest first, then what
    follows them in each document, by the length of the beginning and then by its own.

    Args:
        rows: int64 [U], the computed tokens among those of the pack.
        back: int64 [T], where each token of the pack finds its hidden state among the computed.
        prefixes: (length, how many) of the beginnings.
        endings: (length of the beginning, own length, int64 [n] which of the beginnings of that length) of the rest; a
            document that shares nothing has a beginning of length 0.
    """

    rows: Tensor
    back: Tensor
    prefixes: tuple[tuple[int, int], ...]
    endings: tuple[tuple[int, int, Tensor], ...]

    def to(self, device: torch.device) -> SharedPrefixes:
        """The same with its indices on `device`."""
        endings = tuple((prefix, own, numbers.to(device)) for prefix, own, numbers in self.endings)
        return SharedPrefixes(self.rows.to(device), self.back.to(device), self.prefixes, endings)


def shared_prefixes(tokens: Tensor, lengths: Sequence[int]) -> SharedPrefixes | None:
    """What the documents of a pack begin alike with; None where that would save less than `WORTH` of it.

    Args:
        tokens: int64 [T] on the CPU.
        lengths: of the documents, T in all.
    """
    groups = _groups(tokens.numpy(), lengths)
    saved = sum(prefix * (len(members) - 1) for prefix, members in groups)
    if saved < WORTH * tokens.numel():
        return None
    starts = np.concatenate([[0], np.cumsum(lengths)])
    groups.sort(key=lambda group: group[0])
    rows: list[np.ndarray] = []
    back = np.empty(tokens.numel(), dtype=np.int64)
    at, numbers = 0, dict[int, int]()
    documents: list[tuple[int, int, int, int]] = []  # beginning, own length, number of the beginning, document
    for prefix, members in groups:
        number = numbers.get(prefix, 0)
        numbers[prefix] = number + 1
        for document in members:
            back[starts[document] : starts[document] + prefix] = np.arange(at, at + prefix)
            documents.append((prefix, lengths[document] - prefix, number, document))
        rows.append(np.arange(starts[members[0]], starts[members[0]] + prefix))
        at += prefix
    documents = sorted(entry for entry in documents if entry[1])
    for prefix, own, _, document in documents:
        first = starts[document] + prefix
        rows.append(np.arange(first, first + own))
        back[first : first + own] = np.arange(at, at + own)
        at += own
    endings = []
    for (prefix, own), alike in groupby(documents, key=lambda entry: entry[:2]):
        endings.append((prefix, own, torch.tensor([number for _, _, number, _ in alike])))
    prefixes = tuple((prefix, count) for prefix, count in numbers.items() if prefix)
    return SharedPrefixes(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(back), prefixes, tuple(endings))


def _groups(tokens: np.ndarray, lengths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(length of the common beginning, documents); a document alone has a beginning of 0.

    Documents are sorted, which puts those that begin alike side by side, and a group grows as long as that saves more.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)])
    documents = [tokens[starts[d] : starts[d + 1]] for d in range(len(lengths))]
    order = sorted(range(len(lengths)), key=lambda d: documents[d].tobytes())
    groups: list[tuple[int, list[int]]] = [(0, order[:1])]
    for before, document in pairwise(order):
        prefix, members = groups[-1]
        alike = _common(documents[before], documents[document])
        shorter = alike if len(members) == 1 else min(prefix, alike)
        if shorter * len(members) > prefix * (len(members) - 1):
            groups[-1] = (shorter, [*members, document])
        else:
            groups.append((0, [document]))
    return groups


def _common(one: np.ndarray, other: np.ndarray) -> int:
    n = min(len(one), len(other))
    differ = one[:n] != other[:n]
    return int(differ.argmax()) if differ.any() else n


@torch.compiler.disable
def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, *, window: int | None, scale: float
) -> Tensor:
    """Causal attention of the computed tokens: q [U, H, D], k and v [U, G, D] to [U, H, D]."""
    sizes = [length * count for length, count in shared.prefixes]
    sizes += [own * len(numbers) for _, own, numbers in shared.endings]
    parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    outs: list[Tensor] = []
    beginnings: dict[int, tuple[Tensor, Tensor]] = {}
    for (length, count), (qs, ks, vs) in zip(shared.prefixes, parts, strict=False):
        qs, ks, vs = (x.unflatten(0, (count, length)) for x in (qs, ks, vs))
        beginnings[length] = ks, vs
        outs.append(attend_alike(qs, ks, vs, window, scale).flatten(0, 1))
    for (prefix, own, numbers), (qs, ks, vs) in zip(shared.endings, parts, strict=True):
        qs, ks, vs = (x.unflatten(0, (len(numbers), own)) for x in (qs, ks, vs))
        if prefix:
            ks, vs = (
                torch.cat([x.index_select(0, numbers), y], dim=1)
                for x, y in zip(beginnings[prefix], (ks, vs), strict=True)
            )
        outs.append(attend_alike(qs, ks, vs, window, scale).flatten(0, 1))
    return torch.cat(outs)
