"""Run every archon command on a small transformers checkpoint of every family.

    python -m benchmarks.family_commands --record benchmarks/records/family_commands.jsonl     # ten minutes on 2 cores
    python -m benchmarks.family_commands --record benchmarks/records/family_commands.jsonl --only llama

A line of the record is one command with one model type: its result or its failure; `--only` keeps the other lines. The
cards of the families show the same rows. The exit code is 1 if a command failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from archon.checkpoint.hf_io import load_model, save_model
from archon.cli import main as archon_main
from archon.models import get_model_spec
from archon.rl.bootstrap import make_tokenizer
from archon.tools.bench.origin import ROOT, commit, versions
from archon.tools.check.decoding import transformers_greedy_tokens
from archon.tools.check.family import CheckedFamily
from archon.tools.check.oracle import (
    ContractError,
    family_config,
    hf_model,
    is_passthrough,
    random_config,
    randomize_vectors,
)
from archon.tools.check.round_trip import EXPORTED_AS_RELEASED, folder_tensors
from archon.training.config import TokenizerRecipe
from archon.training.metrics import read_jsonl
from benchmarks.command_rows import MARKS, RECORD, Row, card_with_commands
from benchmarks.families import CARDS, checked_families
from benchmarks.harness import say

PROMPT = "1+2="
NEW_TOKENS = 6
STEPS = 2
SEED = 1


@dataclass(frozen=True)
class Subject:
    """A checkpoint of a family, its training data, and transformers' answer.

    Attributes:
        folder: the checkpoint, with a character tokenizer.
        work: an empty directory for command outputs.
        parameters: number of parameters.
        answer: transformers' greedy answer to `PROMPT`, as text.
        served: the same answer up to the first end-of-text token.
    """

    folder: Path
    work: Path
    parameters: int
    answer: str
    served: str

    @property
    def data(self) -> list[str]:
        """Overrides that name the prompts and answers of a run."""
        return [
            f"train_data.path={self.work / 'sums.jsonl'}",
            "train_data.prompt_key=prompt",
            "train_data.response_key=response",
        ]


def make_subject(family: CheckedFamily, work: Path) -> Subject:
    """Write a checkpoint with random weights by `save_pretrained` of transformers, in the form of published ones."""
    assert family.reference is not None, family.model_type
    tokenizer = make_tokenizer(TokenizerRecipe(kind="characters", alphabet="0123456789+= ", chat_template="plain"))
    fields = get_model_spec(family.model_type).model_args_class.hf_fields.keys()
    plain = {"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False}
    config = random_config(
        SEED, family.model_type, family.reference, rope_kind="default", vocab_size=len(tokenizer),
        max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        **{name: value for name, value in plain.items() if name in fields},
    )  # fmt: skip
    torch.manual_seed(SEED)
    theirs = hf_model(config)
    theirs.eval()
    randomize_vectors(theirs)
    folder = work / "checkpoint"
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family.model_type != family.reference:
        (folder / "config.json").write_text(json.dumps(family_config(config, family.model_type)))
    if family.model_type in EXPORTED_AS_RELEASED:
        model = load_model(folder, dtype=torch.float32, text_only=True)
        save_model(model, work / "released", like=folder)
        folder = work / "released"
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(4) for b in range(4)]
    (work / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = transformers_greedy_tokens(theirs, tokenizer.encode(PROMPT), NEW_TOKENS)
    end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
    answer, served = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:end]))
    adapter = get_model_spec(family.model_type).state_dict_adapter_class(family_config(config, family.model_type))
    parameters = sum(w.numel() for name, w in theirs.named_parameters() if not is_passthrough(adapter, name))
    return Subject(folder, work, parameters, answer, served)


def run(*arguments: object, refusal: bool = False) -> str:
    """Run `archon ARGUMENTS…` in this process and return its output, or its one-line refusal with `refusal`.

    Raises:
        ContractError: the command ended otherwise.
    """
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            archon_main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0
    if code != (2 if refusal else 0):
        said = [line for line in errors.getvalue().splitlines() if line.strip()] or ["nothing"]
        raise ContractError(f"archon {arguments[0]} exits with {code} and says: {said[-1]}")
    return errors.getvalue() if refusal else out.getvalue()


def require(holds: bool, text: str) -> None:
    if not holds:
        raise ContractError(text)


def inspect(subject: Subject) -> str:
    said = run("inspect", subject.folder, "--seq-len", 32)
    wanted = f"parameters   {subject.parameters:,}"
    require(wanted in said, f"it does not say {wanted!r}: {said}")
    return f"{subject.parameters:,} parameters, as in transformers"


def plan(subject: Subject) -> str:
    said = json.loads(run("plan", subject.folder, "--gpus", 4, "--seq", 32, "--tokens", 1024, "--json"))
    layout = said["config"]["model"]["layout"]
    return f"{layout} for 4 GPUs"


def bench(subject: Subject) -> str:
    file = subject.work / "bench.json"
    run("bench", subject.folder, "d1", "--tokens", 64, "--seq", 16, "--steps", 1, "--record", file)
    [row] = json.loads(file.read_text())["rows"]
    require(row.get("error") is None, f"its row says {row.get('error')}")
    return "a step measured"


def doctor(subject: Subject) -> str:
    run("doctor", subject.folder, "--tokens", 64, "--dtype", "float32")
    run("doctor", subject.folder, "--tokens", 64, "--layout", "d2", "--rank", 1)
    return "d1 run, rank 1 of d2 predicted"


def generate(subject: Subject) -> str:
    options = ("greedy=true", "ignore_eos=true", f"max_new_tokens={NEW_TOKENS}", "device=cpu")
    said = run("generate", subject.folder, "--prompt", PROMPT, *options)
    answer = said.split("\n", 1)[1].removesuffix("\n")
    require(answer == subject.answer, f"it answers {answer!r}, transformers {subject.answer!r}")
    return f"{NEW_TOKENS} greedy tokens as transformers"


def serve(subject: Subject) -> str:
    command = [sys.executable, "-m", "archon", "serve", str(subject.folder), "--port", "0", "device=cpu"]
    with subprocess.Popen(
        [*command, f"max_new_tokens={NEW_TOKENS}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        line = server.stdout.readline()
        try:
            require(line.startswith("serving "), f"it says: {line or server.stderr.read()[-200:]}")
            body = json.dumps({"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}).encode()
            url = f"{line.split()[3]}/chat/completions"
            asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=120) as response:
                answer = json.load(response)["choices"][0]["message"]["content"]
        finally:
            server.send_signal(signal.SIGINT)
        code = server.wait(timeout=60)
    require(code == 0, f"it ends with {code} after Ctrl-C")
    require(answer == subject.served, f"it answers {answer!r}, transformers {subject.served!r}")
    return "the same answer over HTTP"


def sft(subject: Subject) -> str:
    folder = subject.work / "sft"
    options = (f"run_dir={folder}", f"model.path={subject.folder}", f"total_steps={STEPS}", "batch_size=4")
    run("sft", *options, *subject.data, "model.optimizer.lr=1e-3", "model.device=cpu")
    return trained(subject, folder)


def rl(subject: Subject) -> str:
    folder = subject.work / "rl"
    run(
        "rl", f"run_dir={folder}", f"actor.path={subject.folder}", f"total_steps={STEPS}", *subject.data,
        "reward=exact_match", "actor.device=cpu", "algorithm.kl.coef=0", "evaluation.every=0",
        "rollout.prompts_per_step=2", "rollout.workers.rewards=1", "gconfig.n_samples=2", "gconfig.max_new_tokens=4",
        "generator.max_slots=4",
    )  # fmt: skip
    return trained(subject, folder)


def trained(subject: Subject, folder: Path) -> str:
    """Check the metrics and the export of a run, and return a summary."""
    steps = [line for line in read_jsonl(folder / "metrics.jsonl") if "loss" in line or "actor/loss" in line]
    require(len(steps) == STEPS, f"{len(steps)} steps in its metrics, expected {STEPS}")
    losses = [line.get("loss", line.get("actor/loss")) for line in steps]
    require(all(math.isfinite(loss) for loss in losses), f"its losses are {losses}")
    before, after = folder_tensors(subject.folder), folder_tensors(folder / "export")
    require(before.keys() == after.keys(), f"its export differs by {sorted(before.keys() ^ after.keys())[:3]}")
    load_model(folder / "export")
    return f"{STEPS} steps, and an export with the checkpoint's names"


def to_dcp(subject: Subject) -> str:
    run("convert", subject.folder, subject.work / "dcp", "--to", "dcp")
    return returned(subject, "dcp")


def to_hf(subject: Subject) -> str:
    run("convert", subject.folder, subject.work / "native", "--to", "native")
    return returned(subject, "native")


def to_megatron(subject: Subject) -> str:
    try:
        run("convert", subject.folder, subject.work / "megatron", "--to", "megatron")
    except ContractError:
        said = run("convert", subject.folder, subject.work / "megatron", "--to", "megatron", refusal=True)
        reason = re.search(r"archon: (?:.*\.json: )?(.+)", said)
        require(reason is not None and "megatron-core's GPTModel" in said, f"it does not name what it refuses: {said}")
        assert reason is not None
        return f"refused: {reason[1].partition(';')[0]}"
    return returned(subject, "megatron")


def returned(subject: Subject, kind: str) -> str:
    """Convert back to Hugging Face, compare, and return a summary."""
    target = subject.work / f"from_{kind}"
    run("convert", subject.work / kind, target, "--to", "hf", "--like", subject.folder)
    before, after = folder_tensors(subject.folder), folder_tensors(target)
    require(before.keys() == after.keys(), f"{kind} and back differs by {sorted(before.keys() ^ after.keys())[:3]}")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    require(not changed, f"{kind} and back changes {changed[:3]}")
    return f"{len(before)} tensors bitwise there and back"


COMMANDS: dict[str, Callable[[Subject], str]] = {
    "inspect": inspect,
    "plan": plan,
    "bench": bench,
    "doctor": doctor,
    "generate": generate,
    "serve": serve,
    "sft": sft,
    "rl": rl,
    "convert --to dcp": to_dcp,
    "convert --to hf": to_hf,
    "convert --to megatron": to_megatron,
}


def check_commands(family: CheckedFamily, only: Collection[str] = COMMANDS.keys()) -> Iterator[Row]:
    """Yield the row of each command, or of those in `only`, and continue after failures."""
    with tempfile.TemporaryDirectory() as work:
        subject = make_subject(family, Path(work))
        for name in only:
            started, passed = time.monotonic(), True
            try:
                text = COMMANDS[name](subject)
            except ContractError as error:
                text, passed = " ".join(str(error).split()), False
            except Exception as error:
                text, passed = f"{type(error).__name__}: {' '.join(str(error).split())}", False
            yield Row(family.model_type, name, passed, text, round(time.monotonic() - started, 1))


def sweep(families: Sequence[CheckedFamily], record: Path) -> bool:
    """Run the commands of the families, write record and cards, and return whether all passed."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    held = True
    for family in families:
        rows = []
        for row in check_commands(family):
            rows.append(row)
            say(f"{row.model_type:<16} {MARKS[row.passed]} {row.command}: {row.found} ({row.seconds} s)")
            held &= row.passed
        origin = {"commit": commit(), "versions": versions()}
        lines = [line for line in lines if line["model_type"] != family.model_type] + [asdict(r) | origin for r in rows]
        lines.sort(key=lambda line: (line["model_type"], [*COMMANDS].index(line["command"])))
        record.write_text("".join(json.dumps(line) + "\n" for line in lines))
        card = CARDS / f"{family.model_type}.md"
        above = card.read_text(encoding="utf-8") if card.exists() else f"# {family.model_type}\n"
        card.write_text(card_with_commands(above, rows), encoding="utf-8")
    return held


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD, help="write this record")
    parser.add_argument("--only", action="append", metavar="TYPE", help="this model type alone; may be repeated")
    chosen = parser.parse_args(arguments)
    families = checked_families()
    if chosen.only and (unknown := {*chosen.only} - {family.model_type for family in families}):
        parser.error(f"no built-in family has the model type {sorted(unknown)[0]!r}")
    if not sweep([f for f in families if not chosen.only or f.model_type in chosen.only], chosen.record):
        sys.exit(1)


if __name__ == "__main__":
    main()
