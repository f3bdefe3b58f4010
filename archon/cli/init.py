"""`archon init`: write a commented configuration from five answers, or copy a recipe."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import typer

import archon
from archon.schema.errors import ConfigError

SETTINGS: dict[str, Any] = {
    "name": "init",
    "help": "Write a commented configuration from five answers.\n\n"
    "The answers are task, model, data, hardware and method. "
    "Asks for missing options, if standard input is a terminal. The values of the file are starting points. The first "
    "command that it prints checks the file, the model and the data. --recipe copies a recipe of the package instead.",
}
Task = Literal["sft", "preference", "rl"]
Method = Literal["lora", "full"]


LEARNING_RATES = {
    ("sft", "lora"): "1.0e-4",
    ("sft", "full"): "1.0e-5",
    ("preference", "lora"): "1.0e-5",
    ("preference", "full"): "5.0e-7",
    ("rl", "lora"): "1.0e-5",
    ("rl", "full"): "1.0e-6",
}
_ROWS = """\
# Longer rows are dropped and counted.
train_data: {{path: {data}, max_length: 2048}}
# Rows of a step, over all processes.
batch_size: {rows}
epochs: 1"""
TASKS = {
    "sft": _ROWS,
    "preference": f"""{_ROWS}
# Also ipo, cpo, simpo, orpo, kto, or reward for a reward model.
loss: dpo
beta: 0.1""",
    "rl": """\
train_data: {{path: {data}, max_length: 512}}
# A built-in reward, or a function of yours, such as my_module.score: docs/tasks/rewards.md.
reward: {reward}
# `archon rl --preset list` shows all.
algorithm: {{preset: grpo_no_kl}}
gconfig: {{n_samples: 8, max_new_tokens: 256}}   # answers to each prompt
rollout: {{prompts_per_step: {rows}}}
total_steps: 100""",
}


class Answers(NamedTuple):
    """Answers that determine a configuration; see the options of the command."""

    task: Task
    model: str
    data: str
    gpus: int
    method: Method
    reward: str


def command(
    task: Annotated[
        Task | None, typer.Option(help="sft: examples; preference: pairs (DPO); rl: prompts and a reward")
    ] = None,
    model: Annotated[str | None, typer.Option(help="checkpoint folder or hub id")] = None,
    data: Annotated[str | None, typer.Option(help="file, folder, hub id or named data set with the rows")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, max=4096, help="number of GPUs; 0 trains on the CPU")] = None,
    method: Annotated[Method | None, typer.Option(help="lora: a LoRA of rank 16; full: all weights")] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="of rl: a built-in reward, or the dotted path of a function; default exact_match"),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="copy a recipe, such as arithmetic_cpu; `list` prints them")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file to write; default run.yaml, or NAME.yaml of a recipe")
    ] = None,
) -> None:
    """Write a commented configuration."""
    if recipe is not None:
        answered = {"--task": task, "--model": model, "--data": data, "--gpus": gpus, "--method": method}
        answered["--reward"] = reward
        if used := [option for option, answer in answered.items() if answer is not None]:
            raise ConfigError(f"{used[0]} has no effect with --recipe; change the values of the copied file instead")
        print("\n".join(_recipe_lines() if recipe == "list" else copy_recipe(recipe, output)))
        return
    output = output or Path("run.yaml")
    _require_new(output)
    answers = Answers(
        task=task or _ask("--task", "Task (sft: examples, preference: pairs, rl: reward)", "sft", get_args(Task)),
        model=model or _ask("--model", "Model (folder or hub id)", "Qwen/Qwen3-0.6B"),
        data=data or _ask("--data", "Data (file, folder or hub id)", "train.jsonl"),
        gpus=gpus if gpus is not None else _ask("--gpus", "GPUs (0: CPU)", 0),
        method=method or _ask("--method", "Method (lora, full)", "lora", get_args(Method)),
        reward=reward or "exact_match",
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(configuration(answers, output), encoding="utf-8")
    print(f"wrote {output}; next:\n  {check(answers, output)}\n  {start(answers, output)}")


def _require_new(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"{file} already exists; choose another --output")


def _recipe_lines() -> list[str]:
    """Return name and first sentence of each recipe of the package."""
    lines = []
    for name, file in sorted(_recipes().items()):
        comment = " ".join(line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("# "))
        lines.append(f"{name:<26}{re.split(r'[.:] ', comment)[0].removesuffix('.')}")
    return lines


def _recipes() -> dict[str, Path]:
    return {file.stem: file for file in (Path(archon.__file__).parent / "rl" / "recipes").glob("*.yaml")}


def copy_recipe(name: str, output: Path | None) -> list[str]:
    """Copy a recipe, and the bootstrap file that it names, next to each other; return the lines to print.

    Args:
        name: name of a file in `rl/recipes`, without its suffix.
        output: copy of the recipe; None: of the same name in this folder.

    Raises:
        ConfigError: there is no such recipe, or a file would be replaced.
    """
    recipes = _recipes()
    if name not in recipes:
        raise ConfigError(f"no recipe {name}; expected one of {', '.join(sorted(recipes))}")
    output = output or Path(f"{name}.yaml")
    copies = {name: output}
    if bootstrap := re.search(r"^bootstrap: (\S+)\.yaml$", recipes[name].read_text(encoding="utf-8"), re.MULTILINE):
        copies[bootstrap[1]] = output.with_name(f"{bootstrap[1]}.yaml")
    for recipe, file in copies.items():
        _require_new(file)
        if recipe != name and file == output:
            raise ConfigError(f"{output} is the name of the recipe's bootstrap file; choose another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    for recipe, file in copies.items():
        text = recipes[recipe].read_text(encoding="utf-8")
        file.write_text(text.replace(f"rl/recipes/{recipe}.yaml", shlex.quote(str(file))), encoding="utf-8")
    commands = re.findall(r"^#   (archon .*)$", output.read_text(encoding="utf-8"), re.MULTILINE)
    return [f"wrote {' and '.join(map(str, copies.values()))}; next:", *(f"  {command}" for command in commands)]


def _ask(option: str, question: str, default: str | int, allowed: Sequence[str] = ()) -> Any:
    """Ask until the answer is allowed, and of the type of `default`. Raises ConfigError without a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{option} is missing, and standard input is not a terminal to ask on; set it")
    while True:
        answer = typer.prompt(question, default=default, type=type(default))
        is_negative = isinstance(answer, int) and answer < 0
        if not is_negative and (not allowed or answer in allowed):
            return answer
        print(f"expected {' or '.join(allowed) or 'at least 0'}")


def start(answers: Answers, file: Path) -> str:
    """Return the command that starts the run of `file`."""
    launch = f"launch --nproc-per-node {answers.gpus} " if answers.gpus > 1 else ""
    return f"archon {launch}{answers.task} --config {shlex.quote(str(file))}"


def check(answers: Answers, file: Path) -> str:
    """Return the command that checks `file`, in one process."""
    return f"archon {answers.task} --config {shlex.quote(str(file))} --dry-run"


def configuration(answers: Answers, file: Path) -> str:
    """Return the text of the configuration."""
    task, on_gpu = answers.task, answers.gpus > 0
    name = re.sub(r"[^\w.-]+", "-", Path(answers.model).name)
    recompute = "full}   # the generator needs memory too" if task == "rl" else "auto}   # recompute what does not fit"
    return f"""\
# {check(answers, file)}   # checks this file, the model and the data
# {start(answers, file)}   # starts the run
# archon {task} --help lists all fields, and KEY=VALUE overrides them on the command line.
run_dir: runs/{task}-{name}   # metrics, checkpoints, the report and the exported model

{"actor" if task == "rl" else "model"}:
  path: {json.dumps(answers.model)}
  layout: d{max(1, answers.gpus)}   # d: FSDP shards; `archon plan` compares layouts
  # Computation; master weights are float32.
  dtype: {"bfloat16" if on_gpu else "float32"}
  # Tokens of a packed micro-batch; fewer need less memory.
  max_tokens_per_mb: {16384 if on_gpu else 4096}
{f"  activation_checkpoint: {{mode: {recompute}" + chr(10) if on_gpu else ""}\
{"  lora: {rank: 16, alpha: 32}" + chr(10) if answers.method == "lora" else ""}\
  optimizer: {{lr: {LEARNING_RATES[task, answers.method]}}}
  # Warm up for a twentieth of the steps.
  scheduler: {{kind: cosine, warmup_steps: 0.05, min_lr_ratio: 0.1}}

{TASKS[task].format(data=json.dumps(answers.data), rows=64 if on_gpu else 16, reward=json.dumps(answers.reward))}
# Steps between checkpoints; `resume=true` continues from the last one.
checkpoint: {{every: 50}}
"""
