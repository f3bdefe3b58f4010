"""Every command that reads data, on random rows and files: it uses every row, or refuses the data in one line."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from archon.checkpoint.tokenizer import load_tokenizer
from archon.cli.config import leaves
from archon.cli.eval_config import EvalConfig
from archon.cli.generate_config import GenerateConfig
from archon.cli.serve_config import ServeConfig
from archon.data.config import DatasetConfig, TrainingDataConfig
from archon.data.encoding import encode_prompt
from archon.data.registry import load_rows
from archon.data.token_rows import row_lengths
from archon.rl.config import RLConfig
from archon.schema.config import StrictModel
from archon.schema.errors import DatasetError
from archon.training.config import PreferenceConfig, SFTConfig
from archon.training.metrics import read_jsonl
from archon.training.sft import TOKEN_COLUMNS
from tests.cli.random_data import (
    WORD,
    Case,
    gold_answer,
    pair_answers,
    random_case,
    random_override,
    random_prompts,
    sft_answers,
    word_counts,
)
from tests.data.toy_tokenizers import CHATML, THINKING, toy_tokenizer

FULL = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' and m.name %}{{ m.name }}: {% endif %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"full": FULL, "chatml": CHATML, "thinking": THINKING, "none": None}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A Qwen3 of some thousand parameters for each chat template."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folders = {}
    for name, template in TEMPLATES.items():
        folder = folders[name] = tmp_path_factory.mktemp("random-data") / name
        tokenizer = toy_tokenizer(template)
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 512, "vocab_size": len(tokenizer)}
        Qwen3ForCausalLM(Qwen3Config(**sizes, eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch) -> None:
    """A run's curves as PNG take longer than the run."""
    monkeypatch.setattr("archon.tools.report.draw_curves", lambda run, folder: [])


async def length(prompt, completions, prompt_ids, completion_ids, **row) -> float:
    """A reward that reads no answer."""
    return float(len(completions))


def complaint(outcome, *names: object) -> str:
    """Return the one line of a user error, which names the data or the option."""
    assert outcome.code == 2, outcome
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("archon: "), outcome.err[-3000:]
    assert len(lines[0]) < 1500, lines[0]
    assert any(str(name) in lines[0] for name in names), lines[0]
    return lines[0]


def data_options(draw: random.Random, kind: str) -> dict[str, object]:
    """Return random options of a data section."""
    options: dict[str, object] = {}
    if draw.random() < 0.2:
        options["max_length"] = draw.choice([8, 24, 60])
    if draw.random() < 0.1:
        options["limit"] = draw.choice([1, 2, 100])
    if draw.random() < 0.1:
        options["system_prompt"] = "Q90"
    if draw.random() < 0.1:
        options["instruction"] = "Q91"
    if kind == "sft" and draw.random() < 0.2:
        options["train_turns"] = "last"
    return options


def as_overrides(section: str, path: Path, options: dict[str, object]) -> list[str]:
    return [f"{section}.path={path}", *(f"{section}.{name}={value}" for name, value in options.items())]


def trained_text(tokenizer, row, side: str = "") -> str:
    ids, mask = (row[f"{side}_ids"], row[f"{side}_loss_mask"]) if side else (row["input_ids"], row["loss_mask"])
    return tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained])


def checked_rows(case: Case, kind: str, template: str, options: dict[str, object], tokenizer):
    """Return the rows that a run reads, after checks: each row is there or counted, and only answers are trained."""
    config = TrainingDataConfig(path=str(case.path), **options)
    loaded = load_rows(config, kind, tokenizer)
    whole = load_rows(config.model_copy(update={"max_length": None, "limit": None}), kind, tokenizer)
    assert len(whole) == len(case.rows)
    fitting = [row for row in whole if max(row_lengths([row], TOKEN_COLUMNS)) <= options.get("max_length", 10**9)]
    assert loaded.n_filtered == len(whole) - len(fitting)
    assert list(loaded) == fitting[: options.get("limit")]
    answers = []
    if kind == "sft":
        answers.append(("", sft_answers(case.rows, template, options.get("train_turns", "all"))))
    else:
        answers += [(side, pair_answers(case.rows, side)) for side in ("chosen", "rejected")]
    for side, expected in answers:
        for number, row in enumerate(whole):
            text = trained_text(tokenizer, row, side)
            assert text and not any(word.startswith("Q") for word in word_counts(text)), text
            if case.regular and expected is not None:
                assert word_counts(text) == expected[number], (text, expected[number])
            if case.regular and number != case.mutated:
                unexpected = WORD.sub("", re.sub(r"<tool_call>.*?</tool_call>|</?think>|<\|im_end\|>", "", text))
                assert text.endswith("<|im_end|>") and not unexpected.strip(), (text, unexpected)
    return loaded


def row_count(rows) -> str:
    """Return the line of a dry run that counts the training rows."""
    return f"train_data: {len(rows):,} rows" + (f", {rows.n_filtered:,} too long" if rows.n_filtered else "")


def run_training(archon, checkpoints, folder: Path, draw: random.Random, kind: str, dry_run: bool) -> bool:
    """Train on a random data set, or check it, and compare the counts of the run; return whether it is accepted."""
    template = draw.choice(["full", *TEMPLATES])
    case = random_case(draw, kind, folder / "data")
    options = data_options(draw, kind)
    overrides = [f"run_dir={folder / 'run'}", f"model.path={checkpoints[template]}", "batch_size=3"]
    overrides += [*as_overrides("train_data", case.path, options), "model.optimizer.lr=1e-3"]
    command = ["sft"]
    if kind == "dpo":
        command = ["preference", f"loss={draw.choice(['dpo', 'ipo', 'reward'])}"]
    held_out = draw.random() < 0.3
    overrides += as_overrides("eval_data", case.path, options | {"split": "train"}) if held_out else []
    outcome = archon(*command, *overrides, *["--dry-run"] * dry_run)
    if outcome.code:
        complaint(outcome, file_of(case))
        return False
    assert case.rows is not None, f"{case.path} is broken"
    tokenizer = load_tokenizer(str(checkpoints[template]))
    rows = checked_rows(case, kind, template, options, tokenizer)
    if dry_run:
        assert f"# {row_count(rows)}\n" in outcome.out
        assert (f"# eval_data: {len(rows):,} rows" in outcome.out) == held_out
        marked = "".join(part.partition("»")[0] for part in outcome.out.split("«")[1:])
        assert not any(word.startswith("Q") for word in word_counts(marked))
        return True
    metrics = read_jsonl(folder / "run" / "metrics.jsonl")
    assert len(metrics) == -(-len(rows) // 3) and ("eval/loss" in metrics[-1]) == held_out
    if kind == "sft":
        assert sum(record["loss_weight"] for record in metrics) == sum(sum(row["loss_mask"][1:]) for row in rows)
    else:
        tokens = sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows)
        assert sum(record["tokens"] for record in metrics) == tokens + 2 * len(rows) * ("loss=reward" in command)
    return True


def checked_prompts(case: Case, options: dict[str, object], tokenizer):
    """Return the RL rows that a run reads, after checks: each row is there or counted, and no prompt has its answer."""
    config = DatasetConfig(path=str(case.path), **options)
    loaded = load_rows(config, "rl", tokenizer)
    whole = load_rows(config.model_copy(update={"max_length": None, "limit": None}), "rl", tokenizer)
    assert len(whole) == len(case.rows)
    prompts = [_prompt(tokenizer, row, case) for row in whole]
    numbers = [number for number, text in enumerate(prompts) if len(text[0]) <= options.get("max_length", 10**9)]
    assert loaded.n_filtered == len(whole) - len(numbers)
    assert repr(list(loaded)) == repr([whole[number] for number in numbers][: options.get("limit")])  # NaN != NaN
    for number, (source, row, (_, text)) in enumerate(zip(case.rows, whole, prompts, strict=True)):
        if case.regular and number != case.mutated:
            assert gold_answer(source) == (word_counts(row["answer"] or "") if "answer" in row else None)
            if text and "messages" not in source and "conversations" not in source:
                assert {word[0] for word in word_counts(text)} == {"Q"}
    return loaded


def _prompt(tokenizer, row, case: Case) -> tuple[list[int], str]:
    """Return a prompt as tokens and text; empty if the chat template refuses the row, which costs its episodes."""
    try:
        ids = encode_prompt(tokenizer, row)
    except DatasetError as error:
        assert str(error).startswith(str(file_of(case)))  # noqa: PT017
        return [], ""
    return ids, tokenizer.decode(ids)


def file_of(case: Case) -> Path:
    """Return the path that an error names."""
    return case.path.parent if "*" in case.path.name else case.path


def run_rl(archon, checkpoints, folder: Path, draw: random.Random, dry_run: bool) -> bool:
    template = draw.choice(["full", *TEMPLATES])
    case, options = random_case(draw, "rl", folder / "data"), data_options(draw, "rl")
    step = draw.randint(1, 4)
    overrides = [f"run_dir={folder / 'run'}", f"actor.path={checkpoints[template]}", f"reward={__name__}.length"]
    overrides += [*as_overrides("train_data", case.path, options), "total_steps=1", f"rollout.prompts_per_step={step}"]
    overrides += ["gconfig.n_samples=2", "gconfig.max_new_tokens=2", "generator.max_slots=8", "rollout.dump_groups=9"]
    outcome = archon("rl", *overrides, *["--dry-run"] * dry_run)
    if outcome.code:
        complaint(outcome, file_of(case), "RLVRWorkflow failed")
        return False
    assert case.rows is not None, f"{case.path} is broken"
    tokenizer = load_tokenizer(str(checkpoints[template]))
    rows = checked_prompts(case, options, tokenizer)
    if dry_run:
        assert f"# {row_count(rows)}\n" in outcome.out
        return True
    [metrics] = read_jsonl(folder / "run" / "metrics.jsonl")
    lost = sum(value for name, value in metrics.items() if name.startswith("rollout/dropped/"))
    lost += 2 * sum(value for name, value in metrics.items() if name.startswith("rollout/failed/"))
    assert metrics["samples"] + lost == 2 * step
    records = read_jsonl(folder / "run" / "trajectories.jsonl")
    texts = {_prompt(tokenizer, row, case)[1] for row in rows}
    assert len(records) == metrics["samples"] and {record["prompt"] for record in records} <= texts
    return True


def run_eval(archon, checkpoints, folder: Path, draw: random.Random, url: bool) -> bool:
    template = draw.choice(["full", *TEMPLATES])
    case, options = random_case(draw, "rl", folder / "data"), data_options(draw, "rl")
    overrides = [f"data.{name}={value}" for name, value in options.items()] + ["data.split=train", "max_new_tokens=2"]
    model: list[object] = [checkpoints[template]]
    if url:
        Endpoint.requests.clear()
        has_tokenizer = draw.random() < 0.5 or "max_length" in options
        model = ["--url", Endpoint.url, *[f"tokenizer={checkpoints[template]}"] * has_tokenizer]
    out = folder / "out"
    outcome = archon(
        "eval", *model, "--data", case.path, f"reward={__name__}.length", "--n", 2, "--out", out, *overrides
    )
    if outcome.code:
        complaint(outcome, file_of(case))
        return False
    assert case.rows is not None, f"{case.path} is broken"
    rows = checked_prompts(case, options, load_tokenizer(str(checkpoints[template])))
    result, records = json.loads((out / "results.json").read_text()), read_jsonl(out / "answers.jsonl")
    assert result["prompts"] == len(rows) and result["answers"] == len(records)
    assert len(records) + sum(result["lost"].values()) == 2 * len(rows)
    for record in records:
        assert record.get("answer") == rows[record["group"]].get("answer")
    if url:
        asked = Counter(json.dumps(body.get("messages", body.get("prompt"))) for body in Endpoint.requests)
        expected = Counter(json.dumps(row["messages"]) for row in rows for _ in range(2))
        assert result["lost"] or asked == expected
    return True


def run_generate(archon, checkpoints, folder: Path, draw: random.Random) -> bool:
    checkpoint = checkpoints[draw.choice([*TEMPLATES])]
    data, prompts = random_prompts(draw)
    folder.mkdir()
    file = folder / draw.choice(["prompts.txt", "größe 1.txt", "a#b", "x=y.jsonl"])
    file.write_bytes(data)
    samples = draw.choice([1, 1, 2])
    arguments: list[object] = [checkpoint, "max_new_tokens=2", f"n_samples={samples}"]
    match draw.randrange(4):
        case 0:
            arguments.append(f"prompts_file={file}")
        case 1:
            config = folder / "config.yaml"
            config.write_text(yaml.safe_dump({"prompts_file": str(file)}))
            arguments += ["--config", config]
        case 2 if prompts is not None:
            arguments += [f"--prompt={prompt}" for prompt in prompts]
        case _:
            arguments += ["--prompts-file", file]
    outcome = archon("generate", *arguments)
    if outcome.code:
        complaint(outcome, file, "prompt")
        return False
    assert prompts is not None
    headings = re.findall(r"^# prompt (\d+)", outcome.out, re.MULTILINE)
    assert sorted(map(int, headings)) == sorted(number + 1 for number in range(len(prompts)) for _ in range(samples))
    assert f"{len(prompts) * samples} answers" in outcome.err
    return True


def run_bootstrap(archon, checkpoints, folder: Path, draw: random.Random) -> bool:
    case = random_case(draw, draw.choice(["sft", "rl"]), folder / "data")
    options = data_options(draw, "rl")
    sizes = "{hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
    sizes += "num_key_value_heads: 1, head_dim: 8}"
    overrides = [f"hf_config={sizes}", f"path={folder / 'made'}", "tokenizer.kind=bpe", "tokenizer.vocab_size=300"]
    texts = folder / "texts.jsonl"
    texts.write_text('{"prompt": "Q1 A1", "response": "Q2 A2"}\n')
    of_tokenizer = draw.random() < 0.5
    overrides += as_overrides("tokenizer.train_data", case.path if of_tokenizer else texts, {})
    overrides += as_overrides("warmup.train_data", texts if of_tokenizer else case.path, options)
    outcome = archon("bootstrap", *overrides, "--dry-run")
    if outcome.code:
        complaint(outcome, file_of(case), texts)
        return False
    assert case.rows is not None, f"{case.path} is broken"
    return True


def run_overrides(archon, checkpoints, folder: Path, draw: random.Random) -> bool:
    """Set random fields of a run to random values: each is accepted, or one line says why not."""
    folder.mkdir()
    checkpoint, data = checkpoints["full"], folder / "rows.jsonl"
    data.write_text('{"prompt": "Q1", "response": "A1", "chosen": "A1", "rejected": "A2"}\n')
    base = [f"run_dir={folder / 'run'}", f"train_data.path={data}"]
    commands: dict[str, tuple[type[StrictModel], list[object]]] = {
        "sft": (SFTConfig, [*base, f"model.path={checkpoint}", "--dry-run"]),
        "preference": (PreferenceConfig, [*base, f"model.path={checkpoint}", "--dry-run"]),
        "rl": (RLConfig, [*base, f"actor.path={checkpoint}", f"reward={__name__}.length", "--dry-run"]),
        "serve": (ServeConfig, [folder / "nowhere"]),
        "eval": (
            EvalConfig,
            [folder / "nowhere", "--data", data, f"reward={__name__}.length", "--out", folder / "out"],
        ),
        "generate": (GenerateConfig, [folder / "nowhere", "--prompt", "x"]),
    }
    command = draw.choice([*commands])
    schema, arguments = commands[command]
    overrides = [random_override(draw, leaves(schema)) for _ in range(draw.choice([1, 1, 2]))]
    outcome = archon(command, *arguments, *overrides)
    if outcome.code:
        complaint(outcome, "")
    return outcome.code == 0 or "nowhere" in outcome.err


COMMANDS = {
    "sft": partial(run_training, kind="sft", dry_run=False),
    "sft --dry-run": partial(run_training, kind="sft", dry_run=True),
    "preference": partial(run_training, kind="dpo", dry_run=False),
    "preference --dry-run": partial(run_training, kind="dpo", dry_run=True),
    "rl": partial(run_rl, dry_run=False),
    "rl --dry-run": partial(run_rl, dry_run=True),
    "eval": partial(run_eval, url=False),
    "eval --url": partial(run_eval, url=True),
    "generate": run_generate,
    "bootstrap --dry-run": run_bootstrap,
    "overrides": run_overrides,
}


LONG = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(40), id="0-39"),
        *(
            pytest.param(range(start, start + 46), id=f"{start}-{start + 45}", marks=[pytest.mark.slow, LONG])
            for start in range(40, 500, 46)
        ),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_random_input_is_used_or_refused_in_one_line(archon, checkpoints, endpoint, tmp_path, command, numbers):
    accepted = 0
    for number in numbers:
        folder = tmp_path / str(number)
        try:
            accepted += COMMANDS[command](archon, checkpoints, folder, random.Random(f"{command} {number}"))
        except BaseException as error:
            error.add_note(f"{command}, number {number}")
            raise
        shutil.rmtree(folder)
    assert accepted > len(numbers) / (50 if command == "overrides" else 4)


class Endpoint(BaseHTTPRequestHandler):
    """An OpenAI endpoint that always gives one answer, and keeps the requests."""

    url = ""
    requests: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        choice = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": "A1"}} if "messages" in body else {"text": "A1"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "x", "object": "x", "created": 0, "model": "x", "choices": [choice], "usage": usage}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def endpoint():
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        Endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield
        server.shutdown()
        thread.join()
