"""The engine on an event loop: order, pause, abort, weight updates, failures. The real generator runs in every test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from archon.generation import InProcessEngine
from archon.generation.types import ModelResponse
from archon.rl import InferenceEngine
from archon.schema.errors import RolloutError
from tests.generation.models import make_engine, make_model, prompts, request, trainer_logprobs
from tests.tolerances import GENERATED_LOGPROB_FP64


def other_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return {
        name: p + 0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
        for name, p in model.named_parameters()
    }


async def until_tokens(engine: InProcessEngine, count: int) -> None:
    """Let the loop turn until some unfinished answer has `count` tokens."""
    while not any(len(sequence.output) >= count for sequence in engine._generator.unfinished):  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_the_engine_is_an_inference_engine() -> None:
    assert isinstance(make_engine(), InferenceEngine)


async def test_tasks_started_together_are_admitted_together_in_order() -> None:
    engine = make_engine(max_slots=3)
    wanted = [request(p, max_new_tokens=6) for p in prompts(3, 9, 4, 2, 7, 5)]
    together = await asyncio.gather(*(engine.agenerate(r) for r in wanted))
    again = make_engine(max_slots=3).generate(wanted)
    assert [a.output_tokens for a in together] == [a.output_tokens for a in again]
    # Three prompts are read in the first step; each later one waits for a slot.
    assert engine.stats.steps == 12


def test_two_event_loops_one_after_the_other() -> None:
    engine = make_engine()
    wanted = request(prompts(5)[0], seed=1, max_new_tokens=6)
    first, second = (asyncio.run(engine.agenerate(wanted)) for _ in range(2))
    assert first.output_tokens == second.output_tokens


async def test_one_request_object_may_be_sent_many_times() -> None:
    engine = make_engine()
    wanted = request(prompts(5)[0], max_new_tokens=8)
    answers = await asyncio.gather(*(engine.agenerate(wanted) for _ in range(4)))
    assert len({tuple(answer.output_tokens) for answer in answers}) == 4


async def test_pause_keeps_answers_and_resume_goes_on() -> None:
    model = make_model(torch.float64)
    wanted = [request(p, seed=i, max_new_tokens=15) for i, p in enumerate(prompts(4, 9))]
    straight = make_engine(model).generate(wanted)
    engine = make_engine(model)
    tasks = [asyncio.create_task(engine.agenerate(r)) for r in wanted]
    await until_tokens(engine, 5)
    engine.pause()
    steps = engine.stats.steps
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.stats.steps <= steps + 1
    assert not any(task.done() for task in tasks)
    late = asyncio.create_task(engine.agenerate(wanted[0]))
    await asyncio.sleep(0.01)
    assert engine.stats.steps <= steps + 1, "a request that comes during a pause waits as well"
    engine.resume()
    answers = await asyncio.gather(*tasks, late)
    assert [a.output_tokens for a in answers] == [a.output_tokens for a in (*straight, straight[0])]


def test_generate_refuses_to_wait_on_a_paused_engine() -> None:
    engine = make_engine()
    engine.pause()
    with pytest.raises(RolloutError, match="paused"):
        engine.generate([request([1])])


async def test_abort_by_rid_ends_with_what_there_is() -> None:
    engine = make_engine(max_slots=2)
    tasks = [
        asyncio.create_task(engine.agenerate(request(p, rid=rid, max_new_tokens=30)))
        for p, rid in zip(prompts(4, 9, 5), ("a", "b", "b"), strict=True)
    ]
    await until_tokens(engine, 4)
    assert engine.abort("b") == 2  # one running, one waiting
    assert engine.abort("nobody") == 0
    kept, running, waiting = await asyncio.gather(*tasks)
    assert (kept.stop_reason, kept.output_len) == ("length", 30)
    assert running.stop_reason == waiting.stop_reason == "abort"
    assert running.output_len == len(running.output_logprobs) == len(running.output_versions) >= 3
    assert waiting.output_len == 0


async def test_abort_all_frees_everything() -> None:
    engine = make_engine(max_slots=2)
    tasks = [asyncio.create_task(engine.agenerate(request(p, max_new_tokens=30))) for p in prompts(4, 4, 9, 5) * 2]
    await until_tokens(engine, 4)
    assert engine.abort() == 8
    assert {answer.stop_reason for answer in await asyncio.gather(*tasks)} == {"abort"}
    scheduler = engine._generator.scheduler
    assert not scheduler.has_work
    assert scheduler.pool.n_free == scheduler.pool.n_pages
    (after,) = engine.generate([request([1, 2], max_new_tokens=3)])
    assert after.output_len == 3


async def test_a_batch_is_answered_as_its_requests_are() -> None:
    wanted = [request(p, seed=n, max_new_tokens=6 + n) for n, p in enumerate(prompts(3, 9, 4, 2))]
    single = await asyncio.gather(*map(make_engine(max_slots=3).agenerate, wanted))
    engine = make_engine(max_slots=3)
    together = await engine.agenerate_batch(wanted)
    assert [a.output_tokens for a in together] == [a.output_tokens for a in single]
    assert await engine.agenerate_batch([]) == []


async def test_a_batch_is_aborted_with_its_caller_and_with_one_of_its_requests() -> None:
    engine = make_engine()
    gone = asyncio.create_task(engine.agenerate_batch([request(p, max_new_tokens=50) for p in prompts(4, 5)]))
    await until_tokens(engine, 3)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert engine.unfinished == 0
    with pytest.raises(RolloutError, match="prompt"):
        await engine.agenerate_batch([request(prompts(4)[0]), request([])])
    assert engine.unfinished == 0


async def test_a_failed_step_fails_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def broken(*_: Any) -> None:
        raise RolloutError("broken")

    monkeypatch.setattr(engine._generator, "_forward", broken)
    with pytest.raises(RolloutError, match="broken"):
        await engine.agenerate_batch([request(p) for p in prompts(4, 5)])


async def test_a_cancelled_caller_takes_its_request_with_it() -> None:
    engine = make_engine()
    gone, kept = (asyncio.create_task(engine.agenerate(request(p, max_new_tokens=30))) for p in prompts(4, 9))
    await until_tokens(engine, 4)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert len(engine._generator.unfinished) == 1
    assert (await kept).output_len == 30


async def test_versions_and_old_logprobs_survive_a_weight_update() -> None:
    """An interrupted answer continues with the new weights; each token has the logprob of its version."""
    old = make_model(torch.float64)
    weights = other_weights(old)
    new = type(old)(old.args).double()
    new.load_state_dict(weights, strict=False)
    new.tie_weights()
    engine = make_engine(old, version=3, prefill_tokens=6)
    tasks = [
        asyncio.create_task(engine.agenerate(request(p, seed=i, max_new_tokens=20)))
        for i, p in enumerate(prompts(5, 5, 9) + prompts(9))
    ]
    await until_tokens(engine, 7)
    before = [list(s.output) for s in engine._generator.unfinished]
    engine.pause()
    engine.update_weights(iter(weights.items()), version=4)
    engine.resume()
    answers: list[ModelResponse] = await asyncio.gather(*tasks)
    assert engine.version == 4
    assert [a.output_tokens[: len(b)] for a, b in zip(answers, before, strict=True)] == before
    for answer in answers:
        assert answer.output_versions == sorted(answer.output_versions)
        assert set(answer.output_versions) == {3, 4}
        given = torch.tensor(answer.output_logprobs, dtype=torch.float64)
        for version, model in ((3, old), (4, new)):
            mine = torch.tensor(answer.output_versions) == version
            wanted = trainer_logprobs(model, answer.input_tokens, answer.output_tokens, 1.0)
            torch.testing.assert_close(given[mine], wanted[mine], rtol=0, atol=GENERATED_LOGPROB_FP64)


async def test_a_prompt_read_with_old_weights_is_not_reused_after_an_update() -> None:
    model = make_model(torch.float64)
    weights = other_weights(model)
    engine = make_engine(model, max_slots=2)
    prompt = prompts(9)[0]
    wanted = [request(prompt, seed=i, max_new_tokens=12) for i in range(4)]
    tasks = [asyncio.create_task(engine.agenerate(r)) for r in wanted]
    await until_tokens(engine, 3)
    engine.update_weights(weights.items())
    answers = await asyncio.gather(*tasks)
    fresh = make_engine(model)
    fresh.update_weights(weights.items())
    assert [a.output_tokens for a in answers[2:]] == [a.output_tokens for a in fresh.generate(wanted[2:])]
    assert all(set(a.output_versions) == {1} for a in answers[2:])


async def test_a_failure_in_the_loop_reaches_every_caller() -> None:
    engine = make_engine(max_slots=2)
    hidden_states, calls = engine._generator.model.hidden_states, 0

    def fails_at_the_fifth(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ArithmeticError("planted")
        return hidden_states(*args)

    engine._generator.model.hidden_states = fails_at_the_fifth
    tasks = [engine.agenerate(request(p, max_new_tokens=30)) for p in prompts(4, 9, 5, 6)]
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)
    assert [str(result) for result in results] == ["planted"] * 4
    assert (await engine.agenerate(request([1, 2], max_new_tokens=3))).output_len == 3, "and the engine goes on"


async def test_weights_that_are_not_finite_are_an_error_and_leave_no_trace_in_the_cache() -> None:
    model = make_model()
    wanted = request(prompts(9)[0], seed=1, max_new_tokens=9)
    (good,) = make_engine(model).generate([wanted])
    engine = make_engine(model)
    engine.update_weights(((name, p * torch.nan) for name, p in model.named_parameters()))
    with pytest.raises(ArithmeticError, match="not finite"):
        await engine.agenerate(request(prompts(12)[0]))  # fills places that the next request masks
    engine.update_weights(model)
    assert (await engine.agenerate(wanted)).output_tokens == good.output_tokens


async def test_a_failed_update_fails_the_waiting_and_blocks_the_next_until_one_succeeds() -> None:
    model = make_model()
    engine = make_engine(model)
    task = asyncio.create_task(engine.agenerate(request(prompts(4)[0], max_new_tokens=50)))
    await until_tokens(engine, 3)
    with pytest.raises(RolloutError, match=r"weights are missing, for example 'layers\.1"):
        engine.update_weights([(name, p) for name, p in model.named_parameters() if not name.startswith("layers.1")])
    with pytest.raises(RolloutError, match="weights are missing"):
        await task
    with pytest.raises(RolloutError, match="no valid weights since an update failed"):
        await engine.agenerate(request([1]))
    engine.update_weights(model)
    assert (await engine.agenerate(request([1], max_new_tokens=2))).output_len == 2


def test_an_interrupt_reaches_the_waiting_too() -> None:
    """Whoever catches the interrupt and turns the loop again must not wait for ever."""
    engine = make_engine()
    hidden_states = engine._generator.model.hidden_states

    def interrupted(*args: Any) -> torch.Tensor:
        engine._generator.model.hidden_states = hidden_states
        raise KeyboardInterrupt

    engine._generator.model.hidden_states = interrupted
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.agenerate(request(prompts(4)[0], max_new_tokens=5)))
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    with pytest.raises(RuntimeError, match="generation was stopped by KeyboardInterrupt"):
        loop.run_until_complete(asyncio.wait_for(task, timeout=30))
    assert loop.run_until_complete(engine.agenerate(request([1], max_new_tokens=2))).output_len == 2
    loop.close()


def test_a_closing_loop_leaves_no_request_behind() -> None:
    engine = make_engine()

    async def leave() -> None:
        task = asyncio.ensure_future(engine.agenerate(request(prompts(4)[0], max_new_tokens=200)))
        await until_tokens(engine, 2)
        assert not task.done()

    asyncio.run(leave())
    assert not engine._generator.scheduler.has_work
    assert asyncio.run(engine.agenerate(request([1], max_new_tokens=2))).output_len == 2


def test_a_loop_that_still_waits_keeps_the_engine() -> None:
    engine = make_engine()
    waiting = asyncio.new_event_loop()
    task = waiting.create_task(engine.agenerate(request(prompts(4)[0], max_new_tokens=200)))
    waiting.run_until_complete(until_tokens(engine, 2))
    with pytest.raises(RolloutError, match="another event loop"):
        asyncio.run(engine.agenerate(request([1])))
    assert waiting.run_until_complete(task).output_len == 200
    waiting.close()
