"""A trained reward model as the reward of a run."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import torch

from archon.checkpoint.hf_io import load_model
from archon.checkpoint.tokenizer import load_tokenizer
from archon.data.encoding import encode_sft, sft_text
from archon.data.mapping import conversation
from archon.data.sources import SourceRow
from archon.models.base import BaseArchonModel
from archon.schema.errors import CheckpointError

MAX_TOKENS = 16384
"""Tokens of one forward pass, at least one answer."""


class RewardModel:
    """Score of an answer: the model's value after the last token of the conversation.

    The conversation is encoded with the reward model's tokenizer, as in `archon preference loss=reward`, so that its
    vocabulary may differ from the policy's. Answers that wait at the same time share a forward pass.

    Args:
        path: folder of the model, a checkpoint with a value head. `load` reads it.
    """

    _model: BaseArchonModel
    _tokenizer: Any

    def __init__(self, path: str) -> None:
        self._path = path
        self._device = torch.device("cpu")
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []

    def load(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Load the tokenizer, and the weights in `dtype` on `device`; return this object.

        Raises:
            CheckpointError: the folder holds no model with a value head.
        """
        self._device = device
        self._tokenizer = load_tokenizer(self._path)
        try:
            self._model = load_model(self._path, device=device, dtype=dtype, is_critic=True).eval()
        except CheckpointError as error:
            raise CheckpointError(
                f"reward.model {self._path} cannot be loaded; expected a checkpoint with a value head, such as the "
                f"export of `archon preference loss=reward` ({error})"
            ) from error
        return self

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float:
        """Return the score of one answer to the row's `messages`, by default to `prompt` as a user message."""
        messages = data.get("messages") or [{"role": "user", "content": prompt}]
        where = f"reward model {self._path}"
        row = SourceRow(where, {"messages": [*messages, {"role": "assistant", "content": completions}]})
        text = sft_text(self._tokenizer, conversation(row, "messages", None, None), where, data.get("tools"))
        encoded = encode_sft(self._tokenizer, [text])
        loop = asyncio.get_running_loop()
        score = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._score_waiting)
        self._waiting.append((encoded[0]["input_ids"], score))
        return await score

    def _score_waiting(self) -> None:
        """Score all waiting answers, `MAX_TOKENS` tokens at a time."""
        waiting, self._waiting = self._waiting, []
        while waiting:
            count, tokens = 0, 0
            while count < len(waiting) and (count == 0 or tokens + len(waiting[count][0]) <= MAX_TOKENS):
                tokens += len(waiting[count][0])
                count += 1
            batch, waiting = waiting[:count], waiting[count:]
            try:
                scores = self._scores([ids for ids, _ in batch])
            except Exception as error:  # noqa: BLE001 (each answer reports it)
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():  # its episode was canceled
                    future.set_result(score)

    @torch.inference_mode()
    def _scores(self, documents: list[list[int]]) -> list[float]:
        lengths = torch.tensor([len(ids) for ids in documents])
        ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        tokens = torch.tensor([token for ids in documents for token in ids], device=self._device)
        positions = torch.cat([torch.arange(int(length)) for length in lengths]).to(self._device)
        cu_seqlens = ends.to(self._device, torch.int32)
        values = self._model(tokens, positions, cu_seqlens, int(lengths.max()))
        scores: list[float] = values.reshape(-1)[(ends[1:] - 1).to(self._device)].float().tolist()
        return scores
