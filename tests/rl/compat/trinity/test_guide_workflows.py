"""The shapes of workflow that the public guides show, run as archon ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch

from archon.rl import GenerationHyperparameters, InProcessEngine, TrinityWorkflow
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout
from archon.rl.workflows import resolve_workflow
from archon.schema.errors import ConfigError
from tests.rl import rewards_for_tests as rewards
from tests.rl.compat.trinity import guide
from tests.rl.compat.trinity.conftest import GCONFIG
from tests.test_readme import shown


def content_text(result: dict[str, torch.Tensor], row: int, tokenizer: Any) -> str:
    return tokenizer.decode(result["input_ids"][row][result["loss_mask"][row] == 1], skip_special_tokens=True)


@pytest.fixture(autouse=True)
def _none_made() -> None:
    guide.GuideWorkflow.made.clear()


def test_the_synchronous_workflow_gives_one_group_of_trainable_trajectories(adapted, run_episode, tokenizer) -> None:
    result, _ = run_episode(adapted("guide_workflow"))
    assert result["input_ids"].shape[0] == 4
    asked = "<|im_start|>user\nQuestion:\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
    for row in range(4):
        trained = result["loss_mask"][row] == 1
        assert result["input_ids"][row, : len(prompt)].tolist() == prompt
        assert trained.nonzero()[0].item() == len(prompt)
        assert (result["logprobs"][row][trained] < 0).all() and not result["logprobs"][row][~trained].any()
        assert (result["versions"][row] == -1).equal(~trained) and (result["turn_ids"][row] == -1).equal(~trained)
        assert result["rewards"][row].item() == content_text(result, row, tokenizer).count("2")
    assert len({tuple(ids) for ids in result["input_ids"].tolist()}) > 1


@pytest.mark.parametrize(
    ("workflow", "made", "episodes"),
    [
        (guide.GuideWorkflow, 1, ["1+1="]),
        (guide.OneAnswerWorkflow, 4, ["1+1="] * 4),
        (guide.RepeatableWorkflow, 1, ["1+1="]),
    ],
)
def test_a_group_comes_about_in_each_of_the_guides_ways(adapted, run_episode, workflow, made, episodes) -> None:
    result, _ = run_episode(adapted(workflow))
    assert result["input_ids"].shape[0] == 4
    assert [task for instance in guide.GuideWorkflow.made for task in instance.tasks] == episodes
    assert len(guide.GuideWorkflow.made) <= made


def test_a_workflow_told_to_repeat_itself_is_told_how_often(adapted, run_episode) -> None:
    result, _ = run_episode(adapted(guide.RepeatableWorkflow))
    assert result["rewards"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_asynchronous_workflow_runs_on_the_loop_and_its_metrics_are_recorded(adapted, run_episode, tokenizer):
    result, context = run_episode(adapted(guide.AsyncWorkflow))
    assert result["rewards"].tolist() == [len(content_text(result, row, tokenizer)) for row in range(4)]
    assert context.numbers["asked"] == [1.0] * 4


def test_the_episodes_seed_fixes_what_is_sampled(adapted, run_episode) -> None:
    first, second, other = (run_episode(adapted(guide.OneAnswerWorkflow), seed=seed)[0] for seed in (1, 1, 2))
    assert first["input_ids"].equal(second["input_ids"]) and first["logprobs"].equal(second["logprobs"])
    assert first["input_ids"].tolist() != other["input_ids"].tolist()
    assert len({tuple(ids) for ids in first["input_ids"].tolist()}) > 1


def test_each_run_has_a_task_of_its_own(adapted, run_episode) -> None:
    class Alters(guide.OneAnswerWorkflow):
        def run(self) -> Any:
            self.task.raw_task["notes"].append("a note")
            assert self.task.raw_task["notes"] == ["a note"]
            return super().run()

    row = {"raw_task": {"question": "1+1=", "answer": "2", "notes": []}}
    result, _ = run_episode(adapted(Alters), row)
    assert len(result["rewards"]) == 4 and row["raw_task"]["notes"] == []


def rows(n: int) -> list[Prompt]:
    return [Prompt(i, {"raw_task": {"question": f"{i}+{i}=", "answer": str(2 * i)}}) for i in range(n)]


def collect(engine: InProcessEngine, workflow: TrinityWorkflow, n: int) -> Any:
    prompts = rows(n)
    return asyncio.run(Rollout(engine, workflow).collect(lambda n: prompts[:n], n, 0))


def test_a_resettable_workflow_is_made_once_and_used_again(engine, adapted, tokenizer) -> None:
    """Its reset says nothing of the model, which nevertheless answers for the episode at hand."""
    workflow = adapted(guide.GuideWorkflow)
    for step in range(3):
        batch = collect(engine, workflow, 1)
        assert len(batch.trajectories["rewards"]) == 4, step
    (instance,) = guide.GuideWorkflow.made
    assert instance.tasks == ["0+0="] * 3


def test_instances_are_not_shared_by_runs_that_overlap(engine, adapted, tokenizer) -> None:
    class Watchful(guide.GuideWorkflow):
        def run(self) -> Any:
            question = self.question
            experiences = super().run()
            assert self.question == question, "reset by another run meanwhile"
            return experiences

    workflow = adapted(Watchful)
    for _ in range(2):
        batch = collect(engine, workflow, 6)
        assert batch.counts["episodes"] == 6 and len(batch.prompts) == 6
        for row, group in enumerate(batch.trajectories["group_ids"].tolist()):
            ids = batch.trajectories["input_ids"][row][batch.trajectories["attention_mask"][row]]
            assert f"Question:\n{group}+{group}=" in tokenizer.decode(ids)
    assert len(guide.GuideWorkflow.made) <= 6
    assert Counter(task for i in guide.GuideWorkflow.made for task in i.tasks) == {f"{i}+{i}=": 2 for i in range(6)}


def test_a_workflow_that_failed_is_not_used_again(engine, adapted, run_episode) -> None:
    class FailsTheSecondTime(guide.GuideWorkflow):
        def run(self) -> Any:
            if len(self.tasks) == 2:
                raise KeyError("half way through")
            return super().run()

    workflow = adapted(FailsTheSecondTime)
    run_episode(workflow)
    with pytest.raises(KeyError, match="half way"):
        run_episode(workflow)
    run_episode(workflow)
    assert [instance.tasks for instance in guide.GuideWorkflow.made] == [["1+1="] * 2, ["1+1="]]


def test_evaluation_samples_otherwise_and_does_not_meet_trainings_instances(adapted, run_episode) -> None:
    training = adapted(guide.GuideWorkflow)
    run_episode(training)
    greedy = training.with_gconfig(GCONFIG.new(n_samples=2, greedy=True))
    first, second = (run_episode(greedy, seed=seed)[0] for seed in (1, 2))
    assert first["input_ids"].shape[0] == 2
    assert first["input_ids"].equal(second["input_ids"]) and first["input_ids"][0].equal(first["input_ids"][1])
    assert [made.rollout_args.temperature for made in guide.GuideWorkflow.made] == [1.0, 0.0]


def test_the_trainer_is_given_a_workflow_by_class_registered_name_or_dotted_path(tokenizer) -> None:
    offered = {"reward_fn": rewards.constant, "gconfig": GenerationHyperparameters(), "tokenizer": tokenizer}
    for given in (guide.GuideWorkflow, "guide_workflow", "tests.rl.compat.trinity.guide.GuideWorkflow"):
        resolved = resolve_workflow(given, {"workflow_args": {"a": 1}}, **offered)
        assert isinstance(resolved, TrinityWorkflow) and resolved.kind is guide.GuideWorkflow


def test_an_unknown_name_is_answered_with_the_nearest_and_the_way_to_ones_own(adapted) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'guide_workflow'.*dotted path"):
        adapted("guide_workflw")
    with pytest.raises(ConfigError, match="format_args: unknown 'prompt_kye', did you mean 'prompt_key'"):
        adapted("guide_workflow", format_args={"prompt_kye": "q"})


def test_rows_without_their_source_are_answered_with_the_setting(adapted, run_episode) -> None:
    with pytest.raises(ConfigError, match="set raw=true in train_data"):
        run_episode(adapted("guide_workflow"), {"prompt": "1+1=", "answer": "2"})


def test_the_workflow_of_the_rl_guide_runs(adapted, run_episode) -> None:
    names: dict[str, Any] = {}
    exec(compile(shown("trinity"), "guide", "exec"), names)
    result, _ = run_episode(adapted(names["Shout"]))
    assert result["input_ids"].shape[0] == 4 and set(result["rewards"].tolist()) <= {0.0, 1.0}
