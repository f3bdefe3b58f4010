"""`archon eval CHECKPOINT`: scores answers of a checkpoint, or of a model behind an OpenAI endpoint."""

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

from archon.cli.config import config_command, load_config, to_yaml
from archon.cli.options import ConfigFile, LoRAFolder, Overrides
from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    from archon.cli.eval_config import EvalConfig
    from archon.rl.answers import Answerer, Scored
    from archon.rl.rewards import AsyncRewardWrapper
    from archon.rl.scores import Estimate

INTERVALS = "95 % over prompts: Wilson's for pass@k, mean ± 1.96 standard errors for the reward"

SETTINGS: dict[str, Any] = {
    "name": "eval",
    "help": "Score answers of a checkpoint, or of a model behind an OpenAI endpoint.\n\nWrites pass@k and means with "
    "95 % intervals over prompts (Wilson's for pass@k, else the normal one), the answers as JSON lines, and a page.",
    "cls": config_command("archon.cli.eval_config:EvalConfig"),
}


def command(
    checkpoint: Annotated[Path | None, typer.Argument(help="checkpoint folder; none with --url")] = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Annotated[str | None, typer.Option(metavar="PATH", help="named dataset, file or folder")] = None,
    reward: Annotated[str | None, typer.Option(metavar="NAME", help="reward function")] = None,
    n: Annotated[int | None, typer.Option("--n", help="answers to each prompt")] = None,
    temperature: Annotated[float | None, typer.Option(help="of sampling; 0 is the most likely answer")] = None,
    url: Annotated[str | None, typer.Option(help="base URL of an OpenAI endpoint, which ends in /v1")] = None,
    model: Annotated[str, typer.Option(help="name of the model at --url")] = "",
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="default: runs/eval-TIME")] = None,
    lora: LoRAFolder = None,
) -> None:
    from archon.cli.eval_config import EvalConfig

    given = list(overrides or [])
    if checkpoint is not None and "=" in checkpoint.name and not checkpoint.exists():
        checkpoint, given = None, [str(checkpoint), *given]
    if (checkpoint is None) == (url is None):
        raise ConfigError("name who answers: a checkpoint folder, or --url of an OpenAI endpoint, and not both")
    if lora is not None and url is not None:
        raise ConfigError("--lora belongs to a checkpoint; the model behind --url has what its server gave it")
    options = {"data.path": data, "reward": reward, "n": n, "temperature": temperature}
    given += [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    resolved = load_config(EvalConfig, config, given)
    folder = out or Path("runs") / time.strftime("eval-%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; name another folder with --out")
    evaluate(resolved, folder, checkpoint, url, model, lora)


def evaluate(
    config: EvalConfig, folder: Path, checkpoint: Path | None, url: str | None, model: str, lora: Path | None = None
) -> None:
    """Answer and scores all rows, and writes the results to `folder`."""
    from archon.data.registry import load_rows
    from archon.rl.answers import EndpointAnswerer
    from archon.rl.rewards import AsyncRewardWrapper
    from archon.rl.scores import summarize
    from archon.tools.report.eval_page import write_eval_page

    started = time.monotonic()
    with AsyncRewardWrapper(config.reward, config.reward_timeout, config.reward_workers) as reward:
        answerer: Answerer
        if checkpoint is not None:
            answerer, tokenizer = load_answerer(checkpoint, config, lora)
        else:
            assert url is not None
            sampling = {"temperature": config.temperature, "top_p": config.top_p, "max_tokens": config.max_new_tokens}
            answerer, tokenizer = EndpointAnswerer(url, model, sampling, config.max_concurrent), None
        rows = load_rows(config.data, "rl", tokenizer).rows
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config) + "\n", encoding="utf-8")
        scored = asyncio.run(collect(rows, answerer, reward, config, folder / "answers.jsonl"))
    lost = sum((one.lost for one in scored), Counter[str]())
    if not any(one.records for one in scored):
        raise next(one.first_error for one in scored if one.first_error)
    estimates = summarize([one.rewards for one in scored], config.ks, config.pass_threshold)
    result = {
        "who": url or (str(checkpoint) if lora is None else f"{checkpoint} with {lora}"),
        "model": model,
        "prompts": len(rows),
        "answers": sum(len(one.records) for one in scored),
        "lost": dict(lost),
        "seconds": round(time.monotonic() - started, 1),
        "intervals": INTERVALS,
        "scores": {name: {**vars(value), **bounds(value)} for name, value in estimates.items()},
    }
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = write_eval_page(folder, result, [record for one in scored for record in one.records])
    print_result(result, estimates, next((one.first_error for one in scored if one.first_error), None))
    print(f"answers: {folder / 'answers.jsonl'}\nreport: {page}")


async def collect(
    rows: Sequence[Mapping[str, Any]], answerer: Answerer, reward: AsyncRewardWrapper, config: EvalConfig, file: Path
) -> list[Scored]:
    """Return the scored answers in the order of their rows; each row's are in `file` as soon as they are there."""
    from archon.rl.answers import score_answers

    scored: list[Scored] = []
    with file.open("w", encoding="utf-8") as answers:
        async for one in score_answers(rows, answerer, reward, config.n, config.seed):
            scored.append(one)
            answers.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in one.records)
            answers.flush()
    return sorted(scored, key=lambda one: one.index)


def load_answerer(checkpoint: Path, config: EvalConfig, lora: Path | None = None) -> tuple[Answerer, Any]:
    """Return who answers with the checkpoint and its adapter, and the tokenizer."""
    import torch

    from archon.checkpoint.hf_io import load_model, load_tokenizer
    from archon.checkpoint.hf_reader import read_hf_config
    from archon.engine.build import resolve_device
    from archon.generation import InProcessEngine
    from archon.generation.types import GenerationHyperparameters
    from archon.rl.answers import CheckpointAnswerer

    read_hf_config(checkpoint)  # gives a clearer error than the tokenizer's loader if this is not a checkpoint
    tokenizer = load_tokenizer(config.tokenizer or checkpoint)
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
    """Return the ends of the interval; None, as JSON has no NaN, where a single prompt has none."""
    return {name: None if math.isnan(end) else end for name, end in (("low", value.low), ("high", value.high))}


def print_result(result: dict[str, Any], estimates: dict[str, Estimate], first_error: Exception | None) -> None:
    """Print a line a score, and what was lost with the first reason."""
    print(f"{result['who']}: {result['prompts']} prompts, {result['answers']} answers in {result['seconds']:.1f} s")
    for name, value in estimates.items():
        over = "" if value.prompts == result["prompts"] else f", over {value.prompts} prompts"
        interval = "no interval" if math.isnan(value.low) else f"[{value.low:.4f}, {value.high:.4f}]"
        print(f"  {name:<10}{value.mean:.4f}  {interval}{over}")
    if result["lost"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in result["lost"].items())
        print(f"  lost, and left out: {reasons}; the first: {first_error}")
    print(f"  intervals: {INTERVALS}")
