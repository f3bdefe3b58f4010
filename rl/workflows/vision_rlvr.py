"""RL from verifiable rewards on prompts with images."""

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
    """`RLVRWorkflow` for rows with `images`: paths, bytes, base64 or PIL images, or none.

    Images are processed once; generator and trainer use the same pixels.

    Args:
        reward_fn: see `RLVRWorkflow`.
        gconfig: see `RLVRWorkflow`.
        tokenizer: see `RLVRWorkflow`.
        processor: the folder of the model's checkpoint, or its `ImageReader`.
        enable_thinking: see `RLVRWorkflow`.
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
                "VisionRLVRWorkflow needs an image processor, but the model has no vision encoder; use a checkpoint "
                "with a vision encoder and preprocessor_config.json, and `vision` frozen or trained"
            )
        if not isinstance(processor, ImageReader | str | Path):
            raise ConfigError(
                f"VisionRLVRWorkflow: processor is a {type(processor).__name__}; expected the checkpoint's folder or "
                "an ImageReader"
            )
        self.processor = processor if isinstance(processor, ImageReader) else ImageReader(processor)

    def encode_row(self, data: dict[str, Any]) -> tuple[list[int], list[ProcessedImage]]:
        """Return the prompt tokens, with placeholder tokens for image embeddings, and the images."""
        return encode_image_prompt(self.tokenizer, data, self.processor, **self.template_options)
