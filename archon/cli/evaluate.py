"""`archon eval CHECKPOINT`: score the answers of a checkpoint or an OpenAI endpoint."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from archon.checkpoint.atomic import named_errors, write_text
from archon.cli.config import config_command, load_config, to_yaml
from archon.cli.generate import require_answers
from archon.cli.options import ConfigFile, LoRAFolder, Overrides
from archon.schema.config import expand_path, require_separate
from archon.schema.errors import ConfigError
from archon.schema.urls import require_http_url

if TYPE_CHECKING:
    from archon.cli.eval_config import EvalConfig
    from archon.rl.answers import Answerer, Scored
    from archon.rl.rewards import AsyncRewardWrapper
    from archon.rl.scores import Estimate

INTERVALS = "95 % over prompts: Wilson score for pass@k, mean ± 1.96 standard errors for the reward"

SETTINGS: dict[str, Any] = {
    "name": "eval",
    "help": "Score the answers of a checkpoint or an OpenAI endpoint.\n\nWrites pass@k and mean rewards with 95 % "
    "intervals over prompts (Wilson score for pass@k, normal for means), the answers as JSON lines, and an HTML page.",
    "cls": config_command("archon.cli.eval_config:EvalConfig"),
}


def command(
    checkpoint: Annotated[str | None, typer.Argument(help="checkpoint folder or hub id; omit with --url")] = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Annotated[str | None, typer.Option(metavar="PATH", help="named dataset, file or folder")] = None,
    reward: Annotated[str | None, typer.Option(metavar="NAME", help="reward function")] = None,
    n: Annotated[int | None, typer.Option("--n", help="answers per prompt")] = None,
    temperature: Annotated[float | None, typer.Option(help="sampling temperature; 0 is greedy")] = None,
    url: Annotated[str | None, typer.Option(help="base URL of an OpenAI endpoint, ending in /v1")] = None,
    model: Annotated[str, typer.Option(help="model name at --url")] = "",
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="default: runs/eval-TIME")] = None,
    lora: LoRAFolder = None,
) -> None:
    """Evaluate a checkpoint or an endpoint."""
    from archon.cli.eval_config import EvalConfig

    all_overrides = list(overrides or [])
    path = None
    if checkpoint is not None and "=" in checkpoint.partition("/")[0] and not Path(checkpoint).exists():
        all_overrides.insert(0, checkpoint)
    elif checkpoint is not None:
        path = expand_path(Path(checkpoint))
    if (path is None) == (url is None):
        raise ConfigError("expected either a checkpoint folder or --url of an OpenAI endpoint")
    if url is not None:
        require_http_url(url, "--url")
    if lora is not None and url is not None:
        raise ConfigError("--lora requires a checkpoint and does not work with --url; load the LoRA on the server")
    options = {"data.path": data, "reward": reward, "n": n, "temperature": temperature}
    all_overrides += [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    resolved = load_config(EvalConfig, config, all_overrides)
    folder = out or Path("runs") / time.strftime("eval-%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; choose another folder with --out")
    require_separate(folder, [path, lora, resolved.tokenizer])
    evaluate(resolved, folder, path, url, model, lora)


def evaluate(
    config: EvalConfig, folder: Path, checkpoint: Path | None, url: str | None, model: str, lora: Path | None = None
) -> None:
    """Answer and score all rows, and write the results to `folder`."""
    from archon.checkpoint.tokenizer import load_tokenizer
    from archon.data.registry import load_rows
    from archon.rl.answers import EndpointAnswerer
    from archon.rl.rewards import AsyncRewardWrapper
    from archon.rl.scores import summarize
    from archon.tools.report.eval_page import write_eval_page

    started = time.monotonic()
    with AsyncRewardWrapper(config.reward, config.reward_timeout, config.reward_workers) as reward:
        reward.require_documented_form()
        answerer: Answerer
        if checkpoint is not None:
            answerer, tokenizer = load_answerer(checkpoint, config, lora)
        else:
            assert url is not None
            sampling = {"temperature": config.temperature, "top_p": config.top_p, "max_tokens": config.max_new_tokens}
            tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
            answerer = EndpointAnswerer(url, model, sampling, config.max_concurrent, tokenizer)
            if tokenizer is None:
                print(
                    "the reward gets None as prompt_ids and completion_ids, and the last message as prompt; set "
                    "tokenizer to the model's folder for the values that it gets for a checkpoint"
                )
        rows = load_rows(config.data, "rl", tokenizer).rows
        require_answers(len(rows), config.n, "n")
        for row in rows:
            reward.require_columns(row)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.yaml", to_yaml(config) + "\n")
        scored = asyncio.run(collect(rows, answerer, reward, config, folder / "answers.jsonl"))
    lost = sum((row.lost for row in scored), Counter[str]())
    if not any(row.records for row in scored):
        raise next(row.first_error for row in scored if row.first_error)
    estimates = summarize([row.rewards for row in scored], config.ks, config.pass_threshold)
    result = {
        "who": url or (str(checkpoint) if lora is None else f"{checkpoint} with {lora}"),
        "model": model,
        "prompts": len(rows),
        "answers": sum(len(row.records) for row in scored),
        "lost": dict(lost),
        "seconds": round(time.monotonic() - started, 1),
        "intervals": INTERVALS,
        "scores": {name: {**vars(value), **bounds(value)} for name, value in estimates.items()},
    }
    write_text(folder / "results.json", json.dumps(result, indent=1) + "\n")
    page = write_eval_page(folder, result, [record for row in scored for record in row.records])
    print_result(result, estimates, next((row.first_error for row in scored if row.first_error), None))
    print(f"answers: {folder / 'answers.jsonl'}\nreport: {page}")


async def collect(
    rows: Sequence[Mapping[str, Any]], answerer: Answerer, reward: AsyncRewardWrapper, config: EvalConfig, file: Path
) -> list[Scored]:
    """Return the scored answers in row order; append each row's answers to `file` when they finish.

    Prints a line on the progress after 3 s, and then every 10 s.
    """
    from archon.rl.answers import score_answers
    from archon.training.loop import contain_exits

    contain_exits(asyncio.get_running_loop())
    scored: list[Scored] = []
    progress = asyncio.create_task(show_progress(scored, len(rows)))
    with named_errors(file), file.open("w", encoding="utf-8") as answers:
        try:
            async for row in score_answers(rows, answerer, reward, config.n, config.seed):
                scored.append(row)
                answers.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in row.records)
                answers.flush()
        finally:
            progress.cancel()
    return sorted(scored, key=lambda row: row.index)


async def show_progress(scored: Sequence[Scored], total: int) -> None:
    """Print how many rows are scored, their mean reward, and the time left, until it is canceled."""
    started = time.monotonic()
    await asyncio.sleep(3)
    while True:
        rewards = [reward for row in scored for reward in row.rewards]
        left = (time.monotonic() - started) / max(1, len(scored)) * (total - len(scored))
        text = f"  reward {sum(rewards) / len(rewards):.4g}  {left:.0f} s left" if rewards else ""
        print(f"eval {len(scored)}/{total}{text}", flush=True)
        await asyncio.sleep(10)


def load_answerer(checkpoint: Path, config: EvalConfig, lora: Path | None = None) -> tuple[Answerer, Any]:
    """Return an answerer for the checkpoint with its LoRA, and the tokenizer."""
    import torch

    from archon.checkpoint.hf_io import load_model
    from archon.checkpoint.hf_reader import read_hf_config
    from archon.checkpoint.tokenizer import load_tokenizer, saved_tokenizer
    from archon.engine.build import resolve_device
    from archon.generation import InProcessEngine
    from archon.generation.types import GenerationHyperparameters
    from archon.rl.answers import CheckpointAnswerer

    read_hf_config(checkpoint)  # gives a clearer error than the tokenizer's loader if this is not a checkpoint
    tokenizer = load_tokenizer(config.tokenizer or saved_tokenizer(lora) or checkpoint, checkpoint)
    device, dtype = str(resolve_device(config.device)), getattr(torch, config.dtype)
    model = load_model(checkpoint, device=device, dtype=dtype, lora=lora)
    engine = InProcessEngine.from_model(
        model, tokenizer, max_slots=config.max_concurrent, max_seq_len=config.max_tokens, seed=config.seed or 0
    )
    greedy = config.temperature == 0
    gconfig = GenerationHyperparameters(
        max_new_tokens=config.max_new_tokens,
        top_p=config.top_p,
        greedy=greedy,
        temperature=1.0 if greedy else config.temperature,
    )
    return CheckpointAnswerer(engine, tokenizer, gconfig), tokenizer


def bounds(value: Estimate) -> dict[str, float | None]:
    """Return the ends of the interval; None for a single prompt, because JSON has no NaN."""
    return {name: None if math.isnan(end) else end for name, end in (("low", value.low), ("high", value.high))}


def print_result(result: dict[str, Any], estimates: dict[str, Estimate], first_error: Exception | None) -> None:
    """Print one line per score, then the lost answers with the first error."""
    print(f"{result['who']}: {result['prompts']} prompts, {result['answers']} answers in {result['seconds']:.1f} s")
    for name, value in estimates.items():
        over = "" if value.prompts == result["prompts"] else f", over {value.prompts} prompts"
        interval = "no interval" if math.isnan(value.low) else f"[{value.low:.4f}, {value.high:.4f}]"
        print(f"  {name:<10}{value.mean:.4f}  {interval}{over}")
    if result["lost"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in result["lost"].items())
        print(f"  lost (excluded): {reasons}; first error: {first_error}")
    print(f"  intervals: {INTERVALS}")
