"""Sampling: the in-process generator in a thread of its own, with LoRAs read from their checkpoints when needed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from archon.checkpoint.peft.export import LoRAWeights
from archon.generation import InProcessEngine
from archon.generation.prompt_scores import PromptScores
from archon.generation.types import ModelRequest, ModelResponse

T = TypeVar("T")


class ServiceGenerator(InProcessEngine):
    """Generator without CUDA graphs: the engine thread starts kernels at any time, and a capture forbids that."""

    static_decode: ClassVar[bool | None] = False


class Sampler:
    """Answers requests of saved LoRAs and of the base model.

    Attributes:
        generator: used from this object's thread only.
        read: reads the LoRA of a checkpoint folder.
    """

    def __init__(self, generator: ServiceGenerator, read: Callable[[Path], LoRAWeights]) -> None:
        self.generator, self._read = generator, read
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="archon-sampler", daemon=True)
        self._thread.start()

    def sample(
        self,
        requests: Sequence[ModelRequest],
        folder: Path | None,
        prompt_top: int | None,
    ) -> Future[tuple[list[ModelResponse], PromptScores | None]]:
        """Answer requests with one prompt.

        Args:
            requests: the requests, without a LoRA.
            folder: the checkpoint of their LoRA; None for the base model.
            prompt_top: score the prompt, with this number of likely tokens at each place; None: do not score it.
        """
        return self._submit(self._sample(requests, folder, prompt_top))

    def forget(self, folder: Path) -> None:
        """Unload the LoRA of a deleted or replaced checkpoint."""
        self._submit(self._forget(str(folder)))

    def abort(self, rid: str) -> None:
        """End the unfinished requests with this id."""
        self._loop.call_soon_threadsafe(self.generator.abort, rid)

    def close(self) -> None:
        """Fail unfinished requests and stop the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _sample(
        self, requests: Sequence[ModelRequest], folder: Path | None, prompt_top: int | None
    ) -> tuple[list[ModelResponse], PromptScores | None]:
        if folder is not None:
            self._load(folder)
            for request in requests:
                request.lora = str(folder)
        answers = await self.generator.agenerate_batch(requests)
        scores = None
        if prompt_top is not None:
            if folder is not None:
                self._load(folder)  # it may have been unloaded meanwhile
            lora = None if folder is None else str(folder)
            scores = self.generator.score_prompt(requests[0].input_ids, lora=lora, top=prompt_top)
        return answers, scores

    async def _forget(self, name: str) -> None:
        if name in self.generator.loras:
            self.generator.unload_lora(name)

    def _load(self, folder: Path) -> None:
        """Load a LoRA unless it is loaded; the least recently loaded idle one makes room."""
        name, loras = str(folder), self.generator.loras
        if name in loras:
            return
        if len(loras) >= self.generator.max_loras:
            idle = next((other for other, lora in loras.items() if not lora.unfinished), None)
            if idle is not None:
                self.generator.unload_lora(idle)
        self.generator.load_lora(name, self._read(folder))
