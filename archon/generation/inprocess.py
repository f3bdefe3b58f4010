"""The default inference engine: generation in the trainer's process, on its device."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch

from archon.checkpoint.chat_template import stop_token_ids
from archon.checkpoint.peft.export import LoRAWeights
from archon.generation.decode_step import DecodeStep
from archon.generation.generator import Generator, GeneratorStats
from archon.generation.lora import ServedLoRA
from archon.generation.prompt_scores import PromptScores, score_prompt
from archon.generation.replica import (
    WeightMode,
    WeightSource,
    allocate_weights,
    build_replica,
    copy_weights,
    fingerprint,
    pushed_tensors,
    share_weights,
)
from archon.generation.sequence import Sequence
from archon.generation.types import ModelRequest, ModelResponse, integer_ids
from archon.models.attention.decode.paged_cache import PagedCache
from archon.models.base import BaseArchonModel
from archon.models.vision.images import ProcessedImage
from archon.schema.errors import ContextOverflowError, ResourceExhaustedError, RolloutError, UserError
from archon.schema.exhausted import resource_error_message

logger = logging.getLogger(__name__)

REPLICA_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
SCORING_TRIES = 3
"""Number of tries in a thread. If the weights change during each of them, the event loop computes the scores."""
LONG_STEP_SECONDS = 0.02
"""Seconds after which a step is long: other tasks of the event loop get several turns after it."""
TURNS_AFTER_LONG_STEP = 16
"""Turns of the event loop after a long step. A server needs about six to accept and answer a small request."""
_DEFAULT_MEMORY_FRACTION = 0.25  # maximum share of the free memory for a cache of unspecified size


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RolloutError("/proc/meminfo has no MemAvailable line; expected one, to size the generator's cache")


def n_state_slots(max_slots: int) -> int:
    """Return the slots for states, in models that have them: one more than sequences, for a shared prompt."""
    return max_slots + 1


def choose_page_count(
    model: BaseArchonModel,
    dtype: torch.dtype,
    device: torch.device,
    max_slots: int,
    max_seq_len: int,
    page_size: int,
    n_pages: int | None,
    cache_bytes: int | None,
) -> int:
    """Return the number of pages of the cache.

    Raises RolloutError with the estimate if the cache and a copy of the weights exceed the free memory.
    """
    caches = [layer.mixer.cache for layer in model.layer_specs]
    page_bytes = sum(cache.token_features for cache in caches) * page_size * dtype.itemsize
    state_bytes = sum(cache.sequence_bytes(dtype.itemsize) for cache in caches) * n_state_slots(max_slots)
    weight_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    free = free_memory(device)
    if n_pages is None:
        budget = int(free * _DEFAULT_MEMORY_FRACTION) if cache_bytes is None else cache_bytes
        n_pages = min(max_slots * -(-max_seq_len // page_size), (budget - state_bytes) // max(page_bytes, 1))
    if n_pages < 1:
        raise RolloutError(
            f"the key-value cache has no page: one of {page_size} tokens takes {page_bytes} bytes"
            + (f" next to {state_bytes} of the states of {max_slots} sequences" if state_bytes else "")
            + "; free memory or reduce them"
            + (", or fewer max_slots" if state_bytes else "")
        )
    cache_bytes = state_bytes + n_pages * page_bytes
    if weight_bytes + cache_bytes > free:
        raise RolloutError(
            f"the generator does not fit: {weight_bytes / 2**30:.2f} GiB of weights and"
            f" {cache_bytes / 2**30:.2f} GiB of cache ({n_pages} pages of {page_size} tokens) are needed,"
            f" {free / 2**30:.2f} GiB are free; give it fewer pages, or a narrower dtype"
        )
    return n_pages


class InProcessEngine:
    """An `InferenceEngine` that runs a replica of the trainer's model. Build one with `from_model`.

    One task on the caller's event loop runs all requests, and yields to other tasks after each step of the model. All
    requests of tasks that start together are therefore queued before the first step, and admitted in order of
    submission: with a seed, synchronous runs are deterministic. The task ends when no request is left. Use an engine
    from one thread only; `generate` needs no event loop.

    Attributes:
        static_decode: use `DecodeStep` if it supports the model; None: on CUDA only.
    """

    static_decode: ClassVar[bool | None] = None

    def __init__(self, generator: Generator, *, aliased: bool = False) -> None:
        self._generator, self._aliased = generator, aliased
        self._paused = False
        self._damaged: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._fingerprint: int | None = None
        self._updates = 0  # begun updates of the weights
        self._scorer: ThreadPoolExecutor | None = None

    @classmethod
    def from_model(
        cls,
        model: BaseArchonModel,
        tokenizer: Any = None,
        *,
        max_slots: int = 256,
        page_size: int = 32,
        n_pages: int | None = None,
        cache_bytes: int | None = None,
        max_seq_len: int | None = None,
        prefill_tokens: int = 8192,
        seed: int = 0,
        eos_token_ids: SequenceOf[int] | None = None,
        weights: WeightMode = "auto",
        dtype: torch.dtype | None = None,
        version: int = 0,
        source: Iterable[tuple[str, torch.Tensor]] | None = None,
        device: torch.device | None = None,
    ) -> InProcessEngine:
        """Build the replica and its cache, and return the engine.

        Args:
            model: trainer's model, possibly wrapped or sharded; this engine never runs it.
            tokenizer: for stop strings, and for the ids that end an answer if `eos_token_ids` is None.
            max_slots: maximum number of concurrently decoded answers.
            page_size: tokens per page (block) of the KV cache.
            n_pages: pages of the cache; by default enough for `max_slots` answers of `max_seq_len` tokens, but at most
                a quarter of the free memory.
            cache_bytes: size of the cache in bytes, instead of `n_pages`.
            max_seq_len: maximum tokens of prompt and answer together; by default the model's.
            prefill_tokens: maximum prompt tokens computed in one step.
            seed: seed of requests without a seed.
            eos_token_ids: ids that end an answer; by default `stop_token_ids(tokenizer)`, or none without a tokenizer.
            weights: see `build_replica`.
            dtype: dtype of replica and cache; by default the model's.
            version: initial version of the weights.
            source: (native name, full tensor) of every weight, for a `model` on the meta device, if no process holds
                the full model.
            device: device of the replica; by default the model's.

        Raises:
            RolloutError: an argument is out of range, or replica and cache do not fit in memory.
        """
        args = model.args
        if args.is_critic:
            raise RolloutError("the model is a critic, which has no language-model head; expected an actor")
        for name, value in (("max_slots", max_slots), ("page_size", page_size), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise RolloutError(f"{name} is {value}; expected at least 1")
        if dtype is not None and dtype not in REPLICA_DTYPES:
            raise RolloutError(f"dtype is {dtype!r}; expected torch.float64, float32, float16 or bfloat16")
        if weights not in get_args(WeightMode):
            raise RolloutError(f"weights is {weights!r}; expected one of {', '.join(get_args(WeightMode))}")
        if eos_token_ids is None:
            eos_token_ids = () if tokenizer is None else stop_token_ids(tokenizer)
        max_seq_len = max_seq_len or args.max_seq_len
        parameter = next(model.parameters())
        cache_dtype = dtype or parameter.dtype
        n_pages = choose_page_count(
            model, cache_dtype, device or parameter.device, max_slots, max_seq_len, page_size, n_pages, cache_bytes
        )
        replica, aliased = build_replica(model, mode=weights, dtype=dtype, source=source, device=device)
        device = next(replica.parameters()).device
        specs = [spec.mixer.cache for spec in model.layer_specs]
        static_decode = device.type == "cuda" if cls.static_decode is None else cls.static_decode
        static_decode = static_decode and DecodeStep.supports_model(replica, cache_dtype)
        cache = PagedCache(
            specs,
            n_pages,
            page_size,
            cache_dtype,
            device,
            n_states=n_state_slots(max_slots),
            scratch=int(static_decode),
        )
        generator = Generator(
            replica,
            cache,
            max_slots=max_slots,
            max_seq_len=max_seq_len,
            prefill_tokens=prefill_tokens,
            seed=seed,
            eos_token_ids=tuple(eos_token_ids),
            tokenizer=tokenizer,
            static_decode=static_decode,
        )
        generator.version = version
        return cls(generator, aliased=aliased)

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._generator.version

    def get_version(self) -> int:
        """Return the version of the current weights."""
        return self.version

    @property
    def max_seq_len(self) -> int:
        """The most tokens of prompt and answer together."""
        return self._generator.max_seq_len

    @property
    def unfinished(self) -> int:
        """The number of requests that have no answer yet."""
        return len(self._generator.unfinished)

    @property
    def model(self) -> BaseArchonModel:
        """The replica: an unsharded model with the weights used for generation."""
        return self._generator.model

    @property
    def stats(self) -> GeneratorStats:
        """Counters since the engine was built."""
        return self._generator.stats

    @property
    def fingerprint(self) -> int:
        """Fingerprint of the current weights, comparable with `replica.fingerprint` of the trainer's weights.

        For a model with LoRA it covers only the LoRA.
        """
        if self._fingerprint is None:
            self._fingerprint = fingerprint(pushed_tensors(self._generator.model).items())
        return self._fingerprint

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return the answer to a request. Canceling the caller aborts the request."""
        return (await self._answer([req]))[0]

    async def agenerate_batch(self, requests: SequenceOf[ModelRequest]) -> list[ModelResponse]:
        """Return the answers to requests in their order, once all are done, with a single wait.

        If the caller is canceled or a request is refused, all requests are aborted; a refusal is raised.
        """
        return await self._answer(requests)

    async def _answer(self, requests: SequenceOf[ModelRequest]) -> list[ModelResponse]:
        self._check_usable()
        loop = asyncio.get_running_loop()
        if self._loop is not loop and self._is_running():
            raise RolloutError("the engine still has requests of another event loop; wait for them or abort them")
        done: asyncio.Future[None] = loop.create_future()
        left = len(requests)

        def on_done(_: Sequence) -> None:
            nonlocal left
            left -= 1
            if left == 0 and not done.done():
                done.set_result(None)

        sequences = list[Sequence]()
        try:
            for request in requests:
                sequences.append(self._generator.submit(request, on_done))
            self._loop = loop
            self._start()
            if requests:
                await done
            return [sequence.response() for sequence in sequences]
        finally:
            self._generator.abort([sequence for sequence in sequences if sequence.stop_reason is None])

    def generate(self, requests: SequenceOf[ModelRequest]) -> list[ModelResponse]:
        """Return the answers to requests, in their order. Needs no event loop."""
        self._check_usable()
        if self._paused:
            raise RolloutError("the engine is paused; resume it before generating")
        sequences: list[Sequence] = []
        left = len(requests)

        def on_done(_: Sequence) -> None:
            nonlocal left
            left -= 1

        try:
            for request in requests:
                sequences.append(self._generator.submit(request, on_done))
        except RolloutError:
            self._generator.abort(sequences)
            raise
        try:
            while left:
                self._generator.step()
        except BaseException as error:
            self._generator.fail(error)
            raise
        return [sequence.response() for sequence in sequences]

    def prompt_logprobs(
        self,
        ids: SequenceOf[int],
        temperature: float = 1.0,
        lora: str | None = None,
        images: SequenceOf[ProcessedImage] = (),
    ) -> list[float]:
        """Return log_softmax(logits / temperature) of tokens 1 to L − 1 of `ids`, conditioned on prefix and images.

        Raises:
            RolloutError: fewer than two ids, an id outside of the vocabulary, too many ids, or an unknown LoRA.
        """
        tokens, args = integer_ids(ids), self.model.args
        if not 2 <= len(tokens) <= args.max_seq_len or not 0 <= min(tokens) <= max(tokens) < args.vocab_size:
            raise RolloutError(
                f"logprobs of {len(tokens)} tokens; expected 2 to {args.max_seq_len} ids from 0 to "
                f"{args.vocab_size - 1}"
            )
        return self.score_prompt(tokens, temperature, lora, images).logprobs

    def score_prompt(
        self,
        tokens: list[int],
        temperature: float = 1.0,
        lora: str | None = None,
        images: SequenceOf[ProcessedImage] = (),
        top: int = 0,
    ) -> PromptScores:
        """Return the scores of the tokens under the current weights, without sampling and without the cache.

        `top` is the number of most likely tokens to return at each place.

        Raises:
            RolloutError: an id outside of the vocabulary, too many ids, or an unknown LoRA.
        """
        return self._scoring(tokens, temperature, lora, images, top)()

    async def ascore_prompt(
        self,
        tokens: list[int],
        temperature: float = 1.0,
        lora: str | None = None,
        images: SequenceOf[ProcessedImage] = (),
    ) -> PromptScores:
        """Return what `score_prompt` returns. On a CPU, a thread computes it, next to the steps of unfinished requests.

        If the weights or the loaded LoRAs change meanwhile, the scores are discarded and computed again. On a GPU the
        event loop computes them, because another thread must not start kernels while a CUDA graph is captured.
        """
        scoring = self._scoring(tokens, temperature, lora, images)
        if self._generator.device.type != "cpu":
            return scoring()
        if self._scorer is None:
            self._scorer = ThreadPoolExecutor(1, thread_name_prefix="archon-scores")
        for _ in range(SCORING_TRIES):
            before = self._weights_state
            scores = asyncio.get_running_loop().run_in_executor(self._scorer, scoring)
            try:
                await asyncio.wait([scores])
            finally:
                scores.cancel()  # has no effect if it is done
            if self._weights_state == before:
                return scores.result()
            scores.exception()  # marks an error as seen; weights that are being replaced may cause one
            scoring = self._scoring(tokens, temperature, lora, images)
        return scoring()

    @property
    def _weights_state(self) -> tuple[int, int]:
        """Counts of begun updates of the weights and of changes of LoRAs."""
        return self._updates, self._generator.lora_manager.changes

    def _scoring(
        self,
        tokens: list[int],
        temperature: float,
        lora: str | None,
        images: SequenceOf[ProcessedImage],
        top: int = 0,
    ) -> Callable[[], PromptScores]:
        """Return the computation of `score_prompt`; raise its errors."""
        self._check_usable()
        generator = self._generator
        if not tokens:
            raise RolloutError("the prompt is empty, expected at least one token")
        if len(tokens) > generator.max_seq_len:
            raise ContextOverflowError(
                f"the prompt of {len(tokens)} tokens is longer than the {generator.max_seq_len} that the model reads; "
                "shorten it, or raise the engine's max_seq_len"
            )
        vocab_size = generator.model.args.vocab_size
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise RolloutError(f"token id {wrong[0]} is not below the vocabulary size {vocab_size}")
        owner = None if lora is None else generator.lora_manager.find(lora)
        lora_mapping = generator.lora_manager.rows([(owner, len(tokens))], len(tokens))
        prompt_images = generator.prompt_images(tokens, images, "the prompt")
        return partial(score_prompt, generator.model, tokens, temperature, lora_mapping, prompt_images, top)

    def pause(self) -> None:
        """Stop after the current step; unfinished answers are kept."""
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False
        if self._loop is not None and not self._loop.is_closed() and self._generator.scheduler.has_work:
            self._start()

    def abort(self, rid: str | None = None) -> int:
        """End the unfinished requests with id `rid`, or all, with stop reason `abort`; return their number."""
        chosen = [s for s in self._generator.unfinished if rid is None or s.request.rid == rid]
        self._generator.abort(chosen)
        return len(chosen)

    def update_weights(self, meta: WeightSource, *, version: int | None = None) -> None:
        """Replace the weights with a model's, or with an iterator of (native name, tensor).

        Takes effect between two tokens. Unfinished answers keep their tokens, logprobs and versions; their cache is
        recomputed with the new weights. If the update fails, every unfinished request fails, and the engine rejects
        requests until an update succeeds.

        Weights shared with a model stay shared if that model is passed. Weights of an iterator are copied to private
        memory, and a fingerprint of both sides verifies the copy. A replica with LoRA updates only the LoRA, because
        its base is frozen.

        Args:
            meta: the source.
            version: version of the new weights; by default the next one.
        """
        self._updates += 1
        try:
            if self._aliased and isinstance(meta, torch.nn.Module):
                written, self._fingerprint = share_weights(self._generator.model, meta), None
            else:
                if self._aliased:
                    allocate_weights(self._generator.model)
                    self._aliased = False
                self._fingerprint, written = copy_weights(self._generator.model, meta)
        except BaseException as error:
            self._damaged, self._fingerprint = str(error), None
            self._generator.fail(error)
            raise
        self._damaged = None
        self.stats.pushed_bytes += written
        self._generator.restart(self._generator.version + 1 if version is None else version)

    def record_experts(self) -> None:
        """Return the routed experts of all tokens in answers from now on, see `ModelResponse`.

        Raises:
            ConfigError: the model has no experts.
            RolloutError: requests are unfinished.
        """
        if self._generator.scheduler.has_work:
            raise RolloutError("experts are recorded from a prompt's first token on; wait for the unfinished requests")
        self._generator.record_experts()

    @property
    def loras(self) -> dict[str, ServedLoRA]:
        """Loaded LoRAs that a request can name, by name."""
        return self._generator.lora_manager.served

    @property
    def max_loras(self) -> int:
        """Maximum number of LoRAs in memory, including unloaded ones that are still in use."""
        return self._generator.lora_manager.limit

    @max_loras.setter
    def max_loras(self, limit: int) -> None:
        self._generator.lora_manager.limit = limit

    def load_lora(self, name: str, weights: LoRAWeights, *, version: int = 0) -> None:
        """Load a copy of a LoRA next to the model's weights, which do not change. Takes effect between two tokens.

        Requests select it by `ModelRequest.lora`.

        Raises:
            RolloutError: the name is taken, `max_loras` are loaded, or the weights do not fit this model.
        """
        self._generator.lora_manager.load(name, weights, version)

    def update_lora(self, name: str, weights: LoRAWeights, *, version: int | None = None) -> None:
        """Replace the weights of a loaded LoRA, as `update_weights` does for the model; other LoRAs are not affected.

        Raises errors as `load_lora` does, before any change.
        """
        self._generator.replace_lora(name, weights, version)

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA. Unfinished answers still use it; after the last of them another LoRA may take its slot.

        The memory of all slots is freed with the last LoRA.

        Raises:
            UnknownLoRAError: no LoRA of this name is loaded.
        """
        self._generator.lora_manager.unload(name)

    def state_dict(self) -> dict[str, int]:
        """Return the seed state, from which a resumed run derives the same seeds for requests without one."""
        return {"version": self._generator.version, "submitted": self._generator.submitted}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state of `state_dict`."""
        self._generator.version, self._generator.submitted = state["version"], state["submitted"]

    def _check_usable(self) -> None:
        if self._damaged is not None:
            raise RolloutError(
                f"the generator has no valid weights since an update failed ({self._damaged}); update them again"
            )

    def _is_running(self) -> bool:
        return self._task is not None and not self._task.done() and not self._task.get_loop().is_closed()

    def _start(self) -> None:
        if not self._is_running():
            assert self._loop is not None
            self._task = self._loop.create_task(self._run(), name="archon-generation")

    async def _run(self) -> None:
        try:
            while self._generator.scheduler.has_work and not self._paused:
                begun = time.perf_counter()
                self._generator.step()
                long = time.perf_counter() - begun > LONG_STEP_SECONDS
                for _ in range(TURNS_AFTER_LONG_STEP if long else 1):
                    await asyncio.sleep(0)
        except UserError as error:  # the callers get its message; a logged traceback would add nothing
            self._generator.fail(error)
        except Exception as error:
            if (line := resource_error_message(error)) is not None:
                self._generator.fail(ResourceExhaustedError(line))
                return
            logger.exception("generation failed; every unfinished request fails with it")
            self._generator.fail(error)
        except BaseException as error:  # the loop or the process is shutting down
            self._generator.fail(error)
            raise
