"""What the README shows is run here unchanged."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from archon.parallel.layout import parse_layout
from archon.training.metrics import read_jsonl
from tests.distributed.runs import make_inputs
from tests.tolerances import PARITY_FP32

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def shown(name: str, language: str = "python") -> str:
    """The block behind `<!-- test: name -->`, of whichever page has it."""
    block = re.compile(rf"<!-- test: {name} -->\n```{language}\n(.*?)```", re.DOTALL)
    blocks = [text for page in markdown_pages() for text in block.findall(page.read_text())]
    assert len(blocks) == 1, f"{len(blocks)} pages show a {language} block named {name}"
    return blocks[0]


@functools.cache
def markdown_pages() -> tuple[Path, ...]:
    """The README, the guides of the packages and the pages of docs/."""
    folders = ("", "archon", "models", "parallel", "rl", "docs", "docs/*")
    return tuple(page for folder in folders for page in sorted(ROOT.glob(f"{folder}/*.md" if folder else "*.md")))


def test_the_plain_loop_trains_a_checkpoint_that_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    Qwen3ForCausalLM(config).save_pretrained("checkpoint")
    code, names = shown("plain-loop"), dict[str, object]()
    assert len(code.strip().splitlines()) <= 20

    exec(compile(code, str(README), "exec"), names)

    before = AutoModelForCausalLM.from_pretrained("checkpoint")
    after = AutoModelForCausalLM.from_pretrained("trained")
    document = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        ours = names["model"](document, torch.arange(5)[None], torch.tensor([0, 5], dtype=torch.int32), 5)
        theirs = after(document).logits
        first = before(document).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=PARITY_FP32 * float(theirs.abs().max()))

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[0, :-1], document[0, 1:])

    assert loss(theirs) < loss(first) - 0.1


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(3000)
def test_a_layout_is_chosen_checked_and_trained_with_from_a_folder_without_weights(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    (tmp_path / "blank").rename(tmp_path / "model")
    programs = {"archon": ["archon"], "torchrun": ["torch.distributed.run", "--standalone"]}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for line in shown("choose-check-train", "bash").splitlines():
        program, *arguments = shlex.split(line, comments=True)
        done = subprocess.run(
            [sys.executable, "-m", *programs[program], *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}"

    planned = yaml.safe_load((tmp_path / "run.yaml").read_text())["model"]["layout"]
    assert parse_layout(planned).world_size == 2
    # 90 rows in batches of 512 / 64, the last one filled up.
    last = read_jsonl(tmp_path / "runs" / "planned" / "metrics.jsonl")[-1]
    assert last["step"] == 12 and math.isfinite(last["loss"])


def test_the_reward_of_the_rl_guide_scores_through_the_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from archon.rl import AsyncRewardWrapper

    (tmp_path / "guide_rewards.py").write_text(shown("reward"))
    monkeypatch.syspath_prepend(tmp_path)

    with AsyncRewardWrapper("guide_rewards.close_enough", max_workers=1) as reward:
        score = asyncio.run(reward("2+2=", "4", [1], [2], answer="4"))

    assert float(score) == pytest.approx(1.1)
    assert score.parts == {"right": 1.0, "short": pytest.approx(0.1)}


def test_the_workflow_of_the_rl_guide_returns_trajectories_that_are_accepted() -> None:
    from archon.models.qwen3 import Qwen3Model, Qwen3ModelArgs
    from archon.rl import GenerationHyperparameters, InProcessEngine
    from archon.rl.bootstrap import make_tokenizer
    from archon.rl.prompts import Prompt
    from archon.rl.rollout import Rollout
    from archon.training.config import TokenizerRecipe

    names: dict[str, object] = {}
    exec(compile(shown("workflow"), "guide", "exec"), names)
    tokenizer = make_tokenizer(TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain"))
    args = Qwen3ModelArgs(
        dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=16, vocab_size=len(tokenizer)
    )
    torch.manual_seed(0)
    model = Qwen3Model(args)
    model.init_weights()
    model.init_buffers("cpu")
    workflow = names["ShorterIsBetter"](GenerationHyperparameters(n_samples=3, max_new_tokens=4), tokenizer)
    rollout = Rollout(InProcessEngine.from_model(model, tokenizer, max_slots=4), workflow)
    prompts = [Prompt(index, {"prompt": "1+1="}) for index in range(2)]

    batch = asyncio.run(rollout.collect(lambda n: prompts[:n], 2, 0))

    lengths = batch.trajectories["loss_mask"].sum(1)
    assert batch.trajectories["rewards"].tolist() == (-lengths).tolist()


@pytest.mark.slow
def test_the_family_of_the_models_guide_is_installed_listed_and_passes_its_contracts(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (tmp_path / "pyproject.toml").write_text(shown("own-package-project", "toml"))
    (tmp_path / "my_llama.py").write_text(shown("own-package-family"))
    install, listing, check = shown("own-package-commands", "bash").splitlines()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}

    def run(line: str, *further: str) -> str:
        program, *arguments = shlex.split(line, comments=True)
        command = [sys.executable, "-m", program, *arguments, *further]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    run(install, "--quiet", "--no-index", "--no-build-isolation", "--target", str(site))
    (tmp_path / "my_llama.py").unlink()  # what was installed is what is found
    assert re.search(r"^my_llama +my_llama.MyLlamaModel$", run(listing), flags=re.M)
    contracts = ("parameters", "parity", "config fields", "round trip", "isolation", "generation")
    found = run(check, *(x for name in contracts for x in ("--only", name)))
    assert found.count("✓") == len(contracts), found


def anchors(page: Path) -> set[str]:
    """The fragments that the headings of a page have on GitHub."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_section_and_recipe_that_the_pages_name_is_there() -> None:
    missing = []
    pages = subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).splitlines()
    for page in map(ROOT.joinpath, pages):
        text = page.read_text()
        made_there = re.findall(r"--output (\S+)", text)
        for path, fragment in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
            target = page.parent / path if path else page
            if not target.exists() or (fragment and target.suffix == ".md" and fragment not in anchors(target)):
                missing.append(f"{page.relative_to(ROOT)}: {path}#{fragment}")
        for path in re.findall(r"--config (\S+\.yaml)", text):
            if path not in made_there and "/" in path and not (ROOT / path).exists():
                missing.append(f"{page.relative_to(ROOT)}: {path}")
    assert missing == []


def test_the_readme_is_short_and_starts_with_something_to_run() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("make demo") for line in lines[:20])
