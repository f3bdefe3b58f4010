"""Continuous batching: a step computes chunks of prompts and samples a token for every decoding sequence."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from archon.checkpoint.peft.export import LoRAWeights
from archon.engine import heap
from archon.engine.threads import adjust_threads
from archon.generation.decode_step import DecodeStep, UnreadTokens
from archon.generation.expert_record import ExpertRecord, Experts, Recorder
from archon.generation.images import ImageFeatureCache, PromptImages
from archon.generation.lora import LoRAManager
from archon.generation.requests import max_answer_tokens, stop_ids
from archon.generation.sampler import MAX_SAMPLED_ELEMENTS, SamplingParams, most_likely, sample
from archon.generation.scheduler import Fork, ScheduledChunk, Scheduler, Step
from archon.generation.seeds import request_seed
from archon.generation.sequence import Sequence, StopStrings
from archon.generation.types import ModelRequest, TopLogprobs
from archon.models.attention.decode.paged import DecodeRows, PagedAttention, PrefillChunk
from archon.models.attention.decode.paged_cache import PagedCache
from archon.models.base import BaseArchonModel, ModelInputs
from archon.models.vision.images import ProcessedImage
from archon.parallel.transfer import to_device_async
from archon.schema.errors import NotFiniteError, RolloutError

# Copied pages are gathered first, which takes as much memory again.
_PAGES_COPIED_AT_ONCE = 64

# To look whether the heap has grown takes as long as a hundredth of a small model's step.
_STEPS_BETWEEN_TRIMS = 16


@dataclass
class GeneratorStats:
    """Counts since the generator was created."""

    steps: int = 0
    seconds: float = 0.0  # total time of the steps
    prefill_tokens: int = 0  # tokens computed in chunks: prompts, and answers again after a preemption or an update
    decode_tokens: int = 0  # tokens computed one per sequence and step
    duplicate_tokens: int = 0  # prompt tokens that were not computed because another sequence has the same ones
    shared_prompts: int = 0  # answers that reuse another answer's prompt cache
    pushed_bytes: int = 0  # written by updates of the weights, packed copies included


def _round_up(rows: int) -> int:
    """Return `rows` rounded up by at most an eighth, so that few distinct sizes occur.

    Matrix libraries prepare a kernel for every new shape (oneDNN: half a millisecond), and the number of rows changes
    with every answer that ends.
    """
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


def _lora_key(sequence: Sequence) -> int:
    """Return a sort key that groups sequences by LoRA, with those without a LoRA last."""
    return sys.maxsize if sequence.lora is None else sequence.lora.slot


def _dedupe_rows(sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence], list[int]]:
    """Return the sequences with distinct tokens, their duplicates, and the row of each duplicate's original."""
    rows: dict[tuple[int, int, int], int] = {}
    distinct: list[Sequence] = []
    duplicates: list[Sequence] = []
    duplicate_rows: list[int] = []
    for sequence in sequences:
        if sequence.drawn is not None and (row := rows.setdefault(sequence.drawn, len(distinct))) < len(distinct):
            duplicates.append(sequence)
            duplicate_rows.append(row)
        else:
            distinct.append(sequence)
    return distinct, duplicates, duplicate_rows


def _nonfinite_sequences(
    spans: list[tuple[Sequence, int]], hidden: Tensor, overflowed: Tensor | None
) -> list[Sequence]:
    """Return the sequences with LoRAs that produce non-finite values.

    Args:
        spans: the sequences of consecutive rows, and their numbers of rows.
        hidden: [rows, dim], padded at the end.
        overflowed: see `CachingAttention`.

    Raises:
        NotFiniteError: the model itself produces them.
    """
    owners = [sequence for sequence, count in spans for _ in range(count)]
    wrong = ~hidden[: len(owners)].isfinite().all(1)
    if overflowed is not None:
        wrong |= overflowed
    broken = list(dict.fromkeys(owners[row] for row in wrong.nonzero()[:, 0].tolist()))
    if any(sequence.lora is None for sequence in broken):
        raise NotFiniteError("hidden states of the model are not finite; check the model's weights")
    return broken


def _sampling_params(sequences: list[Sequence]) -> SamplingParams:
    temperature, greedy, top_p, top_k, seed = zip(*(sequence.sampling for sequence in sequences), strict=True)
    return SamplingParams(
        temperature=np.array(temperature, dtype=np.float64),
        greedy=np.array(greedy),
        top_p=np.array(top_p, dtype=np.float64),
        top_k=np.array(top_k, dtype=np.int64),
        seed=np.array(seed, dtype=np.uint64),
        index=np.array([len(sequence.output) for sequence in sequences], dtype=np.uint64),
        banned=[
            (row, sorted(sequence.stop_ids))
            for row, sequence in enumerate(sequences)
            if sequence.stop_ids and len(sequence.output) < sequence.min_new_tokens
        ],
        changed=[(row, sequence.changes) for row, sequence in enumerate(sequences) if sequence.changes is not None],
    )


def _record(experts: Experts, decoded: list[tuple[int, Sequence]], first: int, chunks: list[ScheduledChunk]) -> None:
    """Record the experts of a forward's tokens.

    `decoded` sequences have one token each, at these rows; the tokens of `chunks` follow from row `first` on.
    """
    for row, sequence in decoded:
        sequence.record(sequence.computed, experts[row : row + 1])
    for chunk in chunks:
        sequence, prompt = chunk.sequence, chunk.sequence.shared
        rows = experts[first : first + chunk.stop - chunk.start]
        first += len(rows)
        sequence.record(chunk.start, rows)
        if prompt is not None and sequence.is_leader:
            if prompt.experts is None or chunk.start == 0:
                prompt.experts = ExpertRecord()
            prompt.experts.add(chunk.start, rows[: len(sequence.prompt) - chunk.start], kept=0)


class _SampleBatch:
    """The sequences that sample a token in this step, each from one row of the concatenated `hidden` [rows, dim]."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.rows: list[int] = []
        self.hidden: list[Tensor] = []
        self.n_rows = 0
        self._last: Tensor | None = None

    def add_rows(self, sequences: list[Sequence], hidden: Tensor, rows: list[int]) -> None:
        """Add sequences, each with the index of its row in `hidden` [n, dim]."""
        self.sequences += sequences
        self.rows += [self.n_rows + row for row in rows]
        self.hidden.append(hidden)
        self.n_rows += len(hidden)

    def add(self, sequence: Sequence, hidden: Tensor) -> None:
        """Add a sequence with its hidden state [dim]; consecutive sequences with the same tensor share a row."""
        if hidden is self._last:
            self.sequences.append(sequence)
            self.rows.append(self.n_rows - 1)
        else:
            self.add_rows([sequence], hidden[None], [0])
            self._last = hidden


class Generator:
    """Generator of one model: paged KV cache, scheduler and sampler. Synchronous; `InProcessEngine` drives it.

    `model` is an actor in evaluation mode on the device of `cache`; see `InProcessEngine.from_model` for the other
    arguments.

    With `static_decode` and a scratch page in the cache, `DecodeStep` decodes the sequences that it supports, and the
    host reads their tokens one step later. `_forward` computes chunks of prompts and decodes other sequences.
    """

    def __init__(
        self,
        model: BaseArchonModel,
        cache: PagedCache,
        *,
        max_slots: int,
        max_seq_len: int,
        prefill_tokens: int,
        seed: int,
        eos_token_ids: tuple[int, ...],
        tokenizer: Any,
        static_decode: bool = False,
    ) -> None:
        self.model, self.cache, self.max_seq_len = model, cache, max_seq_len
        self.seed, self.eos_token_ids, self.tokenizer = seed, eos_token_ids, tokenizer
        self.max_slots, self.prefill_tokens = max_slots, prefill_tokens
        self.scheduler = self._new_scheduler()
        self.lora_manager = LoRAManager(model)
        self.recorder: Recorder | None = None
        self._static_decode = static_decode
        self._decode_step = self._new_decode_step()
        self._unread: UnreadTokens | None = None
        self.image_cache = ImageFeatureCache(model, cache.device)
        self._last_images: PromptImages | None = None
        self._image_token = None if model.args.image_format is None else model.args.image_format.token
        self._length_dependent_ropes = [rope for rope in model.args.ropes if rope.scaling.depends_on_length]
        self.stats = GeneratorStats()
        self.version = 0
        self.submitted = 0
        self.device = cache.device

    def _new_scheduler(self) -> Scheduler:
        cache = self.cache
        return Scheduler(
            cache.n_pages, cache.page_size, self.max_slots, self.prefill_tokens, n_states=cache.states.n_slots
        )

    def _new_decode_step(self) -> DecodeStep | None:
        if not self._static_decode:
            return None
        step = DecodeStep(self.model, self.cache, self.max_slots, self.max_seq_len, self.lora_manager.slots)
        if self.recorder is not None:
            step.record_experts(self.recorder)
        return step

    def record_experts(self) -> None:
        """Record the routed experts of all sequences from now on; no sequence may exist yet."""
        self.recorder = Recorder(self.model)
        if self._decode_step is not None:
            self._decode_step.record_experts(self.recorder)

    def submit(self, request: ModelRequest, on_done: Callable[[Sequence], None]) -> Sequence:
        """Queue a request. `on_done` is called once, when its answer has ended or failed.

        Raises:
            RolloutError: the request can never be answered.
            UnknownLoRAError: its LoRA is not loaded.
        """
        g, prompt = request.gconfig, request.input_ids
        lora = None if request.lora is None else self.lora_manager.find(request.lora)
        vocab_size = self.model.args.vocab_size
        eos_token_ids = self.eos_token_ids if lora is None or lora.stop_ids is None else lora.stop_ids
        limit = max_answer_tokens(request, vocab_size, self.max_seq_len, "the engine's max_seq_len")
        sequence = Sequence(
            request=request,
            limit=limit,
            seed=request_seed(self.seed, self.submitted) if g.seed is None else g.seed,
            stop_ids=frozenset(stop_ids(g, eos_token_ids, vocab_size)),
            stop_strings=self._stop_strings(request),
            on_done=on_done,
            lora=lora,
            experts=None if self.recorder is None else ExpertRecord(),
            images=self.prompt_images(prompt, request.image_data or (), f"request {request.rid}"),
        )
        pages = self.scheduler.pages_for(sequence.max_cached)
        if pages > self.cache.n_pages:
            raise RolloutError(
                f"request {request.rid}: {len(prompt)} prompt tokens and up to {limit} new ones need {pages} pages"
                f" of {self.cache.page_size} tokens, the cache has {self.cache.n_pages}; lower max_new_tokens or"
                " raise n_pages"
            )
        self._check_rope(sequence)
        self.submitted += 1
        if lora is not None:
            self.lora_manager.begin(lora, len(prompt))
        if sequence.images is not None:
            self.image_cache.begin(sequence.images.images)
        self.scheduler.submit(sequence)
        return sequence

    def prompt_images(self, tokens: list[int], images: Collection[ProcessedImage], what: str) -> PromptImages | None:
        """Return the images of a prompt, or None for text.

        Raises:
            RolloutError: the images do not match the placeholders or this model; the message starts with `what`.
        """
        image = self.model.args.image_format
        if image is None:
            if images:
                raise RolloutError(f"{what}: image_data needs a vision-language model; this is a text model")
            return None
        if not images and image.token not in tokens:
            return None
        # The n answers to a prompt are asked for one after another.
        if (last := self._last_images) is None or not last.matches_prompt(tokens, images):
            last = self._last_images = PromptImages.of(tokens, [*images], image, what)
        return last

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
        """Raise RolloutError if a longer answer would change the RoPE frequencies of cached keys."""
        longest = len(sequence.prompt) + sequence.limit
        for rope in self._length_dependent_ropes:
            scaling = rope.scaling
            bound = scaling.original_max_seq_len if scaling.kind == "longrope" else rope.max_seq_len
            assert bound is not None
            if longest <= bound or (scaling.kind == "longrope" and len(sequence.prompt) > bound):
                continue
            raise RolloutError(
                f"request {sequence.request.rid}: prompt and answer may reach {longest} tokens; beyond {bound} the"
                f" {scaling.kind} RoPE of this model changes the keys already cached; set max_tokens to {bound}"
            )

    @torch.inference_mode()
    def step(self) -> None:
        """Run one forward pass, sample a token for every ready sequence, and call `on_done` of finished ones.

        `DecodeStep` contributes the tokens of the previous step.
        """
        started = time.perf_counter()
        if self.device.type == "cpu":
            adjust_threads()
        # 1. Plan; a preemption must know all tokens.
        if self._unread is not None and not self.scheduler.fits():
            self._read_tokens()
        step = self.scheduler.plan()
        sampled = _SampleBatch()
        self._fork(step.forks, sampled)
        self._copy_forked(step.forks)
        # 2. Start the decode step, then read the tokens of the one before.
        previous, self._unread = self._unread, None
        if self._decode_step is not None:
            step = self._start_decode(self._decode_step, step, previous)
        if previous is not None:
            self._append_read(previous)
        # 3. Compute chunks of prompts and other sequences.
        if step.decode or step.chunks:
            self._forward(step, sampled)
        if sampled.sequences:
            self._sample(sampled)
        self.stats.steps += 1
        if self.stats.steps % _STEPS_BETWEEN_TRIMS == 0:
            heap.trim_heap_if_grown("generation")
        self.stats.seconds += time.perf_counter() - started

    def _start_decode(self, decode_step: DecodeStep, step: Step, previous: UnreadTokens | None) -> Step:
        """Start the decode step of the sequences that it supports; return the remaining step."""
        supported = [sequence for sequence in step.decode if decode_step.supports(sequence)]
        if supported:
            self._unread = decode_step.launch(supported, self.scheduler.page_table, previous)
            self.stats.decode_tokens += len(supported)
        return Step([s for s in step.decode if not decode_step.supports(s)], step.chunks, step.forks)

    def _read_tokens(self) -> None:
        """Wait for the tokens that are still on the device, and append them."""
        if self._unread is not None:
            unread, self._unread = self._unread, None
            self._append_read(unread)

    def _read_tokens_in_flight(self) -> None:
        """Read the tokens that were sampled with weights which are about to change."""
        try:
            self._read_tokens()
        except NotFiniteError as error:
            self.fail(error)

    def _append_read(self, unread: UnreadTokens) -> None:
        drawn = zip(unread.sequences, *unread.read(), strict=True)
        for row, (sequence, token, logprob) in enumerate(drawn):
            sequence.unread -= 1
            sequence.drawn = None
            if sequence.stop_reason is None:  # otherwise it ended after this step had started
                if not math.isfinite(logprob):
                    self._refuse_lora(sequence)
                    continue
                if unread.experts is not None:
                    sequence.record(sequence.total - 1, unread.experts[row : row + 1].numpy())
                self._append(sequence, token, logprob)

    def _append(self, sequence: Sequence, token: int, logprob: float, top_logprobs: TopLogprobs | None = None) -> None:
        """Append a sampled token, and finish the sequence if it is the last."""
        sequence.append(token, logprob, (sequence.lora or self).version, top_logprobs)
        # An image placeholder without an image: no token can follow.
        if token == self._image_token:
            sequence.stop_reason = "abort"
        if sequence.stop_reason is not None:
            self._finish(sequence)

    def _forward(self, step: Step, sampled: _SampleBatch) -> None:
        chunks = step.chunks
        decode, duplicates, duplicate_rows = _dedupe_rows(sorted(step.decode, key=_lora_key))
        lengths = np.array([sequence.total for sequence in decode], dtype=np.int64)
        tokens = [(sequence.output or sequence.prompt)[-1] for sequence in decode]
        prefill_chunks, image_chunks = [], []
        for chunk in chunks:
            sequence = chunk.sequence
            image_chunks.append((sequence.images, chunk.start, chunk.stop, len(tokens)))
            tokens += sequence.tokens(chunk.start, chunk.stop)
            prefill_chunks.append(
                PrefillChunk(chunk.start, chunk.stop - chunk.start, sequence.pages, sequence.total, sequence.state)
            )
            if sequence.images is not None:
                prefill_chunks[-1].positions = sequence.images.positions_between(chunk.start, chunk.stop)
        rows = _round_up(len(tokens))
        tokens += [0] * (rows - len(tokens))
        width = self.scheduler.pages_for(int(lengths.max(initial=1)))
        states = [np.array([sequence.state for sequence in some], dtype=np.int64) for some in (decode, duplicates)]
        decode_rows = DecodeRows(
            self._pages(decode, width),
            lengths,
            self._pages(duplicates, width),
            np.array(duplicate_rows),
            states[0],
            states[1],
            np.array([0 if s.images is None else s.images.offset for s in decode], dtype=np.int64),
        )
        meta = PagedAttention(self.cache, decode_rows, prefill_chunks, self.model.args.attn_type, rows)
        spans = [(sequence, 1) for sequence in decode]
        spans += [(chunk.sequence, chunk.stop - chunk.start) for chunk in chunks]
        meta.lora_mapping = self.lora_manager.rows([(sequence.lora, count) for sequence, count in spans], rows)
        ids, images = to_device_async(torch.tensor(tokens), self.device), self.image_cache.packed(image_chunks)
        hidden = self.model.hidden_states(ModelInputs(ids, meta.positions, meta, images))

        if self.recorder is not None:
            read = [*zip(range(len(decode)), decode, strict=True), *zip(duplicate_rows, duplicates, strict=True)]
            _record(self.recorder.experts(sum(count for _, count in spans)), read, len(decode), chunks)
        broken = [] if meta.lora_mapping is None else _nonfinite_sequences(spans, hidden, meta.overflowed)
        for sequence in step.decode:
            sequence.computed += 1
        first = len(decode)
        owners = [*enumerate(decode), *zip(duplicate_rows, duplicates, strict=True)]
        whole = [(row, sequence) for row, sequence in owners if decode[row] not in broken]
        sampled.add_rows([sequence for _, sequence in whole], hidden[:first], [row for row, _ in whole])
        forks = list[Fork]()
        for chunk in chunks:
            if chunk.sequence not in broken:
                forks += self._complete_chunk(chunk, hidden[first : first + chunk.stop - chunk.start], sampled)
            first += chunk.stop - chunk.start
        self._copy_forked(forks)
        for sequence in [*broken, *(sequence for row, sequence in owners[len(decode) :] if decode[row] in broken)]:
            self._refuse_lora(sequence)
        self.stats.decode_tokens += len(step.decode)
        self.stats.duplicate_tokens += len(duplicates)
        self.stats.prefill_tokens += first - len(decode)

    def _pages(self, sequences: list[Sequence], width: int) -> np.ndarray:
        """Return the first `width` pages of each sequence, int64 [n, width]."""
        return self.scheduler.page_table[[sequence.slot for sequence in sequences], :width]

    def _complete_chunk(self, chunk: ScheduledChunk, hidden: Tensor, sampled: _SampleBatch) -> list[Fork]:
        """Return the forks of the chunk's prompt, if it is the prompt's last."""
        last = len(chunk.sequence.prompt) - 1
        # A copy, because a view would keep the hidden states of the whole forward alive in the shared prompt.
        last_hidden = hidden[last - chunk.start].clone() if chunk.start <= last < chunk.stop else None
        forks = self.scheduler.complete_chunk(chunk, last_hidden)
        if chunk.sequence.computed == chunk.sequence.total:
            # The same tensor object that followers fork with, so that they share its row of logits.
            sampled.add(chunk.sequence, hidden[-1] if last_hidden is None or chunk.stop > last + 1 else last_hidden)
        self._fork(forks, sampled)
        return forks

    def _copy_forked(self, forks: list[Fork]) -> None:
        """Copy shared pages and states before forked sequences write to them, and save the states of shared prompts."""
        copies = [fork.copy for fork in forks if fork.copy is not None]
        for place in range(0, len(copies), _PAGES_COPIED_AT_ONCE):
            self.cache.copy_pages(*zip(*copies[place : place + _PAGES_COPIED_AT_ONCE], strict=True))
        if self.scheduler.state_copies:
            self.cache.states.copy(self.scheduler.state_copies)
            self.scheduler.state_copies.clear()

    def _fork(self, forks: list[Fork], sampled: _SampleBatch) -> None:
        for fork in forks:
            if fork.sequence.computed == fork.sequence.total:
                sampled.add(fork.sequence, fork.last_hidden)
        self.stats.shared_prompts += len(forks)

    def _sample(self, sampled: _SampleBatch) -> None:
        head = self.model.output
        assert head is not None
        hidden = torch.cat(sampled.hidden)
        if padding := _round_up(sampled.n_rows) - sampled.n_rows:
            hidden = F.pad(hidden, (0, 0, 0, padding))
        logits = head(hidden)[: sampled.n_rows]
        if sampled.rows != [*range(sampled.n_rows)]:
            logits = logits.index_select(0, to_device_async(torch.tensor(sampled.rows), self.device))
        block = max(1, MAX_SAMPLED_ELEMENTS // logits.shape[-1])
        for first, part in enumerate(logits.split(block)):
            sequences = sampled.sequences[first * block : first * block + block]
            tokens, logprobs = sample(part, _sampling_params(sequences))
            rows = sampled.rows[first * block : first * block + block]
            top_logprobs = self._top_logprobs(part, sequences)
            drawn = zip(sequences, rows, tokens.tolist(), logprobs.tolist(), strict=True)
            for place, (sequence, row, token, logprob) in enumerate(drawn):
                sequence.drawn = (self.stats.steps, row, token)
                self._append(sequence, token, logprob, top_logprobs.get(place))

    def _top_logprobs(self, logits: Tensor, sequences: list[Sequence]) -> dict[int, TopLogprobs]:
        """Return the most likely tokens of the rows of sequences that ask for them, by row of logits [R, V]."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.n_top_logprobs]
        if not rows:
            return {}
        counts = [sequences[row].n_top_logprobs for row in rows]
        temperatures = [sequences[row].request.gconfig.temperature for row in rows]
        best = most_likely(logits[rows], temperatures, max(counts))
        return {row: top[:count] for row, top, count in zip(rows, best, counts, strict=True)}

    def _refuse_lora(self, sequence: Sequence) -> None:
        assert sequence.lora is not None
        sequence.stop_reason = "abort"
        sequence.error = NotFiniteError(
            f"LoRA {sequence.lora.name!r:.200} produces non-finite values; check its weights"
        )
        self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = time.perf_counter()
        if sequence.lora is not None:
            sequence.lora.answer_tokens += len(sequence.output)
            self.lora_manager.end(sequence.lora)
        if sequence.images is not None:
            self.image_cache.end(sequence.images.images)
        sequence.on_done(sequence)

    @property
    def unfinished(self) -> list[Sequence]:
        """Sequences that are waiting or running."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    def abort(self, sequences: list[Sequence]) -> None:
        """End unfinished sequences with the tokens sampled so far."""
        for sequence in sequences:
            sequence.stop_reason = "abort"
            self._finish(sequence)

    def fail(self, error: BaseException) -> None:
        """End all unfinished sequences with `error`, and clear the scheduler and the cache."""
        if not isinstance(error, Exception):
            # A KeyboardInterrupt raised in every waiting task would interrupt their event loop once for each.
            error = RuntimeError(f"generation was stopped by {type(error).__name__}")
        failed = self.unfinished
        self.scheduler = self._new_scheduler()
        # The failed step may have left NaN in the cache, and masked NaN is still NaN.
        self.cache.clear()
        self._decode_step, self._unread = self._new_decode_step(), None
        for sequence in failed:
            sequence.stop_reason, sequence.error = "abort", error
            self._end(sequence)

    def replace_lora(self, name: str, weights: LoRAWeights, version: int | None) -> None:
        """Replace the weights of a LoRA in place, see `LoRAManager.replace`.

        Its unfinished sequences are recomputed with the new weights; other sequences are not affected.
        """
        self._read_tokens_in_flight()
        self.scheduler.restart(self.lora_manager.replace(name, weights, version))

    def restart(self, version: int) -> None:
        """Invalidate the cache after the weights have changed; tokens sampled from now on have `version`.

        Unfinished sequences keep their tokens, logprobs and versions; their keys and values are recomputed with the new
        weights, so that the following tokens are sampled from exactly the new policy.
        """
        self._read_tokens_in_flight()
        if self._decode_step is not None:
            self._decode_step.drop_stale_graphs()
        self.scheduler.restart()
        self.image_cache.clear()
        self.version = version
