"""Documents for the training service, always the same."""

from __future__ import annotations

from typing import Any

import torch

from tests.small_qwen3 import SMALL_QWEN3

VOCABULARY = 95
LENGTHS = (7, 12, 12, 3)
assert SMALL_QWEN3["num_hidden_layers"] == 2


def rows(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Token ids of documents, one token longer than their inputs."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length + 1,), generator=generator).tolist() for length in lengths]


def datum(ids: list[int], **inputs: Any) -> Any:
    """A document whose targets are its next tokens."""
    from tinker import types

    tensors = {
        name: types.TensorData.from_torch(torch.as_tensor(values, dtype=torch.float32))
        for name, values in inputs.items()
    }
    targets = types.TensorData.from_torch(torch.tensor(ids[1:]))
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": targets, **tensors}
    )


def policy_inputs(seed: int, length: int) -> dict[str, torch.Tensor]:
    """Sampling log-probabilities and advantages."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "logprobs": -4.5 + torch.randn(length, generator=generator),
        "advantages": torch.randn(length, generator=generator),
    }


def tensor(output: Any, name: str) -> torch.Tensor:
    """A tensor of a document's outputs."""
    return torch.tensor(output[name].data).view(output[name].shape)
