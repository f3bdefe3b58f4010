"""TextArena, the real package: its games as workflows, in tokens, and three steps of a run."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.data import get_custom_dataset
from archon.data.environments import environment_function, parse_environment
from archon.data.registry import load_rows
from archon.rl import GenerationHyperparameters, RLTrainer, get_reward_fn
from archon.rl.config import RLConfig
from archon.rl.environments import EnvironmentWorkflow, Step
from archon.rl.episode_context import EpisodeContext, workflow_context
from archon.rl.trajectories import validate_trajectory
from archon.rl.workflows import resolve_workflow
from archon.schema.errors import ConfigError, DatasetError
from archon.training.metrics import read_jsonl
from tests.rl.written import assert_each_prompt_trained_once
from tests.serve.scripted import Scripted

GUESS = "textarena:GuessTheNumber-v0"
ONE = GenerationHyperparameters(n_samples=1, max_new_tokens=32)


def played(workflow: Any, engine: Any, row: dict[str, Any]) -> tuple[dict[str, torch.Tensor], EpisodeContext]:
    context = EpisodeContext(seed=3)

    async def episode() -> Any:
        workflow_context.enter(context)
        return await workflow.arun_episode(engine, row)

    return validate_trajectory(asyncio.run(episode())), context


def game_of(name: str) -> Any:
    parsed = parse_environment(name)
    assert parsed is not None
    return environment_function(parsed, "make_environment")(parsed)()


def secret(seed: int, name: str = GUESS) -> int:
    """The number that the package's own game draws."""
    import textarena

    game = textarena.make(name.removeprefix("textarena:"))
    state = random.getstate()
    game.reset(num_players=1, seed=seed)
    random.setstate(state)
    return int(game.state.game_state["game_number"])


@pytest.mark.parametrize("wrong", [(), (0,), (0, 1)])
def test_a_right_guess_earns_one_and_only_the_models_tokens_are_trained(speaker: Any, wrong: Sequence[int]) -> None:
    """The conversation is the rules, an answer, the game's hint, an answer, …, in the tokens that the engine had."""
    number = secret(5)
    others = [n for n in (4, 17) if n != number]
    told = [f"I say [{others[i]}]" for i in wrong] + [f"[{number}]"]
    engine = Scripted(speaker, told)
    workflow = resolve_workflow(GUESS, gconfig=ONE, tokenizer=speaker)
    result, context = played(workflow, engine, {"seed": 5, "environment": GUESS})
    assert result["rewards"].tolist() == [1.0]
    assert context.numbers == {"turns": [len(told)], "unfinished": [0.0]}
    trained = result["loss_mask"][0] == 1
    answers = [ids for text in told for ids in [*speaker(text).input_ids, speaker.eos_token_id]]
    assert result["input_ids"][0][trained].tolist() == answers
    last = engine.requests[-1].input_ids
    assert result["input_ids"][0][: len(last)].tolist() == list(last)
    text = speaker.decode(result["input_ids"][0])
    hints = ["higher" if others[i] < number else "lower" for i in wrong]
    assert re.findall(r"The target number is (\w+)\.", text) == hints
    assert text.count("You have to guess the number between") == 1


def test_samples_of_a_group_play_the_same_game_and_rows_different_ones(speaker: Any) -> None:
    rows = get_custom_dataset(f"{GUESS}?size=40")
    assert len({row["seed"] for row in rows}) == 40
    assert len({secret(row["seed"]) for row in rows}) > 10
    number = secret(rows[0]["seed"])
    workflow = resolve_workflow(GUESS, gconfig=ONE.new(n_samples=3), tokenizer=speaker)
    result, _ = played(workflow, Scripted(speaker, [f"[{number}]"] * 3), rows[0])
    assert result["rewards"].tolist() == [1.0] * 3


def test_held_out_games_are_other_games() -> None:
    train, test = ({row["seed"] for row in get_custom_dataset(f"{GUESS}?size=300", split=s)} for s in ("train", "test"))
    assert len(train) == len(test) == 300 and not train & test


def test_games_draw_from_streams_of_their_own() -> None:
    """The package seeds Python's generator; two games at once, and a program that draws too, must not notice."""

    def drawn(between: Callable[[], Any]) -> list[Any]:
        game = game_of("textarena:Blackjack-v0")
        seen = [game.reset(7)]
        for _ in range(3):
            between()
            seen.append(game.step("[hit]"))
        return seen

    other = game_of("textarena:Blackjack-v0")
    other.reset(8)
    random.seed(1)
    expected = random.random()
    random.seed(1)
    alone = drawn(lambda: None)
    assert random.random() == expected
    assert drawn(lambda: (other.step("[hit]"), random.random())) == alone


def test_a_game_that_does_not_end_keeps_its_rewards_so_far(speaker: Any) -> None:
    others = [n for n in range(1, 20) if n != secret(5)][:4]
    workflow = resolve_workflow(GUESS, {"max_turns": 2}, gconfig=ONE, tokenizer=speaker)
    result, context = played(workflow, Scripted(speaker, [f"[{n}]" for n in others]), {"seed": 5})
    assert result["rewards"].tolist() == [0.0] and context.numbers == {"turns": [2.0], "unfinished": [1.0]}


class Echo:
    """An environment of one's own, with asynchronous methods; it wants to hear its seed."""

    closed = 0

    async def reset(self, seed: int) -> str:
        self.seed = seed
        return f"Say {seed}."

    async def step(self, action: str) -> tuple[str, float, bool]:
        if action == "break":
            raise OSError("the wire is cut")
        return "Again.", 0.5 if action == str(self.seed) else 0.0, False

    def close(self) -> None:
        Echo.closed += 1


def test_an_environment_of_ones_own_is_played_by_its_path(speaker: Any) -> None:
    """Reward of its steps are summed; one that raises costs its sample; each is closed."""
    before = Echo.closed
    arguments = {"environment": f"{__name__}.Echo", "max_turns": 3, "system_prompt": "Be brief."}
    workflow = resolve_workflow(
        "archon.rl.environments.EnvironmentWorkflow", arguments, gconfig=ONE.new(n_samples=2), tokenizer=speaker
    )
    engine = Scripted(speaker, ["41", "41", "break", "8", "41"])
    result, context = played(workflow, engine, {"seed": 41})
    assert result["rewards"].tolist() == [1.0]
    assert context.drops == {"environment_failed": 1}
    assert "Echo raised OSError: the wire is cut" in str(context.first_errors["environment_failed"])
    assert Echo.closed == before + 2
    assert speaker.decode(engine.requests[0].input_ids).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert Step("x") == ("x", 0.0, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("textarena:GuessTheNumbr-v0", "has no task 'GuessTheNumbr-v0'; did you mean GuessTheNumber-v0"),
        ("textarena:GuessTheNumber-v0?max_numbr=3", "has no option 'max_numbr'; did you mean 'max_number'?"),
        ("textarena:TicTacToe-v0", "expected a single-player game, got .* has to be 2"),
    ],
)
def test_games_that_cannot_be_played_are_refused(speaker: Any, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_workflow(name, gconfig=ONE, tokenizer=speaker)


def test_rows_and_rewards_that_do_not_fit_are_refused(speaker: Any, short_run: Callable[..., RLConfig]) -> None:
    workflow = resolve_workflow(GUESS, gconfig=ONE, tokenizer=speaker)
    for row, message in [
        ({"prompt": "1+1="}, r"the row's seed is None.*; set train_data\.path"),
        ({"seed": 3, "environment": "textarena:Mastermind-v0"}, "the row is for textarena:Mastermind-v0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            played(workflow, Scripted(speaker, []), row)
    with pytest.raises(ConfigError, match="scores its own episodes; leave reward out"):
        short_run(workflow=GUESS, train_data={"path": GUESS}, reward="exact_match")
    with pytest.raises(ConfigError, match=f"set workflow to {GUESS}, and leave reward out"):
        get_reward_fn(GUESS)("", "", [], [])
    with pytest.raises(ConfigError, match="max_turns = 0"):
        EnvironmentWorkflow(ONE, speaker, Echo, max_turns=0)
    with pytest.raises(DatasetError, match=r"rows of .* have no prompt.*leave system_prompt out here, and set it in"):
        get_custom_dataset(GUESS, system_prompt="Be brief.")
    with pytest.raises(DatasetError, match="episodes to play, and no rows of kind 'sft'"):
        get_custom_dataset(GUESS, kind="sft", tokenizer=speaker)
    with pytest.raises(ConfigError, match=r"train_data of a game .* has no option 'max_number'; it has size"):
        get_custom_dataset(f"{GUESS}?max_number=3")


def test_three_steps_are_trained_on_games(short_run: Callable[..., RLConfig]) -> None:
    """Generator and trainer agree on the first batch, and each game is trained once, with the reward it gave."""
    name = f"{GUESS}?max_turns=3"
    config = short_run(
        workflow=name,
        train_data={"path": f"{GUESS}?size=8"},
        eval_data={"path": GUESS, "split": "test"},
        evaluation={"max_prompts": 1, "every": 0, "greedy": False},
    )
    assert config.reward == name
    metrics = RLTrainer(config).train()
    assert metrics["version"] == 3 and 1 <= metrics["turns"] <= 3 and "eval/reward" in metrics
    assert_each_prompt_trained_once(config)
    assert len(load_rows(config.train_data, "rl", None)) == 8
    for one in read_jsonl(Path(config.run_dir) / "trajectories.jsonl"):
        assert one["prompt"].count("guess the number between 1 and 20 within 3 turns") == 1
