"""Weight sync from an engine in any layout to an in-process generator or inference servers.

`WeightSync` is the trainer's interface to both kinds of generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import call
from pathlib import Path
from typing import Any, Protocol

import torch

from archon.checkpoint.hf_export import keys_of
from archon.data.encoding import encode_prompt
from archon.engine.engine import ArchonEngine
from archon.generation import InProcessEngine
from archon.generation.replica import WeightSource
from archon.generation.types import InferenceEngine
from archon.models.base import BaseArchonModel
from archon.parallel.control_plane import ControlPlane
from archon.parallel.gather import BUCKET_BYTES
from archon.remote.dialects.base import Transport
from archon.remote.engine import PROBE_TOKENS, RemoteEngine
from archon.training.batch_sharding import score_sharded
from archon.training.loop import timed


def engine_weights(engine: ArchonEngine) -> WeightSource:
    """Return the weights for an in-process push: the model, or an iterator that all ranks consume.

    A sharded model yields its gathered weights, and a LoRA model only the weights of LoRA and saved modules.
    """
    if engine.lora:
        return chain(engine.saved_modules(), engine.lora_weights())
    return engine.full_model if _is_plain(engine) else engine.weights()


def _is_plain(engine: ArchonEngine) -> bool:
    return engine.parallel_dims.world_size == 1 and not engine.lora


def build_inprocess_engine(engine: ArchonEngine, tokenizer: Any, **options: Any) -> InProcessEngine:
    """Return a generator with the engine's weights; each process gets a full replica of a sharded model.

    A LoRA replica keeps the LoRA separate from the frozen weights, like the trainer, so both compute the same. A
    single-process trainer shares the frozen weights.

    `options` are the options of `InProcessEngine.from_model`. Raises `RolloutError` if replica and cache do not fit.
    """
    if _is_plain(engine):
        return InProcessEngine.from_model(engine.full_model, tokenizer, **options)
    source = chain(engine.base_weights(), engine.lora_weights())
    return InProcessEngine.from_model(engine.meta_model(), tokenizer, source=source, device=engine.device, **options)


@dataclass(frozen=True)
class PushedWeights:
    """Weights of an engine in any layout for `RemoteEngine.update_weights`; all methods are collectives."""

    engine: ArchonEngine

    def write(self, transport: Transport, folder: Path, dtype: str | None) -> None:
        """Write a checkpoint, or the LoRA in PEFT's format, from rank 0."""
        if transport == "lora":
            self.engine.save(folder, format="peft")
        else:
            master = self.engine.built.builder.master_dtype
            self.engine.save(folder, dtype=master if dtype is None else getattr(torch, dtype))

    def tensors(self, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, whole tensor); every rank must consume all tensors."""
        engine, target = self.engine, None if dtype is None else getattr(torch, dtype)
        buffers = keys_of(engine.adapter, engine.adapter.buffer_shapes)
        for name, tensor in engine.hf_weights(target, bucket_bytes=BUCKET_BYTES):
            yield name, tensor if target is None or name in buffers else tensor.to(target)

    def score(self, tokens: list[int]) -> list[float]:
        """Return the trainer's logprobs of tokens 1 to L − 1 at temperature 1, on every rank."""
        ids = torch.tensor([tokens])
        document = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
        document["loss_mask"] = torch.ones_like(ids)
        scores = score_sharded(self.engine.forward_batch, document, self.engine.ranks.dp, self.engine.device)
        return [float(x) for x in scores[0, 1:]]


def probe_tokens(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return concatenated prompt tokens, at least `PROBE_TOKENS` if possible, for `RemoteEngine.probe`.

    The result is empty if only the run's workflow can read the rows.
    """
    tokens: list[int] = []
    for row in rows[:PROBE_TOKENS]:
        if "messages" not in row and "prompt" not in row:
            return []
        tokens += encode_prompt(tokenizer, row)
        if len(tokens) >= PROBE_TOKENS:
            break
    return tokens


Runner = Callable[[Callable[[], None]], None]
"""Runs a function to its end, on this thread or another one."""


class _Stats(Protocol):
    @property
    def seconds(self) -> float: ...


class RolloutEngine(InferenceEngine, Protocol):
    """Inference engine of a trainer, in its process or on servers."""

    @property
    def stats(self) -> _Stats:
        """Statistics; `seconds` is the time spent generating."""


class WeightSync(Protocol):
    """Weight sync from an engine to its generator. Each kind of generator has an implementation."""

    @property
    def generator(self) -> RolloutEngine:
        """The inference engine of the rollout."""

    def weights(self) -> Any:
        """Return the engine's weights for `generator.update_weights`."""

    def push_runner(self, background: Runner) -> Runner:
        """Return the runner of a push; `background` runs it in a thread next to unfinished episodes."""

    def push_metrics(self) -> dict[str, float]:
        """Return the metrics of the last push."""

    def sleep(self) -> dict[str, float]:
        """Let a generator that shares the trainer's GPU free it, until a push or `wake`. Return {"sleep": seconds}.

        Other generators do nothing and return {}.
        """

    def wake(self) -> None:
        """End `sleep` without a push: the weights have not changed."""

    def exported_model(self) -> BaseArchonModel:
        """Return an unsharded model with the engine's weights."""

    def evaluation_world(self, *, asynchronous: bool) -> ControlPlane | None:
        """Return the processes that split evaluation prompts; None: all processes.

        Args:
            asynchronous: process 0 runs all training episodes.
        """

    def close(self) -> None:
        """Release folders and launched servers."""


@dataclass
class InProcessSync:
    """Weight sync to a generator in every process, which shares or copies the weights."""

    engine: ArchonEngine
    generator: InProcessEngine
    _bytes_before: int = 0

    def weights(self) -> WeightSource:
        """Return the model, or an iterator over gathered weights."""
        self._bytes_before = self.generator.stats.pushed_bytes
        return engine_weights(self.engine)

    def push_runner(self, background: Runner) -> Runner:
        """Push on the calling thread, the only one that may use the generator."""
        return call

    def push_metrics(self) -> dict[str, float]:
        """Return the bytes written since `weights`."""
        return {"push/bytes": float(self.generator.stats.pushed_bytes - self._bytes_before)}

    def sleep(self) -> dict[str, float]:
        """Do nothing: trainer and generator share the allocator's memory."""
        return {}

    def wake(self) -> None:
        """Do nothing."""

    def exported_model(self) -> BaseArchonModel:
        """Return the engine's model, or with several processes the replica."""
        return self.engine.full_model if self.engine.parallel_dims.world_size == 1 else self.generator.model

    def evaluation_world(self, *, asynchronous: bool) -> ControlPlane | None:
        """Split evaluation prompts between all processes, because each has a generator."""
        return None

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class RemoteSync:
    """Weight sync to inference servers."""

    engine: ArchonEngine
    generator: RemoteEngine

    def weights(self) -> PushedWeights:
        """Return the source of checkpoints, tensors and probe scores."""
        return PushedWeights(self.engine)

    def push_runner(self, background: Runner) -> Runner:
        """Push in the background: tools and rewards of unfinished episodes continue, and their answers wait."""
        return background

    def push_metrics(self) -> dict[str, float]:
        """Return the metrics of the last push."""
        return self.generator.push_metrics

    def sleep(self) -> dict[str, float]:
        """Let servers free the GPU that they share with the trainer."""
        seconds: dict[str, float] = {}
        if self.generator.colocated:
            with timed(seconds, "sleep"):
                self.generator.sleep()
        return seconds

    def wake(self) -> None:
        """Wake the servers that sleep."""
        if self.generator.colocated:
            self.generator.wake()

    def exported_model(self) -> BaseArchonModel:
        """Return the engine's model."""
        return self.engine.full_model

    def evaluation_world(self, *, asynchronous: bool) -> ControlPlane | None:
        """Run evaluation on process 0 if training episodes run there."""
        return ControlPlane() if asynchronous else None

    def close(self) -> None:
        """Remove the folder of pushes and stop launched servers."""
        self.generator.close()
