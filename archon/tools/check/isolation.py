"""Isolation of documents and answers: if one changes, the others keep their results bit for bit.

It covers packed documents, documents with shared prefixes, and answers forked from one prompt.
`archon.tools.check.layouts` covers two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archon.generation.inprocess import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.models import BaseArchonModel, get_model_spec
from archon.models.attention.meta import PrefixAttention
from archon.models.attention.prefix.plan import shared_prefixes
from archon.tools.check.decoding import FIXED
from archon.tools.check.oracle import ContractError, pack, packed_inputs
from archon.tools.check.random_configs import draw_fields
from archon.tools.check.round_trip import fresh_model

LENGTHS = [9, 13, 1, 31]
# Lengths of shared prefixes: a short one is computed as a tree, a long one exceeds a tree.
PREFIX_LENGTHS, SUFFIX_LENGTHS = (12, 150), (7, 5, 9)
# Relative, float64 rounding: experts process their tokens together, in matmuls of other sizes.
EXPERTS_TOLERANCE = 1e-12
# Relative to a log-probability; an answer alone is decoded in matrices of one row.
ISOLATION_TOLERANCE = 1e-11
PROMPT_TOKENS, NEW_TOKENS = 19, 13
SAMPLE_SEEDS = range(12)


def check_isolation(seed: int, model_type: str) -> int:
    """Change each packed document in turn, in float64; return the number of documents.

    Raises:
        ContractError: another document's logits change by a bit, or with experts by more than rounding.
    """
    model = _random_model(seed, model_type)
    vocab = model.args.vocab_size
    tokens, positions, cu_seqlens, longest = pack(LENGTHS, vocab, seed)
    with torch.no_grad():
        before = model(tokens, positions, cu_seqlens, longest).split(LENGTHS)
        if not torch.equal(torch.cat(before), model(tokens, positions, cu_seqlens, longest)):
            raise ContractError(
                "two forwards of the same tokens give different logits; remove dropout and other randomness"
            )
        for changed, document in enumerate(tokens.split(LENGTHS)):
            parts = list(tokens.split(LENGTHS))
            parts[changed] = (document + 1) % vocab
            after = model(torch.cat(parts), positions, cu_seqlens, longest).split(LENGTHS)
            _compare(model, before, after, changed, "document")
    return len(LENGTHS)


def check_shared_prefixes(seed: int, model_type: str) -> bool:
    """Change the suffixes of documents with a shared prefix; return whether the family shares prefixes.

    Raises:
        ContractError: another document's logits change by a bit, or with experts by more than rounding; or sharing
            changes logits by more than rounding.
    """
    model = _random_model(seed, model_type)
    if not model.args.shares_prefixes:
        return False
    for prefix_length in PREFIX_LENGTHS:
        tokens, lengths = _documents_with_prefix(prefix_length, model.args.vocab_size, seed)
        before = _shared_logits(model, tokens, lengths)
        packed = model(*packed_inputs(tokens, lengths)).detach().split(lengths)
        difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(before, packed, strict=True))
        if difference > ISOLATION_TOLERANCE:
            raise ContractError(f"sharing a prefix of {prefix_length} tokens changes the logits by {difference:.1e}")
        for changed in range(len(lengths)):
            parts = list(tokens.split(lengths))
            last = torch.zeros_like(parts[changed])
            last[-1] = 1
            parts[changed] = (parts[changed] + last) % model.args.vocab_size
            _compare(model, before, _shared_logits(model, torch.cat(parts), lengths), changed, "sharing document")
    return True


def check_forks(seed: int, model_type: str) -> int:
    """Sample two answers from the state after one prompt, in float64; return the number of compared answers.

    Raises:
        ContractError: an answer depends on the other's tokens, by a bit of a log-probability or with experts by more
            than rounding; or it differs from the answer to a separate prompt.
    """
    known = get_model_spec(model_type, text_only=True).model_args_class.hf_fields
    model = _random_model(seed, model_type, rope_kind="default", **{k: v for k, v in FIXED.items() if k in known})
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(model.args.vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()
    # Equal answers are decoded as one until they differ, so choose three with different first tokens.
    first_tokens = {answer[0][0]: number for number, answer in enumerate(_answers(model, prompt, SAMPLE_SEEDS))}
    if len(first_tokens) < 3:
        count = len(first_tokens)
        raise ContractError(f"{len(SAMPLE_SEEDS)} samples have {count} different first tokens; expected at least 3")
    a, b, c = [*first_tokens.values()][:3]
    (first, second), (same, other) = (_answers(model, prompt, seeds) for seeds in ((a, b), (a, c)))
    _compare_answers("another fork", first, same, EXPERTS_TOLERANCE if _has_experts(model) else 0.0)
    for answer, sample_seed in ((first, a), (second, b), (other, c)):
        (alone,) = _answers(model, prompt, (sample_seed,))
        _compare_answers("forking", answer, alone, ISOLATION_TOLERANCE)
    return 4


Answer = tuple[tuple[int, ...], Tensor]
"""Tokens of an answer and their log-probabilities."""


def _answers(model: BaseArchonModel, prompt: Sequence[int], seeds: Sequence[int]) -> list[Answer]:
    engine = InProcessEngine.from_model(
        model, max_slots=len(SAMPLE_SEEDS), page_size=3, max_seq_len=256, prefill_tokens=11
    )
    settings = [GenerationHyperparameters(max_new_tokens=NEW_TOKENS, seed=seed) for seed in seeds]
    actual = engine.generate([ModelRequest([*prompt], one) for one in settings])
    if engine.stats.shared_prompts != len(seeds) - 1:
        raise ContractError("answers to one prompt did not fork from one prefill")
    return [(tuple(a.output_tokens), torch.tensor(a.output_logprobs, dtype=torch.float64)) for a in actual]


def _compare_answers(cause: str, actual: Answer, expected: Answer, tolerance: float) -> None:
    if actual[0] != expected[0]:
        raise ContractError(f"{cause} changes the tokens of an answer")
    if (difference := float((actual[1] - expected[1]).abs().max())) > tolerance:
        raise ContractError(f"{cause} changes a log-probability of an answer by {difference:.1e}")


def _random_model(seed: int, model_type: str, **options: Any) -> BaseArchonModel:
    return fresh_model({"model_type": model_type} | draw_fields(seed, model_type, **options), seed, torch.float64)


def _has_experts(model: BaseArchonModel) -> bool:
    return any(layer.feed_forward.n_experts for layer in model.layer_specs)


def _documents_with_prefix(prefix_length: int, vocab: int, seed: int) -> tuple[Tensor, list[int]]:
    """Return tokens and lengths of documents with `prefix_length` equal tokens and different next ones."""
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(vocab, (prefix_length,), generator=generator)
    suffixes = [torch.randint(vocab, (count,), generator=generator) for count in SUFFIX_LENGTHS]
    for number, suffix in enumerate(suffixes):
        suffix[0] = number
    tokens = torch.cat([part for suffix in suffixes for part in (prefix, suffix)])
    return tokens, [prefix_length + count for count in SUFFIX_LENGTHS]


@torch.no_grad()
def _shared_logits(model: BaseArchonModel, tokens: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    shared = shared_prefixes(tokens, lengths)
    assert shared is not None
    _, positions, cu_seqlens, longest = packed_inputs(tokens, lengths)
    inputs = tokens[shared.rows], positions[shared.rows], cu_seqlens, longest
    return model(*inputs, PrefixAttention(shared, model.args.attn_type)).split(lengths)


def _compare(
    model: BaseArchonModel, before: Sequence[Tensor], after: Sequence[Tensor], changed: int, kind: str
) -> None:
    """Raise ContractError if the changed document keeps its logits, or if another one's logits change."""
    tolerance = EXPERTS_TOLERANCE if _has_experts(model) else 0.0
    for other, (old, new) in enumerate(zip(before, after, strict=True)):
        difference = float((old - new).abs().max() / old.abs().max())
        if other == changed and difference == 0:
            raise ContractError(f"{kind} {changed + 1} has the same logits after its tokens changed")
        if other != changed and difference > tolerance:
            raise ContractError(f"{kind} {other + 1} changes by {difference:.1e} when {kind} {changed + 1} does")
