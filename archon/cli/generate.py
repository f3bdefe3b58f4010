"""`archon generate PATH`: answer prompts with a checkpoint."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archon.checkpoint.hub import config_file, parse_hub_id
from archon.cli.config import config_command, load_config
from archon.cli.options import CheckpointFolder, ConfigFile, LoRAFolder, Overrides
from archon.schema.config import MAX_STEP_ROWS
from archon.schema.errors import CheckpointError, ConfigError, NotFiniteError
from archon.schema.files import PROMPTS_BYTES, read_limited
from archon.schema.tasks import results_as_completed

if TYPE_CHECKING:
    from archon.cli.generate_config import GenerateConfig
    from archon.generation.types import InferenceEngine, ModelRequest, ModelResponse

SETTINGS: dict[str, Any] = {
    "name": "generate",
    "help": "Answer prompts with a checkpoint.\n\nPrints each finished answer to stdout and tokens/s to stderr.",
    "cls": config_command("archon.cli.generate_config:GenerateConfig"),
}


def command(
    path: CheckpointFolder,
    overrides: Overrides = None,
    config: ConfigFile = None,
    prompt: Annotated[list[str] | None, typer.Option(help="prompt to answer; repeatable")] = None,
    prompts_file: Annotated[Path | None, typer.Option(metavar="FILE", help="one prompt per line")] = None,
    lora: LoRAFolder = None,
) -> None:
    """Generate answers to prompts."""
    if parse_hub_id(path) is None:
        config_file(path)  # fails before PyTorch is imported, which takes seconds
    from archon.cli.generate_config import GenerateConfig

    resolved = load_config(GenerateConfig, config, overrides or [])
    prompts = [*resolved.prompts, *(prompt or [])]
    for file in {resolved.prompts_file, prompts_file} - {None}:
        assert file is not None
        prompts += read_prompts(file)
    if not prompts:
        raise ConfigError("there is no prompt; use --prompt TEXT or --prompts-file FILE")
    require_answers(len(prompts), resolved.n_samples, "n_samples")
    answer(path, prompts, resolved, lora)


def require_answers(prompts: int, samples: int, name: str) -> None:
    """Raise ConfigError for too many answers; each answer is an object in memory."""
    if prompts * samples > MAX_STEP_ROWS:
        raise ConfigError(
            f"{prompts:,} prompts with {name} = {samples:,} are {prompts * samples:,} answers; expected at most "
            f"{MAX_STEP_ROWS:,}: divide the prompts"
        )


def read_prompts(file: Path) -> list[str]:
    """Return the non-empty lines of a text file of at most `PROMPTS_BYTES`."""
    data = read_limited(file, PROMPTS_BYTES)
    try:
        # Like in JSONL, only a line feed ends a line: splitlines() would also split at U+2028, form feeds, ….
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 ({error.reason} at byte {error.start}); expected a text file") from None
    return [line.removesuffix("\r") for line in lines if line.strip()]


def answer(path: Path, prompts: Sequence[str], config: GenerateConfig, lora: Path | None) -> None:
    """Load the checkpoint with its LoRA, and print the answer to every prompt."""
    import torch

    from archon.checkpoint.chat_template import set_template_variables
    from archon.checkpoint.hf_io import load_model
    from archon.checkpoint.tokenizer import load_tokenizer, saved_tokenizer
    from archon.engine.build import resolve_device
    from archon.generation import InProcessEngine

    tokenizer = load_tokenizer(config.tokenizer or saved_tokenizer(lora) or path, path)
    set_template_variables(tokenizer, config.chat_template_kwargs)
    requests = make_requests(prompts, config, tokenizer)
    device, dtype = str(resolve_device(config.device)), getattr(torch, config.dtype)
    model = load_model(path, device=device, dtype=dtype, lora=lora)
    longest = max(len(request.input_ids) for request in requests) + config.max_new_tokens
    engine = InProcessEngine.from_model(
        model,
        tokenizer,
        max_slots=min(config.max_slots, len(requests)),
        # Exceed the trained context length only on request.
        max_seq_len=min(config.max_tokens or model.args.max_seq_len, longest),
        seed=secrets.randbits(63) if config.seed is None else config.seed,
    )
    try:
        asyncio.run(print_answers(engine, requests, len(requests) // len(prompts), tokenizer))
    except NotFiniteError as error:
        raise CheckpointError(f"{path}: {error}") from None


def make_requests(prompts: Sequence[str], config: GenerateConfig, tokenizer: Any) -> list[ModelRequest]:
    """Return `n_samples` requests per prompt, in order, each with a separate random stream."""
    from archon.data.encoding import encode_prompt
    from archon.generation.types import GenerationHyperparameters, ModelRequest

    if config.chat is True and not tokenizer.chat_template:
        raise ConfigError("chat=true, but the tokenizer has no chat template; set chat=false")
    use_chat = bool(tokenizer.chat_template) if config.chat == "auto" else config.chat
    # Seed the engine instead of the requests: equal request seeds would make all samples of a prompt equal.
    sampling = {name: getattr(config, name) for name in GenerationHyperparameters.model_fields}
    gconfig = GenerationHyperparameters(**sampling | {"n_samples": 1, "seed": None})
    requests = []
    for number, text in enumerate(prompts, start=1):
        row = {"messages": [{"role": "user", "content": text}]} if use_chat else {"prompt": text}
        ids = encode_prompt(tokenizer, row, f"prompt {number}")
        for _ in range(config.n_samples):
            requests.append(ModelRequest(ids, gconfig, rid=f"for prompt {number}", tokenizer=tokenizer))
    return requests


async def print_answers(
    engine: InferenceEngine, requests: Sequence[ModelRequest], n_samples: int, tokenizer: Any
) -> None:
    """Print each answer when it finishes, then the throughput."""
    start, tokens = time.monotonic(), 0
    async for index, response in as_completed(engine, requests):
        text = tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        tokens += len(response.output_tokens)
        sample = f" sample {index % n_samples + 1}" if n_samples > 1 else ""
        print(
            f"# prompt {index // n_samples + 1}{sample} ({len(response.output_tokens)} tokens, {response.stop_reason})"
        )
        print(text, flush=True)
    seconds = time.monotonic() - start
    sys.stderr.write(f"{len(requests)} answers, {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s\n")


async def as_completed(
    engine: InferenceEngine, requests: Sequence[ModelRequest]
) -> AsyncIterator[tuple[int, ModelResponse]]:
    """Yield (index, response) of each request when it finishes."""

    async def generate(index: int) -> tuple[int, ModelResponse]:
        return index, await engine.agenerate(requests[index])

    # Create tasks in order: as_completed starts coroutines in set order, and seeds depend on the order of arrival.
    tasks = [asyncio.create_task(generate(index)) for index in range(len(requests))]
    async for answer in results_as_completed(tasks):
        yield answer
