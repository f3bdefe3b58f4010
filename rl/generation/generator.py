"""Continuous batching: one step reads prompts, adds a token to every running sequence and retires those that end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.paged import DecodeRows, PagedAttention, PagedCache, PrefillChunk
from archon.models.base import BaseArchonModel
from archon.rl.generation.sampler import SamplingParams, sample
from archon.rl.generation.scheduler import Fork, Scheduler, Step
from archon.rl.generation.sequence import Sequence, StopStrings
from archon.rl.types import ModelRequest
from archon.schema.errors import RolloutError

# Logits of at most this many elements are sampled at once, so that wide vocabularies do not multiply in memory.
_MAX_SAMPLED_ELEMENTS = 1 << 24


@dataclass
class GeneratorStats:
    """Counts since the generator was made."""

    steps: int = 0
    prefill_tokens: int = 0  # tokens run through the model to read prompts, also after a preemption or an update
    decode_tokens: int = 0  # tokens run through the model one a sequence
    shared_prompts: int = 0  # answers whose prompt another one had read


@dataclass
class _Sampled:
    """Sequences that sample in this step, each from one row of `hidden`."""

    sequences: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    def add(self, sequence: Sequence, hidden: Tensor) -> None:
        """Several sequences that fork from one prompt share its row."""
        if not self.hidden or self.hidden[-1] is not hidden:
            self.hidden.append(hidden)
        self.sequences.append(sequence)
        self.rows.append(len(self.hidden) - 1)


class Generator:
    """A model, its paged cache, a scheduler and a sampler. Synchronous; `InProcessEngine` drives it.

    Args:
        model: an actor in evaluation mode, on the device of the cache.
        cache: pages for keys and values.
        max_slots: most sequences that run at once.
        max_seq_len: most tokens of prompt and answer together.
        prefill_tokens: most prompt tokens read in one step; longer prompts are read in parts.
        seed: requests without a seed of their own draw theirs from this and their number.
        eos_token_ids: end every answer whose request does not ignore them.
        tokenizer: decodes answers for stop strings, unless the request brings its own.
    """

    def __init__(
        self,
        model: BaseArchonModel,
        cache: PagedCache,
        *,
        max_slots: int,
        max_seq_len: int,
        prefill_tokens: int,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Any = None,
    ) -> None:
        self.model, self.cache, self.max_seq_len = model, cache, max_seq_len
        self.seed, self.eos_token_ids, self.tokenizer = seed, eos_token_ids, tokenizer
        self.max_slots, self.prefill_tokens = max_slots, prefill_tokens
        self.scheduler = self._new_scheduler()
        self.stats = GeneratorStats()
        self.version = 0
        self.submitted = 0
        self.device = cache.keys.device

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.cache.n_pages, self.cache.page_size, self.max_slots, self.prefill_tokens)

    def submit(self, request: ModelRequest, on_done: Callable[[Sequence], None]) -> Sequence:
        """Queue a request. `on_done` is called once, when its answer has ended or failed.

        Raises `RolloutError` for a request that could never be honoured.
        """
        g, prompt = request.gconfig, request.input_ids
        if g.n_samples != 1:
            raise RolloutError(
                f"request {request.rid}: n_samples is {g.n_samples}; a request has one answer, send several"
            )
        if not prompt:
            raise RolloutError(f"request {request.rid}: the prompt is empty, expected at least one token")
        vocab_size = self.model.args.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            wrong = next(i for i in prompt if not 0 <= i < vocab_size)
            raise RolloutError(f"request {request.rid}: token id {wrong} is not below the vocabulary size {vocab_size}")
        if request.image_data:
            raise RolloutError(f"request {request.rid}: image_data was given to a text model")
        most = self.max_seq_len if g.max_tokens is None else min(g.max_tokens, self.max_seq_len)
        limit = min(g.max_new_tokens, most - len(prompt))
        if limit < 1:
            raise RolloutError(
                f"request {request.rid}: the prompt of {len(prompt)} tokens leaves no room for an answer within {most}"
                " tokens; shorten it, or raise max_tokens or the engine's max_seq_len"
            )
        sequence = Sequence(
            request=request,
            limit=limit,
            seed=self._request_seed() if g.seed is None else g.seed,
            stop_ids=frozenset(g.stop_token_ids) | frozenset(() if g.ignore_eos else self.eos_token_ids),
            stop_strings=self._stop_strings(request),
            on_done=on_done,
        )
        pages = self.scheduler.most_pages(sequence)
        if pages > self.cache.n_pages:
            raise RolloutError(
                f"request {request.rid}: {len(prompt)} prompt tokens and up to {limit} new ones need {pages} pages"
                f" of {self.cache.page_size} tokens, the cache has {self.cache.n_pages}; lower max_new_tokens or"
                " raise n_pages"
            )
        self._check_rope(sequence)
        self.submitted += 1
        self.scheduler.submit(sequence)
        return sequence

    def _request_seed(self) -> int:
        return int(np.random.SeedSequence([self.seed, self.submitted]).generate_state(1, np.uint64)[0])

    def _stop_strings(self, request: ModelRequest) -> StopStrings | None:
        if not request.gconfig.stop:
            return None
        tokenizer = request.tokenizer or self.tokenizer
        if tokenizer is None:
            raise RolloutError(
                f"request {request.rid}: stop strings {request.gconfig.stop} need a tokenizer;"
                " give one to the engine or to the request"
            )
        return StopStrings(tokenizer, request.gconfig.stop)

    def _check_rope(self, sequence: Sequence) -> None:
        """Refuse a request whose cached keys would be turned by other angles once the answer has grown."""
        rope = self.model.args.rope_scaling
        if not rope.depends_on_length:
            return
        longest = len(sequence.prompt) + sequence.limit
        bound = rope.original_max_seq_len if rope.kind == "longrope" else self.model.args.max_seq_len
        assert bound is not None
        if longest <= bound or (rope.kind == "longrope" and len(sequence.prompt) > bound):
            return
        raise RolloutError(
            f"request {sequence.request.rid}: prompt and answer may reach {longest} tokens; beyond {bound} the"
            f" {rope.kind} RoPE of this model changes the keys already cached; set max_tokens to {bound}"
        )

    @torch.inference_mode()
    def step(self) -> None:
        """One forward: read what is due, add a token to every sequence that is ready, call back those that end."""
        step = self.scheduler.plan()
        sampled = _Sampled()
        self._fork(step.forks, sampled)
        if step.decode or step.chunks:
            self._forward(step, sampled)
        if sampled.sequences:
            self._sample(sampled)
        self.stats.steps += 1

    def _forward(self, step: Step, sampled: _Sampled) -> None:
        decode, chunks = step.decode, step.chunks
        width = max((len(sequence.pages) for sequence in decode), default=1)
        pages = np.zeros((len(decode), width), dtype=np.int64)
        for row, sequence in enumerate(decode):
            pages[row, : len(sequence.pages)] = sequence.pages
        lengths = np.array([sequence.total for sequence in decode], dtype=np.int64)
        tokens = [(sequence.output or sequence.prompt)[-1] for sequence in decode]
        parts = []
        for chunk in chunks:
            sequence = chunk.sequence
            tokens += sequence.tokens(chunk.start, chunk.stop)
            parts.append(PrefillChunk(chunk.start, chunk.stop - chunk.start, sequence.pages, sequence.total))
        meta = PagedAttention(self.cache, DecodeRows(pages, lengths), parts, self.model.args.attn_type)
        hidden = self.model.hidden_states(torch.tensor(tokens, device=self.device), meta.positions, meta)

        for sequence in decode:
            sequence.computed += 1
        sampled.sequences += decode
        sampled.rows += range(len(sampled.hidden), len(sampled.hidden) + len(decode))
        sampled.hidden += hidden[: len(decode)].unbind()
        first = len(decode)
        for chunk in chunks:
            self._read_chunk(chunk, hidden[first : first + chunk.stop - chunk.start], sampled)
            first += chunk.stop - chunk.start
        self.stats.decode_tokens += len(decode)
        self.stats.prefill_tokens += first - len(decode)

    def _read_chunk(self, chunk: Any, hidden: Tensor, sampled: _Sampled) -> None:
        last = len(chunk.sequence.prompt) - 1
        # A copy: the entry of a shared prompt must not keep the whole forward's states alive.
        last_hidden = hidden[last - chunk.start].clone() if chunk.start <= last < chunk.stop else None
        forks = self.scheduler.read(chunk, last_hidden)
        if chunk.sequence.computed == chunk.sequence.total:
            # The very tensor that followers fork with, so that they share its row of logits.
            sampled.add(chunk.sequence, hidden[-1] if last_hidden is None or chunk.stop > last + 1 else last_hidden)
        self._fork(forks, sampled)

    def _fork(self, forks: list[Fork], sampled: _Sampled) -> None:
        copies = [fork.copy for fork in forks if fork.copy is not None]
        if copies:
            self.cache.copy_pages(*zip(*copies, strict=True))
        for fork in forks:
            if fork.sequence.computed == fork.sequence.total:
                sampled.add(fork.sequence, fork.prompt.last_hidden)
        self.stats.shared_prompts += len(forks)

    def _sample(self, sampled: _Sampled) -> None:
        head = self.model.output
        assert head is not None
        logits = head(torch.stack(sampled.hidden))
        count = len(sampled.sequences)
        block = max(1, _MAX_SAMPLED_ELEMENTS // logits.shape[-1])
        for first in range(0, count, block):
            sequences = sampled.sequences[first : first + block]
            rows = torch.tensor(sampled.rows[first : first + block], device=self.device)
            tokens, logprobs = sample(logits.index_select(0, rows), _sampling_params(sequences))
            for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
                sequence.append(token, logprob, self.version)
                if sequence.stop_reason is not None:
                    self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        sequence.on_done(sequence)

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def abort(self, sequences: list[Sequence]) -> None:
        """End unfinished sequences with the tokens they have."""
        for sequence in sequences:
            sequence.stop_reason = "abort"
            self._finish(sequence)

    def fail(self, error: BaseException) -> None:
        """Hand `error` to whoever waits for an unfinished sequence, and start afresh with an empty cache."""
        failed = self.unfinished
        self.scheduler = self._new_scheduler()
        # What broke may have left NaN in the cache, and masked NaN is still NaN.
        self.cache.clear()
        for sequence in failed:
            sequence.stop_reason, sequence.error = "abort", error
            sequence.on_done(sequence)

    def restart(self, version: int) -> None:
        """The weights have changed: every cached key and value is void, and tokens from now on carry `version`.

        Unfinished sequences keep their tokens, logprobs and versions; prompt and tokens are read again with the new
        weights, so that what follows is sampled from the new policy exactly.
        """
        self.scheduler.restart()
        self.version = version


def _sampling_params(sequences: list[Sequence]) -> SamplingParams:
    configs = [sequence.request.gconfig for sequence in sequences]
    banned = [
        (row, sorted(sequence.stop_ids))
        for row, sequence in enumerate(sequences)
        if len(sequence.output) < configs[row].min_new_tokens and sequence.stop_ids
    ]
    return SamplingParams(
        temperature=np.array([c.temperature for c in configs]),
        greedy=np.array([c.greedy for c in configs]),
        top_p=np.array([c.top_p for c in configs]),
        top_k=np.array([c.top_k or 0 for c in configs], dtype=np.int64),
        seed=np.array([sequence.seed for sequence in sequences], dtype=np.uint64),
        index=np.array([len(sequence.output) for sequence in sequences], dtype=np.uint64),
        banned=banned,
    )
