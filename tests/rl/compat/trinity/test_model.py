"""ModelWrapper: it waits without blocking, ends with its run, samples as it is told and stays in token space."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from archon.generation.record import UnusableAnswerError
from archon.generation.types import ModelRequest, ModelResponse
from archon.rl import Experience, GenerationHyperparameters, Workflow
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.logprob_check import check_recomputable
from archon.schema.errors import ConfigError, RolloutError, UserError
from tests.rl.compat.trinity.conftest import GCONFIG, ROW
from tests.tolerances import SOON_SECONDS

ASKED = [{"role": "user", "content": "1+1="}]


class Recorder(EpisodeEngine):
    """Keeps what was asked and answered."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, EpisodeContext())
        self.answers: list[ModelResponse] = []
        self.asked: list[GenerationHyperparameters] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.asked.append(req.gconfig)
        self.answers.append(await super().agenerate(req))
        return self.answers[-1]


def workflow_of(run: Any) -> type[Workflow]:
    class Made(Workflow):
        def run(self) -> list[Experience]:
            return run(self)

    return Made


def rewarded(answers: list[Experience]) -> list[Experience]:
    for answer in answers:
        answer.reward = 1.0
    return answers


def episode(adapted: Any, engine: Any, run: Any) -> Any:
    return asyncio.run(adapted(workflow_of(run)).arun_episode(engine, ROW))


def test_a_synchronous_run_does_not_block_the_loop(adapted, engine) -> None:
    """It waits for what only another coroutine of the loop can give."""
    turn, seen = threading.Event(), []

    def run(self: Workflow) -> list[Experience]:
        seen.append(threading.current_thread() is threading.main_thread())
        assert turn.wait(SOON_SECONDS), "the loop stood still"
        return rewarded(self.model.chat(ASKED, n=4))

    async def both() -> Any:
        async def other() -> None:
            await asyncio.sleep(0.01)
            turn.set()

        result, _ = await asyncio.gather(adapted(workflow_of(run)).arun_episode(engine, ROW), other())
        return result

    assert len(asyncio.run(both())["rewards"]) == 4
    assert seen == [False]


def test_the_thread_knows_the_episode(adapted, engine) -> None:
    context = EpisodeContext(task_id=7, is_eval=True)

    def run(self: Workflow) -> list[Experience]:
        assert workflow_context.get() is context and self.task.is_eval and self.task.task_id == 7
        return []

    async def within() -> Any:
        workflow_context.enter(context)
        return await adapted(workflow_of(run)).arun_episode(engine, ROW)

    assert asyncio.run(within()) is None


@pytest.mark.parametrize("waits_for", ["the model", "itself"])
def test_a_cancelled_episode_ends_at_once_and_leaves_nothing_behind(adapted, engine, waits_for) -> None:
    began, go_on, over, ended = threading.Event(), threading.Event(), threading.Event(), list[str]()

    class Slow(Workflow):
        can_reset = True

        def run(self) -> list[Experience]:
            began.set()
            try:
                if waits_for == "itself":
                    go_on.wait(SOON_SECONDS)
                self.model.chat(ASKED, n=4)
            except BaseException as error:
                ended.append(type(error).__name__)
                over.set()
                raise
            return []

    workflow = adapted(Slow)

    async def cancelled() -> int:
        engine.pause()  # no answer comes
        task = asyncio.create_task(workflow.arun_episode(engine, ROW))
        assert await asyncio.to_thread(began.wait, SOON_SECONDS)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await asyncio.to_thread(over.wait, SOON_SECONDS)
        await asyncio.sleep(0.05)
        return engine.abort()

    assert asyncio.run(cancelled()) == 0, "the engine still holds its requests"
    assert ended == ["CancelledError" if waits_for == "the model" else "RolloutError"]
    assert workflow._idle == []


def test_an_iterator_that_ends_inside_a_workflow_does_not_hang_its_episode(adapted, engine) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        episode(adapted, engine, lambda self: next(iter([])))


def test_chat_on_the_loop_is_refused_in_place_of_a_deadlock(adapted, engine) -> None:
    class Wrong(Workflow):
        async def run_async(self) -> list[Experience]:
            return self.model.chat(ASKED)

    with pytest.raises(RolloutError, match="await chat_async"):
        asyncio.run(adapted(Wrong).arun_episode(engine, ROW))


def test_a_conversation_continues_in_token_space(adapted, engine, tokenizer) -> None:
    """The second prompt is the first prompt, the first answer's own tokens, and message; all answers are trained."""
    recorder = Recorder(engine)

    def run(self: Workflow) -> list[Experience]:
        (first,) = self.model.chat(ASKED)
        talk = [*ASKED, {"role": "assistant", "content": first.response_text}, {"role": "user", "content": "no"}]
        (second,) = self.model.chat(talk)
        return [
            self.process_messages_to_experience(
                [*talk, {"role": "assistant", "content": second.response_text}], 0.5, {"right": True, "why": "luck"}
            )
        ]

    result = episode(lambda kind: adapted(kind, gconfig=GCONFIG.new(n_samples=1)), recorder, run)
    first, second = recorder.answers
    so_far = first.input_tokens + first.output_tokens
    assert second.input_tokens[: len(so_far)] == so_far
    assert "<|im_start|>user\nno<|im_end|>" in tokenizer.decode(second.input_tokens[len(so_far) :])
    assert result["input_ids"][0].tolist() == second.input_tokens + second.output_tokens
    turns = result["turn_ids"][0]
    for turn, answer in enumerate((first, second)):
        assert result["input_ids"][0][turns == turn].tolist() == answer.output_tokens
        assert result["logprobs"][0][turns == turn].tolist() == pytest.approx(answer.output_logprobs, rel=1e-6, abs=0)
    assert (turns >= 0).equal(result["loss_mask"][0] == 1)
    assert result["rewards"].tolist() == [0.5]


def test_a_conversation_that_the_model_did_not_have_is_no_experience(adapted, engine) -> None:
    def run(self: Workflow) -> list[Experience]:
        self.model.chat(ASKED)
        return [self.process_messages_to_experience([*ASKED, {"role": "assistant", "content": "made up"}], 1.0)]

    with pytest.raises(RolloutError, match="does not end with an unchanged answer"):
        episode(adapted, engine, run)


def test_sampling_arguments_reach_the_engine_under_its_names(adapted, engine) -> None:
    recorder = Recorder(engine)
    arguments = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "max_tokens": 3, "stop": "x", "logprobs": 0}

    def run(self: Workflow) -> list[Experience]:
        self.model.chat(ASKED, n=2, **arguments)
        self.model.chat(ASKED, temperature=0, top_p=None)
        return rewarded(self.model.generate(["1+1=", "2+2="], n=2))

    assert len(episode(adapted, recorder, run)["rewards"]) == 4
    told, _, greedy, *_ = recorder.asked
    assert (told.temperature, told.top_p, told.top_k, told.max_new_tokens, told.stop) == (0.5, 0.9, None, 3, ["x"])
    assert greedy.greedy and greedy.max_new_tokens == GCONFIG.max_new_tokens
    assert len({asked.seed for asked in recorder.asked}) == len(recorder.asked) == 7


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda model: model.chat(ASKED, temprature=1.0), "no argument 'temprature', did you mean 'temperature'"),
        (lambda model: model.chat(ASKED, top_p=2.0), "top_p: got 2.0"),
        (lambda model: model.chat(ASKED, n=0), "n is 0, expected the number of answers"),
        (lambda model: model.chat("1+1="), "messages.* is '1"),
        (lambda model: model.chat([]), r"messages is \[\]"),
        (lambda model: model.chat([{"role": "user"}]), r"messages\[0\] is \{'role': 'user'\}, expected"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(adapted, engine, ask, message) -> None:
    with pytest.raises(UserError, match=message):
        episode(adapted, engine, lambda self: ask(self.model))


def test_values_that_cannot_be_trained_on_end_the_run(adapted, engine) -> None:
    checked = EpisodeEngine(engine, EpisodeContext(), lambda gconfig: check_recomputable(gconfig, 1.0))
    with pytest.raises(ConfigError, match=r"gconfig.temperature: got 0.5"):
        episode(adapted, checked, lambda self: self.model.chat(ASKED, temperature=0.5))


class Aborting(EpisodeEngine):
    """Aborts the answers to the requests of these numbers."""

    def __init__(self, engine: Any, *numbers: int) -> None:
        self.context = EpisodeContext()
        super().__init__(engine, self.context)
        self.numbers, self.asked = numbers, 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        number, self.asked = self.asked, self.asked + 1
        response = await super().agenerate(req)
        return replace(response, stop_reason="abort") if number in self.numbers else response


class Single(Workflow):
    can_repeat = False

    def run(self) -> list[Experience]:
        return rewarded(self.model.chat(ASKED))


class Grouped(Workflow):
    def run(self) -> list[Experience]:
        return rewarded(self.model.chat(ASKED, n=self.task.rollout_args.n))


@pytest.mark.parametrize("workflow", [Single, Grouped])
def test_an_answer_that_cannot_be_trained_on_costs_one_sample_and_is_counted(adapted, engine, workflow) -> None:
    async def within(aborting: Aborting) -> Any:
        workflow_context.enter(aborting.context)
        return await adapted(workflow).arun_episode(aborting, ROW)

    some, every = Aborting(engine, 0, 2), Aborting(engine, 0, 1, 2, 3)
    assert len(asyncio.run(within(some))["rewards"]) == 2
    assert some.context.drops == {"aborted": 2}
    with pytest.raises(UnusableAnswerError, match="aborted"):
        asyncio.run(within(every))


def test_a_group_of_which_one_answer_is_left_is_not_run_again(adapted, engine) -> None:
    aborting = Aborting(engine, 0, 1, 2)

    async def within() -> Any:
        workflow_context.enter(aborting.context)
        return await adapted(Grouped).arun_episode(aborting, ROW)

    assert len(asyncio.run(within())["rewards"]) == 1 and aborting.asked == 4
