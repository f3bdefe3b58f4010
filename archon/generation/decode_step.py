"""Decode step over buffers at fixed addresses: one CUDA graph computes and samples a token for every sequence.

The step takes its input tokens from the device, where the last step sampled them. The host starts step n + 1 before it
reads the tokens of step n, so the device never waits for the host. A sequence that has ended on the device computes one
token more, and the host discards it. Its pages are freed safely: kernels run in order, so later ones write after it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from archon.generation.expert_record import Recorder
from archon.generation.lora import LoRASlots
from archon.generation.sampler import (
    MAX_SAMPLED_ELEMENTS,
    DeviceSamplingParams,
    counter_uniform,
    require_finite,
    sample_on_device,
)
from archon.generation.sequence import Sequence
from archon.models.attention.decode.paged_cache import PagedCache
from archon.models.attention.decode.static import StaticPagedAttention
from archon.models.attention.packed.documents import PackedDocuments, cu_seqlens_from_lengths
from archon.models.base import BaseArchonModel, ModelInputs
from archon.models.layers.moe import GroupedExperts
from archon.models.lora.mapping import LoRAMapping
from archon.parallel.transfer import to_device_async

# Maximum number of stop tokens that a sequence can ban until it has `min_new_tokens`.
_MAX_BANNED = 16

# Runs before a capture: libraries allocate their workspaces, and Triton compiles.
_WARMUP_RUNS = 2

# Compute capabilities on which grouped matmuls read no group sizes on the host.
_GROUPED_MM_CAPABILITIES = (9, 10)

Sampling = Literal["greedy", "sampled", "filtered"]
"""Most expensive sampling among a step's rows: argmax, from the full vocabulary, or with top-k or top-p."""


class StepKind(NamedTuple):
    """Kind of a step; each has its own graph.

    Attributes:
        n_rows: number of rows.
        sampling: most expensive sampling among them.
        has_lora: whether a row has a LoRA. Steps without one do not compute the products of LoRAs.
    """

    n_rows: int
    sampling: Sampling
    has_lora: bool


_ROW = np.dtype(
    [
        ("source", np.int64),  # row of the previous step that sampled the input token; −1: use `token`
        ("token", np.int64),  # input token, if the host has read it
        ("length", np.int64),  # tokens of the sequence, including the input token
        ("offset", np.int64),  # M-RoPE position minus token index
        ("state", np.int64),  # slot of its recurrent state
        ("lora", np.int64),  # slot of its LoRA; the number of slots for none
        ("greedy", np.int64),
        ("top_k", np.int64),
        ("bans", np.int64),  # whether `banned` must not be sampled
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("uniform", np.float64),  # random number of the draw
        ("banned", np.int64, (_MAX_BANNED,)),  # token ids; the last one is repeated
    ]
)


def round_up_rows(count: int) -> int:
    """Return the smallest 2^k or 3 · 2^k that is at least `count`, so that few graphs serve all batch sizes."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 and power > 2 else power


@dataclass(frozen=True, eq=False)
class UnreadTokens:
    """Sampled tokens of a step that the host has not read yet.

    Attributes:
        sequences: the sequence of each row.
        results: float64 [2, rows] on the CPU, tokens and logprobs; float64 has every token and logprob exactly.
        experts: [rows, L, k] on the CPU, the routed experts of the input tokens, if they are recorded.
        copied: event after the copy of `results` and `experts`; None on a CPU.
    """

    sequences: list[Sequence]
    results: Tensor
    experts: Tensor | None
    copied: torch.cuda.Event | None

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for the step, and return token and logprob of each sequence. Afterwards `experts` is valid too.

        If the LoRA of a sequence produces non-finite values, the logprob of its token is not finite.

        Raises:
            NotFiniteError: the model itself produces non-finite values.
        """
        if self.copied is not None:
            self.copied.synchronize()
        tokens, logprobs = self.results[:, : len(self.sequences)]
        has_lora = torch.tensor([sequence.lora is not None for sequence in self.sequences])
        require_finite(logprobs.masked_fill(has_lora, 0))
        return tokens.long().tolist(), logprobs.tolist()


class DecodeStep:
    """Decode step of up to `max_slots` sequences; on CUDA, one graph per number of rows.

    Args:
        model: actor in evaluation mode.
        cache: pool with a scratch page and state, which padding rows write to.
        max_slots: maximum number of sequences.
        max_seq_len: maximum tokens of a sequence.
        lora_slots: slots of the LoRAs that sequences may have.
    """

    def __init__(
        self, model: BaseArchonModel, cache: PagedCache, max_slots: int, max_seq_len: int, lora_slots: LoRASlots
    ) -> None:
        self.model, self.cache, self.device = model, cache, cache.device
        self._lora_slots, self._lora_moves = lora_slots, lora_slots.moves
        n_rows, width = round_up_rows(max_slots), -(-max_seq_len // cache.page_size)
        self.captures = self.device.type == "cuda" and not _reads_group_sizes(model)
        self._rows = torch.zeros(n_rows, _ROW.itemsize // 8, dtype=torch.int64, device=self.device)
        self._pages = torch.zeros(n_rows, width, dtype=torch.int64, device=self.device)
        self._tokens = torch.zeros(n_rows, dtype=torch.int64, device=self.device)
        self._results = torch.zeros(2, n_rows, dtype=torch.float64, device=self.device)
        self._recorder: Recorder | None = None
        self._experts: dict[int, Tensor] = {}  # [rows, L, k] of the last step of this number of rows
        self._documents: dict[int, PackedDocuments] = {}
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self._addresses = self._find_addresses()
        self._pool: Any = None  # memory of all graphs

    @staticmethod
    def supports_model(model: BaseArchonModel, dtype: torch.dtype) -> bool:
        """Return whether the step supports this model: RoPE independent of length, and on CUDA no float64."""
        is_cpu = next(model.parameters()).is_cpu
        return not model.args.rope_depends_on_length and (is_cpu or dtype != torch.float64)

    @staticmethod
    def supports(sequence: Sequence) -> bool:
        """Return whether the step supports this sequence; if not, `Generator` decodes it next to prompt chunks."""
        bans = len(sequence.output) < sequence.min_new_tokens and len(sequence.stop_ids) > _MAX_BANNED
        reads_logits = sequence.changes is not None or sequence.n_top_logprobs
        return not bans and not reads_logits

    def record_experts(self, recorder: Recorder) -> None:
        """Copy the routed experts of all further steps to the host."""
        self._recorder = recorder
        self._keep_graphs({})

    def launch(self, sequences: list[Sequence], page_table: np.ndarray, previous: UnreadTokens | None) -> UnreadTokens:
        """Start the step of `sequences`, without waiting for it.

        Args:
            sequences: sequences with exactly one token that is not cached.
            page_table: int64 [max_slots, width], the pages of each scheduler slot.
            previous: tokens of the previous step, if the host has not read them.
        """
        # 1. Describe the rows. `source` refers to tokens that the host has not read.
        n_rows = round_up_rows(len(sequences))
        source = {} if previous is None else {s: row for row, s in enumerate(previous.sequences) if s.unread}
        rows = np.concatenate([self._describe(sequences, source), self._padding(n_rows - len(sequences))])
        width = -(-int(rows["length"].max()) // self.cache.page_size)
        pages = np.full((n_rows, width), self.cache.n_pages)
        pages[: len(sequences)] = page_table[[sequence.slot for sequence in sequences], :width]
        greedy, filtered = rows["greedy"].all(), ((rows["top_k"] > 0) | (rows["top_p"] < 1)).any()
        sampling: Sampling = "greedy" if greedy else "filtered" if filtered else "sampled"
        kind = StepKind(n_rows, sampling, any(sequence.lora is not None for sequence in sequences))
        # 2. Send them and run the step.
        if kind.has_lora and self._lora_moves != self._lora_slots.moves:
            self._keep_graphs({kind: graph for kind, graph in self._graphs.items() if not kind.has_lora})
            self._lora_moves = self._lora_slots.moves
        if self.captures and kind not in self._graphs:
            self._capture(kind)
        self._send(rows, pages)
        if self.captures:
            self._graphs[kind].replay()
        else:
            self._run(kind)
        # 3. Start the copy of its results to the host.
        results = self._results[:, :n_rows].to("cpu", non_blocking=True, copy=True)
        experts = None
        if self._recorder is not None:
            experts = self._experts[n_rows].to("cpu", non_blocking=True, copy=True)
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        for sequence in sequences:
            sequence.unread += 1
            sequence.computed += 1
        return UnreadTokens(sequences, results, experts, copied)

    def drop_stale_graphs(self) -> None:
        """Drop captured graphs if the weights have moved. Weights that were updated in place keep them."""
        if (addresses := self._find_addresses()) != self._addresses:
            self._keep_graphs({})
            self._addresses = addresses

    def _keep_graphs(self, graphs: dict[StepKind, torch.cuda.CUDAGraph]) -> None:
        self._graphs = graphs
        if not graphs:
            self._pool = None  # a pool without graphs cannot be captured into again

    def _describe(self, sequences: SequenceOf[Sequence], source: dict[Sequence, int]) -> np.ndarray:
        """Return the `_ROW` of each sequence; `source` are the rows of the previous step with unread tokens."""
        rows = np.zeros(len(sequences), dtype=_ROW)
        rows["source"] = [source.get(s, -1) for s in sequences]
        rows["token"] = [(s.output or s.prompt)[-1] for s in sequences]
        rows["length"] = [s.total + s.unread for s in sequences]
        rows["offset"] = [0 if s.images is None else s.images.offset for s in sequences]
        rows["state"] = [s.state for s in sequences]
        rows["lora"] = [self._lora_slots.count if s.lora is None else s.lora.slot for s in sequences]
        temperature, greedy, top_p, top_k, seed = zip(*(s.sampling for s in sequences), strict=True)
        rows["temperature"], rows["greedy"], rows["top_p"], rows["top_k"] = temperature, greedy, top_p, top_k
        index = np.array([len(s.output) + s.unread for s in sequences], dtype=np.uint64)
        rows["uniform"] = counter_uniform(np.array(seed, dtype=np.uint64), index)
        for row, sequence in enumerate(sequences):
            if sequence.stop_ids and len(sequence.output) + sequence.unread < sequence.min_new_tokens:
                ids = sorted(sequence.stop_ids)
                rows["bans"][row], rows["banned"][row] = 1, ids + ids[-1:] * (_MAX_BANNED - len(ids))
        return rows

    def _padding(self, count: int) -> np.ndarray:
        """Return rows of a sequence of one token, in the scratch page and state."""
        rows = np.zeros(count, dtype=_ROW)
        rows["source"], rows["length"], rows["state"] = -1, 1, self.cache.states.n_slots
        rows["lora"] = self._lora_slots.count
        rows["greedy"], rows["temperature"], rows["top_p"] = 1, 1, 1
        return rows

    def _send(self, rows: np.ndarray, pages: np.ndarray) -> None:
        words = torch.from_numpy(rows.view(np.int64).reshape(len(rows), -1))
        self._rows[: len(rows)].copy_(to_device_async(words, self.device))
        self._pages[: len(pages), : pages.shape[1]].copy_(to_device_async(torch.from_numpy(pages), self.device))

    def _capture(self, kind: StepKind) -> None:
        """Capture a step, after warm-up runs of padding, which change no sequence."""
        tokens = self._tokens.clone()
        self._send(self._padding(kind.n_rows), np.full((kind.n_rows, 1), self.cache.n_pages))
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARMUP_RUNS):
                self._run(kind)
        current.wait_stream(side)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._run(kind)
        self._graphs[kind] = graph
        self._tokens.copy_(tokens)

    def _run(self, kind: StepKind) -> None:
        """Compute the step of the first rows; it reads and writes buffers only."""
        n_rows = kind.n_rows
        row = {name: self._rows[:n_rows, column] for column, name in enumerate(_ROW.names or ())}
        # 1. Take the input tokens from the host or from the previous step.
        sampled = self._tokens.index_select(0, row["source"].clamp(min=0))
        tokens = torch.where(row["source"] >= 0, sampled, row["token"])
        # 2. Run the model over the pages.
        attention = StaticPagedAttention(
            self.cache, self._pages[:n_rows], row["length"], row["state"], self._one_token_documents(n_rows)
        )
        if kind.has_lora:
            attention.lora_mapping = LoRAMapping.on_device(self._lora_slots.names, row["lora"])
        positions = row["length"] - 1 + row["offset"]
        hidden = self.model.hidden_states(ModelInputs(tokens, positions, attention))
        if self._recorder is not None:
            experts = self._recorder.on_device(n_rows)
            self._experts.setdefault(n_rows, torch.empty_like(experts)).copy_(experts)
        # 3. Compute the logits and sample from them, in parts of bounded memory.
        head = self.model.output
        assert head is not None
        params = DeviceSamplingParams(
            temperature=row["temperature"].view(torch.float64),
            greedy=row["greedy"].bool(),
            top_p=row["top_p"].view(torch.float64),
            top_k=row["top_k"],
            uniform=row["uniform"].view(torch.float64),
            bans=row["bans"].bool(),
            banned=self._rows[:n_rows, -_MAX_BANNED:],
        )
        wrong = None
        if kind.has_lora:
            wrong = ~hidden.isfinite().all(1)
            if (overflowed := attention.overflowed) is not None:
                wrong |= overflowed
        logits = head(hidden)
        block = max(1, MAX_SAMPLED_ELEMENTS // logits.shape[1])
        for place in range(0, n_rows, block):
            part = slice(place, min(place + block, n_rows))
            new, logprobs = sample_on_device(logits[part], params.rows(part), kind.sampling)
            if wrong is not None:
                logprobs = logprobs.masked_fill(wrong[part], torch.nan)
            # 4. Keep the tokens for the next step, and tokens and logprobs for the host.
            self._tokens[part].copy_(new)
            self._results[0, part].copy_(new)
            self._results[1, part].copy_(logprobs)

    def _one_token_documents(self, n_rows: int) -> PackedDocuments:
        if n_rows not in self._documents:
            lengths = (1,) * n_rows
            self._documents[n_rows] = PackedDocuments(cu_seqlens_from_lengths(lengths, self.device), 1, lengths)
        return self._documents[n_rows]

    def _find_addresses(self) -> list[int]:
        return [x.data_ptr() for x in (*self.model.parameters(), *self.model.buffers())] if self.captures else []


def _reads_group_sizes(model: BaseArchonModel) -> bool:
    """Return whether grouped matmuls of the model's experts read the group sizes on the host."""
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    if not experts:
        return False
    fast = torch.cuda.get_device_capability()[0] in _GROUPED_MM_CAPABILITIES
    aligned = all(width % 8 == 0 for module in experts for width in module.w3.shape[1:])
    return not (fast and aligned and all(module.w3.dtype == torch.bfloat16 for module in experts))
