"""Greedy answers through the paged cache, compared with transformers token by token, forks and preemption included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from archon.generation.inprocess import InProcessEngine
from archon.generation.types import GenerationHyperparameters, ModelRequest
from archon.models import BaseArchonModel, get_model_spec
from archon.tools.check.oracle import ContractError, build_pair, random_config
from archon.tools.check.random_configs import draw_fields
from archon.tools.check.round_trip import fresh_model

NEW_TOKENS = 13
PROMPT_LENGTHS = (1, 2, 5, 9, 17, 33)
PAGE_SIZES = (1, 3, 64)
# Fields for decoding: windows shorter than the prompts, no end-of-sequence id, and step sizes without limits, which
# transformers ignores while it decodes.
FIXED: dict[str, Any] = {
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "time_step_limit": [0.0, float("inf")],
    "time_step_min": 1e-9,
}


def prompts(vocab: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts of different lengths; one occurs twice, so its cache is shared and forked."""
    generator = torch.Generator().manual_seed(seed)
    distinct = [torch.randint(vocab, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    return [*distinct, distinct[3]]


def transformers_greedy_tokens(reference: Any, prompt: Sequence[int], count: int = NEW_TOKENS) -> list[int]:
    """Return `count` greedy tokens after a prompt from transformers' `generate`."""
    ids = torch.tensor([list(prompt)])
    reference.generation_config.eos_token_id = None
    if getattr(reference.generation_config, "use_mtp", None):
        # Newer transformers drafts with MTP layers, which the model lacks.
        reference.generation_config.use_mtp = False
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    return list(out[0, len(prompt) :].tolist())


@torch.no_grad()
def uncached_greedy_tokens(model: BaseArchonModel, prompt: Sequence[int], count: int = NEW_TOKENS) -> list[int]:
    """Return `count` greedy tokens after a prompt, by a forward over the whole document for each token."""
    tokens = list(prompt)
    for _ in range(count):
        n = len(tokens)
        logits = model(torch.tensor(tokens), torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def answers(engine: InProcessEngine, prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the engine's greedy answers to the prompts."""
    settings = GenerationHyperparameters(greedy=True, max_new_tokens=NEW_TOKENS)
    return [answer.output_tokens for answer in engine.generate([ModelRequest(list(p), settings) for p in prompt_ids])]


def check_decoding(
    seed: int, model_type: str, reference: str | None = None, page_sizes: Sequence[int] = PAGE_SIZES
) -> int:
    """Compare greedy answers in float64, which separates near ties; return their number of tokens.

    The reference is transformers' `generate`; without a `reference`, the model's forward over whole documents. With few
    pages, answers are preempted and recomputed. Then the weights are replaced.

    Raises:
        ContractError: an answer differs.
    """
    args_class = get_model_spec(model_type, text_only=True).model_args_class
    fixed = {name: value for name, value in FIXED.items() if name in {*args_class.hf_fields, *args_class.hf_examples}}
    total = 0
    pairs: list[tuple[BaseArchonModel, Callable[[list[int]], list[int]]]] = []
    if reference is not None:
        config = random_config(seed, model_type, reference, rope_kind="default", **fixed)
        for weights_seed in (seed, seed + 1):
            hf_model, model, _ = build_pair(config, seed=weights_seed, dtype=torch.float64, model_type=model_type)
            pairs.append((model, partial(transformers_greedy_tokens, hf_model.eval())))
    else:
        fields = {"model_type": model_type} | draw_fields(seed, model_type, rope_kind="default", **fixed)
        models = [fresh_model(fields, weights_seed, torch.float64) for weights_seed in (seed, seed + 1)]
        pairs = [(model, partial(uncached_greedy_tokens, model)) for model in models]
    first = pairs[0][0]
    prompt_ids = prompts(first.args.vocab_size, seed)
    expected = [[greedy(prompt) for prompt in prompt_ids] for _, greedy in pairs]
    for page_size in page_sizes:
        longest = -(-(max(PROMPT_LENGTHS) + NEW_TOKENS) // page_size)
        engine = InProcessEngine.from_model(
            first, max_slots=4, page_size=page_size, n_pages=2 * longest, max_seq_len=256, prefill_tokens=11
        )
        for number, (model, _) in enumerate(pairs):
            if number:
                engine.update_weights(model)
            for prompt, actual, right in zip(prompt_ids, answers(engine, prompt_ids), expected[number], strict=True):
                if actual != right:
                    raise ContractError(
                        f"pages of {page_size}{', new weights' if number else ''}: a prompt of {len(prompt)} tokens "
                        f"has the answer {actual}, expected {right}"
                    )
                total += len(actual)
    return total
