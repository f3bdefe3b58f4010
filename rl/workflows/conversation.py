"""Conversation in token space: answers of the model and the messages between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from archon.data.encoding import next_turn_ids
from archon.generation.record import TokenRecord, check_answer
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse
from archon.rl.episode_context import workflow_context
from archon.schema.errors import ContextOverflowError

Reply: TypeAlias = Callable[[str, ModelResponse], Awaitable[str | None]]
"""(answer text, engine response) -> the user's next message; None ends the conversation."""


async def converse(
    engine: InferenceEngine,
    record: TokenRecord,
    prompt_ids: list[int],
    index: int,
    reply: Reply,
    gconfig: GenerationHyperparameters,
    tokenizer: Any,
) -> None:
    """Fill `record` with a conversation, sample `index` of its episode.

    It ends if `reply` returns None, an answer reaches its length limit, or the next turn does not fit; the last two set
    `record.truncated`. Nothing is encoded twice: the next prompt is all tokens so far plus the new message.
    """
    seed = workflow_context.enter_sample(index).seed
    new_ids = prompt_ids
    while True:
        # Each turn has its own random stream, independent of concurrent conversations.
        changes = {"n_samples": 1, "seed": derive_seed(seed, index, record.turns)}
        one = gconfig.model_copy(update=changes)
        try:
            response = await engine.agenerate(ModelRequest(record.input_ids + new_ids, one, tokenizer=tokenizer))
        except ContextOverflowError:
            if record.turns == 0:
                raise
            record.truncated = True
            return
        check_answer(response)
        record.observe(new_ids)
        record.answer(response)
        message = await reply(tokenizer.decode(response.output_tokens, skip_special_tokens=True), response)
        if message is None or record.truncated:
            return
        new_ids = next_turn_ids(tokenizer, {"role": "user", "content": message}, response.output_tokens)
