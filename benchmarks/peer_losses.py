"""How each peer takes the documents of a step: its batch, made once, and its loss, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.peer_models import causal_mask

Parts = Callable[[], Iterator[Tensor]]


def padded(docs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask [B, S], padded on the right."""
    ids = pad_sequence(docs, batch_first=True)
    mask = pad_sequence([doc.new_ones(len(doc)) for doc in docs], batch_first=True)
    return ids, mask


def transformers_padded(model: Any, docs: list[Tensor]) -> Parts:
    """[B, S] with an attention mask where documents differ in length."""
    ids, mask = padded(docs)
    labels = ids.masked_fill(mask == 0, -100)
    given = {} if bool(mask.all()) else {"attention_mask": mask}

    def parts() -> Iterator[Tensor]:
        yield model(input_ids=ids, labels=labels, use_cache=False, **given).loss

    return parts


def transformers_packed(model: Any, docs: list[Tensor]) -> Parts:
    """[1, T] with position ids that restart, from which transformers makes its block-diagonal mask."""
    ids = torch.cat(docs)[None]
    positions = torch.cat([torch.arange(len(doc), device=doc.device) for doc in docs])[None]
    labels = ids.masked_fill(positions == 0, -100)

    def parts() -> Iterator[Tensor]:
        yield model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss

    return parts


def transformers_one_by_one(model: Any, docs: list[Tensor]) -> Parts:
    """Run a forward and backward per document and accumulates gradients."""
    total = sum(len(doc) - 1 for doc in docs)

    def parts() -> Iterator[Tensor]:
        for doc in docs:
            yield model(input_ids=doc[None], labels=doc[None], use_cache=False, num_items_in_batch=total).loss

    return parts


def transformers_share(model: Any, docs: list[Tensor]) -> Parts:
    """`transformers_padded` on the documents of a rank, divided by the token count of all ranks.

    FSDP averages gradients over ranks, so the mean of these losses is the loss of the batch.
    """
    ids, mask = padded(docs)
    labels = ids.masked_fill(mask == 0, -100)
    given = {} if bool(mask.all()) else {"attention_mask": mask}
    total = torch.tensor(float(sum(len(doc) - 1 for doc in docs)))
    dist.all_reduce(total)
    share = float(total) / dist.get_world_size()

    def parts() -> Iterator[Tensor]:
        yield model(input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=share, **given).loss

    return parts


def torchtitan_even(model: Any, docs: list[Tensor]) -> Parts:
    """torchtitan's Decoder, and cross-entropy as its loss has it."""
    ids = torch.stack(docs)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)

    def parts() -> Iterator[Tensor]:
        logits = model(ids)
        yield F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)

    return parts


def megatron_even(model: Any, docs: list[Tensor]) -> Parts:
    """GPTModel's loss per token, averaged over tokens with a target."""
    ids = torch.stack(docs)
    labels, loss_mask = F.pad(ids[:, 1:], (0, 1)), F.pad(torch.ones_like(ids[:, 1:]), (0, 1)).float()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    mask = causal_mask(ids.shape[1])

    def parts() -> Iterator[Tensor]:
        losses = model(ids, positions, mask, labels=labels)
        yield (losses * loss_mask).sum() / loss_mask.sum()

    return parts


LOSSES: dict[str, Callable[[Any, list[Tensor]], Parts]] = {
    "transformers": transformers_padded,
    "transformers + Liger": transformers_padded,
    "transformers (padded)": transformers_padded,
    "transformers (packed)": transformers_packed,
    "transformers (one document at a time)": transformers_one_by_one,
    "peft + Liger": transformers_padded,
    "peft (padded)": transformers_padded,
    "peft (packed)": transformers_packed,
    "peft (one document at a time)": transformers_one_by_one,
    "peft (one LoRA at a time)": transformers_padded,
    "transformers (FSDP2)": transformers_share,
    "torchtitan": torchtitan_even,
    "megatron-core": megatron_even,
}
