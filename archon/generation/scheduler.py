"""Scheduler of sequences: admission in order of submission, shared prompts, preemption when pages run out.

The scheduler handles sequences and page numbers only; the generator computes with tensors.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from archon.generation.lora import ServedLoRA
from archon.generation.sequence import Sequence, SharedPrompt


@dataclass
class ScheduledChunk:
    """Tokens start … stop − 1 of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    stop: int


@dataclass
class Fork:
    """A sequence starts from the cached pages of a shared prompt; `copy` is for a last page that is partly full."""

    sequence: Sequence
    last_hidden: Any  # [dim] hidden state of the prompt's last token
    copy: tuple[int, int] | None  # (source page, destination page)


@dataclass
class Step:
    """The work of one forward: one token for each of `decode`, then `chunks`. `forks` are applied before it."""

    decode: list[Sequence]
    chunks: list[ScheduledChunk]
    forks: list[Fork]


class BlockPool:
    """Reference-counted page numbers 0 … n_pages − 1; the lowest free ones are taken first, to keep pages together."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._free = list(range(n_pages))
        self._references = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` free pages, now with one reference each; the caller must have checked `n_free`."""
        assert count <= len(self._free), f"{count} pages requested, {len(self._free)} free"
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Release a reference of each of `pages`; pages without references become free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)


class Scheduler:
    """Scheduler of at most `max_slots` running sequences over a pool of pages.

    When pages run out, prompts kept for waiting requests are dropped first, then the youngest sequences are preempted:
    they keep their tokens, return to the head of the queue, and their keys and values are recomputed later. The oldest
    running sequence can therefore always continue, provided that every request fits alone (`Generator.submit` checks).

    In a model with a recurrent state per sequence, each running sequence has one of `n_states` slots, at least one more
    than `max_slots`; a shared prompt takes another slot if one is free. `state_copies` are the (source, target) slots
    to copy before the next forward.
    """

    def __init__(self, n_pages: int, page_size: int, max_slots: int, prefill_tokens: int, n_states: int = 0) -> None:
        self.pool = BlockPool(n_pages)
        self.states = BlockPool(n_states) if n_states else None
        self.state_copies: list[tuple[int, int]] = []
        self.page_size, self.prefill_tokens = page_size, prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.prompts: dict[tuple[ServedLoRA | None, tuple[int | str, ...]], SharedPrompt] = {}
        self._free_slots = list(range(max_slots - 1, -1, -1))
        # Row `slot` starts with the pages of the sequence in that slot; columns are added for longer sequences.
        self.page_table = np.zeros((max_slots, 8), dtype=np.int64)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages of this number of tokens."""
        return -(-tokens // self.page_size)

    def submit(self, sequence: Sequence) -> None:
        """Append a sequence to the queue."""
        self.waiting.append(sequence)
        if len(sequence.prompt) > 1:
            sequence.shared = self.prompts.setdefault(sequence.prompt_key, SharedPrompt())
            sequence.shared.users += 1

    def plan(self) -> Step:
        """Assign pages for the next tokens, admit waiting sequences that fit, and choose chunks. Returns the step."""
        self._grow()
        forks = self._admit()
        decode, chunks = [], []
        budget = self.prefill_tokens
        for sequence in self.running:
            if sequence.waits_for_prompt or (sequence.unread and sequence.ends_unread):
                continue
            pending = sequence.total + sequence.unread - sequence.computed
            if pending == 1 and not sequence.is_leader:
                decode.append(sequence)
            elif pending and budget:
                length = min(pending, budget)
                if self.states is not None and sequence.is_leader:
                    # Others fork from the state after the prompt, which the next token changes.
                    length = min(length, len(sequence.prompt) - sequence.computed)
                budget -= length
                chunks.append(ScheduledChunk(sequence, sequence.computed, sequence.computed + length))
        return Step(decode, chunks, forks)

    def complete_chunk(self, chunk: ScheduledChunk, last_hidden: Any) -> list[Fork]:
        """Mark a chunk as computed and return the forks of sequences that waited for its prompt.

        Args:
            chunk: the computed chunk.
            last_hidden: hidden state [dim] of the prompt's last token; None if the chunk does not contain it.
        """
        sequence, prompt = chunk.sequence, chunk.sequence.shared
        sequence.computed = chunk.stop
        if prompt is None or not sequence.is_leader or chunk.stop < len(sequence.prompt):
            return []
        prompt.leader, prompt.last_hidden = None, last_hidden
        prompt.pages = sequence.pages[: self.pages_for(len(sequence.prompt))]
        self.pool.retain(prompt.pages)
        followers, prompt.followers = prompt.followers, []
        forks = [self._fork(follower, prompt, sequence.state) for follower in followers]
        if self.states is not None:
            if not self.states.n_free:
                self._drop_pages(prompt)  # without its state nothing can start from them
                return forks
            (prompt.state,) = self.states.take(1)
            self.state_copies.append((sequence.state, prompt.state))
        return forks

    def finish(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence."""
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        prompt = sequence.shared
        if prompt is not None:
            prompt.users -= 1
            if prompt.users == 0:
                self._drop_pages(prompt)
                del self.prompts[sequence.prompt_key]

    def restart(self, lora: ServedLoRA | None = None) -> None:
        """Invalidate the cached keys and values of all sequences, or of the sequences with one LoRA.

        The running ones return to the queue with their tokens.
        """
        for sequence in self.running[::-1]:
            if lora in (None, sequence.lora):
                self._requeue(sequence)
        for (owner, _), prompt in self.prompts.items():
            if lora in (None, owner):
                self._drop_pages(prompt)

    def fits(self) -> bool:
        """Return whether `plan` finds pages for every running sequence without a preemption."""
        return sum(map(self._missing_pages, self._short())) <= self.pool.n_free

    def _short(self) -> list[Sequence]:
        """Return the running sequences with too few pages for their next token."""
        size = self.page_size
        short = [s for s in self.running if s.total + s.unread > len(s.pages) * size and not s.waits_for_prompt]
        return [s for s in short if not s.ends_unread]

    def _missing_pages(self, sequence: Sequence) -> int:
        return self.pages_for(sequence.total + sequence.unread) - len(sequence.pages)

    def _grow(self) -> None:
        for sequence in self._short():
            missing = self._missing_pages(sequence)
            if sequence.slot >= 0 and self._free_pages(missing, sequence):
                self._set_pages(sequence, sequence.pages + self.pool.take(missing))

    def _set_pages(self, sequence: Sequence, pages: list[int]) -> None:
        sequence.pages = pages
        width = self.page_table.shape[1]
        if len(pages) > width:
            self.page_table = np.pad(self.page_table, ((0, 0), (0, max(width, len(pages) - width))))
        self.page_table[sequence.slot, : len(pages)] = pages

    def _free_pages(self, count: int, sequence: Sequence) -> bool:
        """Free `count` pages for `sequence`; return False if the sequence itself was preempted."""
        if self.pool.n_free < count:
            for prompt in self.prompts.values():
                self._drop_pages(prompt)
        while self.pool.n_free < count:
            youngest = self.running[-1]
            self._requeue(youngest)
            if youngest is sequence:
                return False
        return True

    def _admit(self) -> list[Fork]:
        forks: list[Fork] = []
        if not self.waiting or not self._free_slots:
            return forks
        # Keep one page for each running sequence that may grow, or a newly admitted one would soon be preempted.
        spare = sum(self._may_grow(sequence) for sequence in self.running)
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            prompt, shared = sequence.shared, 0
            if self.states is not None and not self.states.n_free:
                for other in self.prompts.values():
                    if other is not prompt:
                        self._drop_pages(other)
            if prompt is not None and (prompt.leader is not None or prompt.last_hidden is not None):
                shared = len(sequence.prompt) // self.page_size
            needed = self.pages_for(sequence.total) - shared
            if self.running and self.pool.n_free < needed + spare:
                break
            if not self.running and self.pool.n_free < needed:
                for other in self.prompts.values():
                    self._drop_pages(other)
                continue
            self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self._set_pages(sequence, self.pool.take(needed))
            if self.states is not None:
                (sequence.state,) = self.states.take(1)
            self.running.append(sequence)
            spare += self._may_grow(sequence, shared)
            if prompt is None:
                continue
            if prompt.last_hidden is not None:
                forks.append(self._fork(sequence, prompt, prompt.state))
            elif prompt.leader is not None:
                sequence.waits_for_prompt = True
                prompt.followers.append(sequence)
            else:
                prompt.leader = sequence
        return forks

    def _may_grow(self, sequence: Sequence, shared: int = 0) -> bool:
        """Return whether a sequence may need more pages than it has and shares with its prompt."""
        return (len(sequence.pages) + shared) * self.page_size < sequence.max_cached

    def _fork(self, sequence: Sequence, prompt: SharedPrompt, state: int) -> Fork:
        """Prepend the full pages of the prompt, which are never written again, and return the fork.

        `state` is a slot with the state after the prompt.
        """
        if self.states is not None:
            self.state_copies.append((state, sequence.state))
        length = len(sequence.prompt)
        full = length // self.page_size
        copy = (prompt.pages[full], sequence.pages[0]) if length % self.page_size else None
        self.pool.retain(prompt.pages[:full])
        self._set_pages(sequence, prompt.pages[:full] + sequence.pages)
        sequence.computed = length
        sequence.waits_for_prompt = False
        if prompt.experts is not None:
            sequence.record(0, prompt.experts.first(length))
        return Fork(sequence, prompt.last_hidden, copy)

    def _requeue(self, sequence: Sequence) -> None:
        assert not sequence.unread, "the host reads all tokens before a preemption and a restart"
        self._leave(sequence)
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a running sequence."""
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self.pool.release(sequence.pages)
        if self.states is not None:
            self.states.release([sequence.state])
        sequence.slot, sequence.pages, sequence.state, sequence.computed = -1, [], -1, 0
        prompt = sequence.shared
        if prompt is None:
            return
        if sequence.waits_for_prompt:
            prompt.followers.remove(sequence)
            sequence.waits_for_prompt = False
        if sequence.is_leader:
            # The prompt is no longer being computed: its followers are queued again, and the first becomes the leader.
            prompt.leader = None
            for follower in prompt.followers[::-1]:
                self._requeue(follower)

    def _drop_pages(self, prompt: SharedPrompt) -> None:
        self.pool.release(prompt.pages)
        if self.states is not None and prompt.state >= 0:
            self.states.release([prompt.state])
        prompt.pages, prompt.state, prompt.last_hidden = [], -1, None
