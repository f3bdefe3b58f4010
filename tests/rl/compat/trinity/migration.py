"""What of Trinity-RFT moves to archon: one list, of which the table in `rl/compat/README.md` is written
(`python -m tests.rl.compat.trinity.migration`) and every row that works is exercised by a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from archon.rl import (
    EID,
    REWARD_FUNCTIONS,
    WORKFLOWS,
    Experience,
    FormatConfig,
    GenerationConfig,
    RewardFn,
    Task,
    Workflow,
)
from tests.rl.compat.trinity import guide

README = Path(__file__).parents[4] / "rl" / "compat" / "README.md"
MARKS = ("<!-- trinity: begin -->", "<!-- trinity: end -->")
ASKED = [{"role": "user", "content": "1+1="}]
KEYS = {"prompt_key": "question", "response_key": "answer"}


@dataclass(frozen=True)
class Tools:
    """What an exercise needs: an episode of a workflow, and a judge's checkpoint."""

    episode: Callable[..., dict[str, torch.Tensor]]
    judge: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A public name of Trinity-RFT. `exercise` uses it, as a user would, where it works under its own name."""

    name: str
    note: str
    exercise: Callable[[Tools], None] | None = None
    elsewhere: bool = False

    @property
    def status(self) -> str:
        if self.exercise is not None:
            return "works"
        return "other spelling" if self.elsewhere else "not here"


def rewarded(answers: list[Experience], reward: float = 1.0) -> list[Experience]:
    for answer in answers:
        answer.reward = reward
    return answers


def running(body: Callable[[Any], list[Experience]], **arguments: Any) -> Callable[[Tools], None]:
    """An exercise: a workflow whose `run` is `body`."""

    def exercise(tools: Tools) -> None:
        class Made(Workflow):
            can_repeat = False

            def run(self) -> list[Experience]:
                return body(self)

        assert len(tools.episode(Made, **arguments)["rewards"]) == 4

    return exercise


def awaiting(body: Callable[[Any], Any], **arguments: Any) -> Callable[[Tools], None]:
    """An exercise: a workflow whose `run_async` is `body`."""

    def exercise(tools: Tools) -> None:
        class Made(Workflow):
            is_async = True
            can_repeat = False

            async def run_async(self) -> list[Experience]:
                return await body(self)  # type: ignore[no-any-return]

        assert len(tools.episode(Made, **arguments)["rewards"]) == 4

    return exercise


def built_in(name: str, **arguments: Any) -> Callable[[Tools], None]:
    """An exercise: a workflow by its registered name."""

    def exercise(tools: Tools) -> None:
        given = {"format_args": KEYS} | arguments
        if "ruler" in name:
            given["auxiliary_models"], given["n_samples"] = [tools.judge], 2
        assert len(tools.episode(name, **given)["rewards"]) == given.get("n_samples", 4)

    return exercise


def registered(tools: Tools) -> None:
    @WORKFLOWS.register_module("registered_in_the_migration_table")
    class Registered(guide.GuideWorkflow):
        pass

    assert len(tools.episode("registered_in_the_migration_table")["rewards"]) == 4


def rewards_registered(tools: Tools) -> None:
    @REWARD_FUNCTIONS.register_module("reward_of_the_migration_table")
    class Reward(RewardFn):
        def __init__(self, weight: float) -> None:
            self.weight = weight

        def __call__(self, response: str, truth: str, **_: Any) -> dict[str, float]:
            return {"right": self.weight * (truth == "2")}

    given = {"reward": "reward_of_the_migration_table", "reward_fn_args": {"weight": 0.5}, "format_args": KEYS}
    assert tools.episode("simple_workflow", **given)["rewards"].tolist() == [0.5] * 4


def task_fields(self: Any) -> list[Experience]:
    task: Task = self.task
    assert task.raw_task == {"question": "1+1=", "answer": "2"} and (task.task_desc, task.truth) == ("1+1=", "2")
    assert isinstance(task.format_args, FormatConfig) and task.format_args.prompt_key == "question"
    assert isinstance(task.rollout_args, GenerationConfig) and task.rollout_args.temperature == 1.0
    assert task.workflow_args == {"level": 3} and task.reward_fn_args == {} and task.is_eval is False
    return rewarded(self.model.chat(ASKED))


def experience_fields(self: Any) -> list[Experience]:
    (answer,) = self.model.chat(ASKED)
    made = Experience(
        eid=EID(run=1, step=2),
        tokens=answer.tokens.tolist(),
        prompt_length=answer.prompt_length,
        logprobs=answer.logprobs.tolist(),
        action_mask=[1] * len(answer.logprobs),
        reward=1.0,
        info={"seen": 1},
        metrics={"seen": 1.0},
    )
    assert made.eid.step == 2 and made.tokens.equal(answer.tokens)
    return [made]


def conversation(self: Any) -> tuple[list[dict[str, Any]], float]:
    (answer,) = self.model.chat(ASKED)
    return [*ASKED, {"role": "assistant", "content": answer.response_text}], 0.5


async def conversation_async(self: Any) -> tuple[list[dict[str, Any]], float]:
    (answer,) = await self.model.chat_async(ASKED)
    return [*ASKED, {"role": "assistant", "content": answer.response_text}], 0.5


async def converted_async(self: Any) -> list[Experience]:
    return rewarded([await self.model.convert_messages_to_experience_async((await conversation_async(self))[0])])


async def processed_async(self: Any) -> list[Experience]:
    return [await self.process_messages_to_experience_async(*await conversation_async(self), {"seen": 2})]


async def chatted_async(self: Any) -> list[Experience]:
    return rewarded(await self.model.chat_async(ASKED, temperature=1.0))


async def generated_async(self: Any) -> list[Experience]:
    return rewarded(await self.model.generate_async(["1+1="]))


def scored(self: Any) -> list[Experience]:
    (answer,) = self.model.chat(ASKED)
    assert self.model.logprobs(answer.tokens).shape == (len(answer.tokens) - 1,)
    return rewarded([answer])


async def scored_async(self: Any) -> list[Experience]:
    (answer,) = await self.model.chat_async(ASKED)
    assert (await self.model.logprobs_async(answer.tokens.tolist())).shape == (len(answer.tokens) - 1,)
    return rewarded([answer])


def by_client(self: Any) -> list[Experience]:
    client = self.model.get_openai_client()
    client.chat.completions.create(model=client.model_path, messages=ASKED)
    return rewarded(self.model.extract_experience_from_history())


async def by_async_client(self: Any) -> list[Experience]:
    client = self.model.get_openai_async_client()
    await client.chat.completions.create(model=client.model_path, messages=ASKED)
    return rewarded(self.model.extract_experience_from_history())


def from_history(self: Any) -> list[Experience]:
    self.model.chat(ASKED)
    answers = self.model.extract_experience_from_history()
    assert len(answers) == 1 and self.model.extract_experience_from_history() == []
    return rewarded(answers)


def versioned(self: Any) -> list[Experience]:
    return rewarded(self.model.chat(ASKED), reward=float(self.model.model_version == 0))


def with_auxiliary(tools: Tools) -> None:
    def body(self: Any) -> list[Experience]:
        (judge,), (wrapper,) = self.auxiliary_models, self.auxiliary_model_wrappers
        said = judge.chat.completions.create(model=judge.model_path, messages=ASKED)
        assert said.choices[0].message.content == wrapper.chat(ASKED, temperature=0)[0].response_text == "[1,0]"
        return rewarded(self.model.chat(ASKED))

    running(body, auxiliary_models=[tools.judge])(tools)


def older(workflow: Any) -> Callable[[Tools], None]:
    def exercise(tools: Tools) -> None:
        assert len(tools.episode(workflow)["rewards"]) == 4

    return exercise


def stepwise(base: str) -> Callable[[Tools], None]:
    def exercise(tools: Tools) -> None:
        import archon.rl as rl

        class Made(getattr(rl, base)):  # type: ignore[misc]
            max_step_num = 2

            def step(self, step_num: int) -> bool:
                self.model.chat(ASKED)
                return True

            async def step_async(self, step_num: int) -> bool:
                await self.model.chat_async(ASKED)
                return True

            def reward(self, exps: list[Experience], step_num: int = 0) -> float:
                return 1.0

            async def reward_async(self, exps: list[Experience], step_num: int = 0) -> float:
                return 1.0

        assert len(tools.episode(Made, enable_history=True)["rewards"]) == 8

    return exercise


WORDS = {"env": "tests.rl.compat.trinity.guide.Gym", "env_args": {"goal": 1}}
GAME = {"env": "tests.rl.compat.trinity.guide.Game", "env_args": {"goal": 1}, "max_env_steps": 1}
SHOP = {"env": "tests.rl.compat.trinity.guide.Shop", "max_env_steps": 1}
CLIENT = {"enable_openai_api": True}
MAY = "an HTTP client or a workflow of one's own"

WORKFLOW_ROWS = (
    Row("`Workflow`", "`archon.rl.Workflow`; base of all", running(lambda self: rewarded(self.model.chat(ASKED)))),
    Row("`Workflow.run_async`, `is_async`", "awaited on the event loop", awaiting(chatted_async)),
    Row("`can_repeat`, `set_repeat_times`, older `repeatable`", "", older(guide.RepeatableWorkflow)),
    Row("`can_reset`, `reset`, older `resettable`", "", older(guide.GuideWorkflow)),
    Row("`WORKFLOWS.register_module`", "the registered name is enough, in YAML and Python", registered),
    Row(
        "`Task`: `raw_task`, `format_args`, `rollout_args`, `workflow_args`, `reward_fn_args`, `task_desc`, `truth`",
        "",
        running(task_fields, format_args=KEYS, workflow_args={"level": 3}),
    ),
    Row("`auxiliary_models`, `auxiliary_model_wrappers`", "served here, or by `base_url`", with_auxiliary),
    Row(
        "`MultiTurnWorkflow.process_messages_to_experience`",
        "a method of `archon.rl.Workflow`",
        running(lambda self: [self.process_messages_to_experience(*conversation(self), {"seen": 2})]),
    ),
    Row("`process_messages_to_experience_async`", "", awaiting(processed_async)),
    Row("`MultiTurnWorkflow` as a base class", "`archon.rl.Workflow`", elsewhere=True),
    Row("`SimpleWorkflow`, `simple_workflow`", "", built_in("simple_workflow")),
    Row("`MathWorkflow`, `math_workflow`", "asks for a boxed answer", built_in("math_workflow")),
    Row("`MathBoxedWorkflow`, `math_boxed_workflow`", "", built_in("math_boxed_workflow")),
    Row("`MathRULERWorkflow`, `math_ruler_workflow`", "", built_in("math_ruler_workflow")),
    Row("`async_simple_workflow`", "the same class: a run has its own thread", built_in("async_simple_workflow")),
    Row("`async_math_workflow`", "", built_in("async_math_workflow")),
    Row("`async_math_boxed_workflow`", "", built_in("async_math_boxed_workflow")),
    Row("`async_math_ruler_workflow`", "", built_in("async_math_ruler_workflow")),
    Row("`AsyncSimpleWorkflow`, `AsyncMathWorkflow` and the like", "the class without `Async`", elsewhere=True),
    *(
        Row(f"`{name}`", "needs `enable_history`", stepwise(name))
        for name in (
            *("StepWiseRewardWorkflow", "AsyncStepWiseRewardWorkflow"),
            *("RewardPropagationWorkflow", "AsyncRewardPropagationWorkflow"),
        )
    ),
    Row(
        "`AlfworldWorkflow`, `alfworld_workflow`",
        "`workflow_args.env` names what makes the environment of a game",
        built_in("alfworld_workflow", workflow_args=GAME),
    ),
    Row(
        "`WebShopWorkflow`, `webshop_workflow`",
        "`workflow_args.env` names what makes the environment",
        built_in("webshop_workflow", workflow_args=SHOP, format_args={"prompt_key": "answer"}),
    ),
    Row("`sciworld_workflow`, `frozen_lake_workflow`, `sudoku_workflow`", "`gym_env_workflow`", elsewhere=True),
    Row(
        "`AgentScopeReActWorkflow`, `as_react_workflow`",
        "without the package agentscope",
        built_in("as_react_workflow", **CLIENT),
    ),
    Row("`agentscope_react_workflow`", "", built_in("agentscope_react_workflow", **CLIENT)),
    Row(
        "`AgentScopeReactMathWorkflow`, `agentscope_react_math_workflow`, `agentscope_reactv2_math_workflow`",
        "the same class",
        built_in("agentscope_reactv2_math_workflow", **CLIENT),
    ),
    Row("`AgentScopeWorkflowAdapter`", "`archon.rl.AgentWorkflow` runs any agent", elsewhere=True),
    Row("`WorkflowWithRecording`", "`archon.rl.AgentWorkflow`", elsewhere=True),
    Row("`OnPolicyDistillWorkflow`", "`algorithm: {preset: distill}` and `teacher`", elsewhere=True),
    Row("`MathEvalWorkflow`", "`eval_data`, or `archon eval`", elsewhere=True),
    Row("`ToolCallWorkflow`", "`archon.rl.ReActWorkflow`", elsewhere=True),
    Row("`MathTrainableRULERWorkflow`, `RubricJudgeWorkflow`, `MathRMWorkflow`", f"no equivalent built in; {MAY}"),
    Row("`simple_mm_workflow`", "`archon.rl.VisionRLVRWorkflow`, in a configuration too", elsewhere=True),
    Row("`chat_mm`, `generate_mm`", "a workflow with images subclasses `archon.rl.VisionRLVRWorkflow`"),
    Row("`RAFTAlfworldWorkflow`, `EmailSearchWorkflow`, other single studies", "take the file, and change its imports"),
)

MODEL_ROWS = (
    Row("`ModelWrapper.chat`", "", running(lambda self: rewarded(self.model.chat(ASKED, n=1, temperature=1.0)))),
    Row("`ModelWrapper.chat_async`", "", awaiting(chatted_async)),
    Row("`ModelWrapper.generate`", "", running(lambda self: rewarded(self.model.generate(["1+1="])))),
    Row("`ModelWrapper.generate_async`", "", awaiting(generated_async)),
    Row("`ModelWrapper.logprobs`", "of tokens 1 to L − 1", running(scored)),
    Row("`ModelWrapper.logprobs_async`", "", awaiting(scored_async)),
    Row(
        "`ModelWrapper.convert_messages_to_experience`",
        "of a conversation of this run",
        running(lambda self: rewarded([self.model.convert_messages_to_experience(conversation(self)[0])])),
    ),
    Row("`ModelWrapper.convert_messages_to_experience_async`", "", awaiting(converted_async)),
    Row("`ModelWrapper.get_openai_client`, `client.model_path`", "", running(by_client, **CLIENT)),
    Row("`ModelWrapper.get_openai_async_client`", "", awaiting(by_async_client, **CLIENT)),
    Row("`ModelWrapper.extract_experience_from_history`", "", running(from_history, enable_history=True)),
    Row("`ModelWrapper.model_version`", "", running(versioned)),
    Row("`model_version_async`, `get_lora_request`, `sync_model_weights`", "archon keeps the weights in step"),
    Row("`InferenceModel`, `vLLMRolloutModel`", "`archon.rl.InferenceEngine`", elsewhere=True),
    Row(
        "`Experience`: `tokens`, `prompt_length`, `logprobs`, `reward`, `action_mask`, `info`, `metrics`, `eid`",
        "",
        running(experience_fields),
    ),
    Row("`Experiences`, `CustomField`", "batches are `archon.rl.trajectories`", elsewhere=True),
    Row("`Experience.chosen`, `rejected`", "`archon preference` trains on pairs", elsewhere=True),
    Row("`FormatConfig`, `GenerationConfig`", "", running(task_fields, format_args=KEYS, workflow_args={"level": 3})),
    Row("`RewardFn`, `REWARD_FUNCTIONS.register_module`, `reward_fn_args`", "", rewards_registered),
    Row(
        "`MathRewardFn`, `MathBoxedRewardFn`, `AccuracyReward`",
        "reward `math_verify`, without a format part",
        elsewhere=True,
    ),
    Row("`CountDownRewardFn`, `countdown_reward`", "reward `countdown`", elsewhere=True),
    Row("`FormatReward`, `MathDAPORewardFn`, `RMGalleryFn`", "a reward function of one's own"),
)

ALGORITHM_ROWS = (
    Row("`ALGORITHM_TYPE`, `AlgorithmType`", "`archon.rl.algorithms.presets.PRESETS`", elsewhere=True),
    Row(
        "`ADVANTAGE_FN`, `AdvantageFn`",
        "`archon.rl.algorithms.advantages.ADVANTAGES`, or a dotted path",
        elsewhere=True,
    ),
    Row(
        "`POLICY_LOSS_FN`, `PolicyLossFn`",
        "`archon.rl.algorithms.losses.POLICY_LOSSES`, or a dotted path",
        elsewhere=True,
    ),
    Row("`KL_FN`, `ENTROPY_LOSS_FN`", "`algorithm.kl.kind`, `algorithm.entropy_coef`", elsewhere=True),
    Row("`SAMPLE_STRATEGY`: `mix`", "`demonstrations`", elsewhere=True),
    Row("`SAMPLE_STRATEGY`: others, `ADD_STRATEGY`", "a batch is trained once it is complete"),
    Row("`get_buffer_reader`, `get_buffer_writer`", "`archon.rl.experience_buffer.ExperienceBuffer`", elsewhere=True),
    Row(
        "`EXPERIENCE_OPERATORS`, `ExperienceOperator`, Data-Juicer",
        "process tasks before the run, experiences in the workflow",
    ),
    Row("`SELECTORS`, `BaseSelector`", "tasks are drawn at random"),
    Row("`trinity run --config FILE`", "`archon rl --config FILE`", elsewhere=True),
    Row("`trinity studio`, `mode: serve`", "`archon serve` serves a checkpoint, and agents in training"),
    Row("Ray", "`rollout.launch.launcher: ray`, `rollout.workers.kind: ray`", elsewhere=True),
    Row("`load_config`, `Config`", "`archon.rl.compat.trinity.config.translate`, `archon.rl.RLConfig`", elsewhere=True),
)

ROWS = (*WORKFLOW_ROWS, *MODEL_ROWS, *ALGORITHM_ROWS)


def table() -> Iterator[str]:
    """The lines of the table."""
    yield "| Trinity-RFT | here | |"
    yield "|---|---|---|"
    for row in ROWS:
        yield f"| {row.name} | {row.status} | {row.note} |".replace("|  |", "| |")


def written(page: str) -> str:
    """The page with the table as it is now."""
    start, end = (page.index(mark) for mark in MARKS)
    return page[: start + len(MARKS[0])] + "\n" + "\n".join(table()) + "\n" + page[end:]


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
