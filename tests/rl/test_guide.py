"""What the guide shows is run unchanged, and every name of archon's in it exists."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.cli.config import leaves
from archon.data.config import DatasetConfig
from archon.data.registry import load_rows
from archon.rl import AsyncRewardWrapper, GenerationHyperparameters, InProcessEngine, RLTrainer, get_custom_dataset
from archon.rl.algorithms.advantages import ADVANTAGES, AdvantageInputs
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.bootstrap import make_tokenizer
from archon.rl.config import RLConfig
from archon.rl.rewards import RewardRaised
from archon.schema.errors import ConfigError, DatasetError
from archon.schema.lazy import import_dotted
from archon.serve import AgentServer
from archon.training.config import PreferenceConfig, SFTConfig, TokenizerRecipe
from archon.training.metrics import read_jsonl
from tests.rl.written import assert_each_prompt_trained_once
from tests.serve.scripted import Scripted
from tests.small_qwen3 import small_model
from tests.test_readme import shown

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "tasks" / f"{name}.md" for name in ("agents", "ray", "rewards", "rl", "servers", "slurm", "workflows")]
BLOCKS = [block for page in PAGES for block in re.findall(r"<!-- test: (\S+) -->\n```(\w+)", page.read_text())]


@pytest.fixture
def my_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Make a module of a block of the guide; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(block: str) -> str:
        (tmp_path / f"guide_{block}.py").write_text(shown(block))
        return f"guide_{block}"

    return make


@pytest.mark.parametrize(("block", "language"), BLOCKS)
def test_every_example_is_short(block: str, language: str) -> None:
    assert len(shown(block, language).strip().splitlines()) < 25


def test_a_run_trains_with_the_advantage_and_the_dataset_of_the_guide(
    rl_config: Callable[..., RLConfig], my_package: Callable[[str], str]
) -> None:
    path = f"python:{my_package('dataset')}.sums"
    columns = {"prompt_key": "question", "response_key": "solution"}
    config = rl_config(
        total_steps=1,
        algorithm={"kl": {"coef": 0.0}, "advantage": f"{my_package('advantage')}.best_of_group"},
        train_data={"path": path, **columns},
        eval_data={"path": path, "split": "test", **columns},
        evaluation={"max_prompts": 4},
    )
    RLTrainer(config).train()
    assert_each_prompt_trained_once(config)
    rows = read_jsonl(Path(config.run_dir) / "trajectories.jsonl")
    for group in {row["group"] for row in rows}:
        answers = [row for row in rows if row["group"] == group]
        best = max(row["reward"] for row in answers)
        assert [row["advantage"] for row in answers] == [1.0 if row["reward"] == best else -1.0 for row in answers]


def test_the_advantage_with_settings_of_the_guide_is_checked_and_given_them(my_package: Callable[[str], str]) -> None:
    path = f"{my_package('settings')}.best_with_margin"
    settings = AlgorithmConfig.parse({"advantage": {"kind": path, "margin": 0.6}}).advantage
    inputs = AdvantageInputs(torch.tensor([1.0, 0.0, 3.0, 1.0]), torch.tensor([0, 0, 1, 1]), torch.ones(4, 2))
    assert settings.is_group_relative
    assert ADVANTAGES[path](inputs, settings).tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    with pytest.raises(ConfigError, match=r"advantage\.margin: got -1, input should be greater than or equal to 0"):
        AlgorithmConfig.parse({"advantage": {"kind": path, "margin": -1}})


def test_rows_of_a_function_keep_their_columns_and_their_splits(my_package: Callable[[str], str]) -> None:
    path = f"python:{my_package('dataset')}.sums"
    columns: dict[str, Any] = {"prompt_key": "question", "response_key": "solution"}
    train, test = (
        load_rows(DatasetConfig(path=path, split=split, **columns), "rl", None) for split in ("train", "test")
    )
    assert (len(train), len(test)) == (100, 20)
    assert train[7]["prompt"].strip() == "7+7=" and train[7]["answer"] == "14" and train[7]["digits"] == 2
    assert get_custom_dataset(path, split="test", **columns).rows == test.rows


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("python:no_such_package.rows", ConfigError, "dataset function 'no_such_package.rows' cannot be imported"),
        ("python:builtins.sorted", DatasetError, "row 1 is a str, expected a dictionary"),
        ("python:builtins.print", DatasetError, "print: expected a function that returns the rows of a split"),
        ("python:math.pi", DatasetError, "pi: expected a function that returns the rows of a split"),
    ],
)
def test_a_function_that_gives_no_rows_is_named(path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        get_custom_dataset(path)


@pytest.fixture(scope="module")
def speaker() -> Any:
    """The tokenizer of a model that knows every printable character."""
    alphabet = "".join(map(chr, range(32, 127)))
    return make_tokenizer(TokenizerRecipe(kind="characters", alphabet=alphabet, chat_template="chatml"))


def judged_by(generator: Any, speaker: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the guide's reward says of two answers (a number or an error), the judge behind archon's own server."""

    async def ask() -> list[Any]:
        server = AgentServer(speaker, generator, GenerationHyperparameters(max_new_tokens=8))
        monkeypatch.setenv("JUDGE_URL", await server.start())
        names: dict[str, Any] = {"__name__": "guide"}
        exec(compile(shown("judge"), "guide", "exec"), names)
        with AsyncRewardWrapper(names["judged"]) as reward:
            calls = [reward("1+1=", text, [1], [2], answer="2") for text in ("2", "3")]
            try:
                return [await asyncio.gather(call, return_exceptions=True) for call in calls]
            finally:
                await names["judge"].close()
                await server.close()

    return [outcome for (outcome,) in asyncio.run(ask())]


def test_the_judge_of_the_guide_gives_what_the_other_model_says(speaker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model says neither yes nor no, so the words are put into its mouth; the server is archon's."""
    told = Scripted(speaker, ["Yes", "no"])
    assert judged_by(told, speaker, monkeypatch) == [1.0, 0.0]
    assert "Expected: 2\nGiven: 3" in speaker.decode(told.requests[1].input_ids)


def test_a_judge_that_gives_no_verdict_costs_the_sample(speaker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(len(speaker), max_seq_len=512)
    generator = InProcessEngine.from_model(model, speaker, max_slots=2, page_size=16)
    for outcome in judged_by(generator, speaker, monkeypatch):
        assert isinstance(outcome, RewardRaised) and "the judge said" in str(outcome)


def names_of_archon() -> set[str]:
    """Code in the second column of the tables of the pages about moving."""
    table = re.compile(r"^\| [^|]+ \| archon \|\n\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE)
    tables = [rows for page in DOCS.glob("moving/*.md") for rows in table.findall(page.read_text())]
    assert len(tables) == 5
    cells = [line.split("|")[2] for rows in tables for line in rows.splitlines()]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture(scope="module")
def config_keys() -> set[str]:
    """The keys of all training commands."""
    return {f"{leaf}." for config in (RLConfig, SFTConfig, PreferenceConfig) for leaf in leaves(config)}


@pytest.mark.parametrize("name", sorted(names_of_archon()))
def test_every_name_to_move_over_to_exists(name: str, config_keys: set[str]) -> None:
    """Either it imports, or it is a key of a configuration."""
    if name.startswith("archon."):
        import_dotted(name, "name")
        return
    assert any(key.startswith(f"{name}.") for key in config_keys), name
