"""Reinforcement learning from verifiable rewards on prompts with pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from archon.data.image_rows import encode_image_prompt
from archon.data.images import ImageReader
from archon.generation.types import GenerationHyperparameters
from archon.models.vision.images import ProcessedImage
from archon.rl.rewards import AsyncRewardWrapper
from archon.rl.workflows.rlvr import RLVRWorkflow
from archon.schema.errors import ConfigError


class VisionRLVRWorkflow(RLVRWorkflow):
    """An `RLVRWorkflow` whose rows have pictures in `images`: paths, bytes, base64 or PIL images, or none.

    The pixels are made once, and travel with the trajectories, so that generator and trainer see the same.

    Args:
        processor: reads pictures: the folder of the model's checkpoint, or its `ImageReader`.
        reward_fn, gconfig, tokenizer, enable_thinking: see `RLVRWorkflow`.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        processor: ImageReader | str | Path | None,
        enable_thinking: bool | None = None,
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking)
        if processor is None:
            raise ConfigError(
                "VisionRLVRWorkflow needs what reads pictures, and the model sees none; choose a checkpoint with a "
                "vision tower and its preprocessor_config.json, and leave `vision` at frozen or trained"
            )
        if not isinstance(processor, ImageReader | str | Path):
            raise ConfigError(
                f"VisionRLVRWorkflow: processor is a {type(processor).__name__}; expected the checkpoint's folder, or "
                "a ImageReader of it"
            )
        self.processor = processor if isinstance(processor, ImageReader) else ImageReader(processor)

    def encode_row(self, data: dict[str, Any]) -> tuple[list[int], list[ProcessedImage]]:
        """Return the tokens of a row's prompt, with a placeholder for each row of a picture, and the pictures."""
        return encode_image_prompt(self.tokenizer, data, self.processor, **self.template_options)
