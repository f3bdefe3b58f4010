"""The scheduler's promises, on random loads without a model: order, no leak, no deadlock, no page written by two."""

from __future__ import annotations

import random

import pytest

from archon.generation.scheduler import BlockPool, Scheduler, Step
from archon.generation.sequence import Sequence
from archon.generation.types import ModelRequest


def make_sequence(prompt: list[int], limit: int) -> Sequence:
    return Sequence(
        request=ModelRequest(prompt),
        limit=limit,
        seed=0,
        stop_ids=frozenset(),
        stop_strings=None,
        on_done=lambda _: None,
    )


def run_step(scheduler: Scheduler, rng: random.Random) -> list[Sequence]:
    """What the generator does, without tensors: write pages, sample a token where due, retire what ends."""
    step: Step = scheduler.plan()
    ready = [fork.sequence for fork in step.forks if fork.sequence.computed == fork.sequence.total]
    for sequence in step.decode:
        check_private(scheduler, sequence, sequence.total - 1, sequence.total)
        sequence.computed += 1
        ready.append(sequence)
    for chunk in step.chunks:
        check_private(scheduler, chunk.sequence, chunk.start, chunk.stop)
        forks = scheduler.complete_chunk(chunk, "hidden")
        if chunk.sequence.computed == chunk.sequence.total:
            ready.append(chunk.sequence)
        ready += [fork.sequence for fork in forks if fork.sequence.computed == fork.sequence.total]
    assert ready or step.chunks or step.forks, "a step without work"
    for sequence in ready:
        sequence.append(rng.randrange(9), -1.0, 0)
        if sequence.stop_reason is not None:
            scheduler.finish(sequence)
    return ready


def check_private(scheduler: Scheduler, sequence: Sequence, start: int, stop: int) -> None:
    size = scheduler.page_size
    assert len(sequence.pages) * size >= stop
    for page in sequence.pages[start // size : (stop - 1) // size + 1]:
        users = [s for s in scheduler.running if page in s.pages]
        assert users == [sequence], "a page is written by one sequence while another one owns it"


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_in_order_and_every_page_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    slots = rng.choice([1, 3, 8])
    scheduler = Scheduler(rng.choice([12, 20, 60]) * 4 // size, size, slots, rng.choice([1, 5, 50]))
    kinds = [[rng.randrange(9) for _ in range(rng.choice([1, 2, 7, 8, 16]))] for _ in range(4)]
    sequences = [make_sequence(list(rng.choice(kinds)), rng.choice([1, 2, 9, 20])) for _ in range(40)]
    waiting = list(sequences)
    for _ in range(5000):
        while waiting and rng.random() < 0.5:
            scheduler.submit(waiting.pop(0))
        if rng.random() < 0.05 and scheduler.has_work:
            victim = rng.choice([*scheduler.running, *scheduler.waiting])
            victim.stop_reason = "abort"
            scheduler.finish(victim)
        if rng.random() < 0.02:
            scheduler.restart()
        if scheduler.has_work:
            run_step(scheduler, rng)
            assert len(scheduler.running) <= slots
        if not waiting and not scheduler.has_work:
            break
    assert all(sequence.stop_reason is not None for sequence in sequences)
    assert scheduler.pool.n_free == scheduler.pool.n_pages
    assert not scheduler.prompts


def test_admission_follows_submission_while_slots_last() -> None:
    scheduler = Scheduler(n_pages=100, page_size=4, max_slots=3, prefill_tokens=100)
    sequences = [make_sequence([i, i + 1], 5) for i in range(6)]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.plan()
    assert scheduler.running == sequences[:3]
    scheduler.finish(sequences[1])
    scheduler.plan()
    assert scheduler.running == [sequences[0], sequences[2], sequences[3]]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = Scheduler(n_pages=4, page_size=2, max_slots=4, prefill_tokens=100)
    old, young, later = make_sequence([1, 2], 7), make_sequence([3], 7), make_sequence([4], 2)
    for sequence in (old, young):
        scheduler.submit(sequence)
    rng = random.Random(0)
    for _ in range(5):
        run_step(scheduler, rng)
    scheduler.submit(later)
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [young, later]
    kept = list(young.output)
    while scheduler.has_work:
        run_step(scheduler, rng)
    assert young.output[: len(kept)] == kept
    assert [len(s.output) for s in (old, young, later)] == [7, 7, 2]


def test_a_kept_prompt_gives_way_to_a_request_that_needs_its_pages() -> None:
    scheduler = Scheduler(n_pages=4, page_size=2, max_slots=1, prefill_tokens=100)
    prompt = [1, 2, 3, 4]
    first, large, again = make_sequence(prompt, 1), make_sequence([5] * 7, 2), make_sequence(prompt, 1)
    for sequence in (first, large, again):
        scheduler.submit(sequence)
    rng = random.Random(0)
    run_step(scheduler, rng)
    assert scheduler.pool.n_free == 2, "the prompt is kept for the third request"
    for _ in range(3):
        run_step(scheduler, rng)
    assert [s.stop_reason for s in (first, large, again)] == ["length"] * 3


def test_followers_survive_the_abort_of_their_leader() -> None:
    scheduler = Scheduler(n_pages=50, page_size=4, max_slots=4, prefill_tokens=3)
    group = [make_sequence([1, 2, 3, 4, 5, 6, 7], 2) for _ in range(3)]
    for sequence in group:
        scheduler.submit(sequence)
    rng = random.Random(0)
    run_step(scheduler, rng)
    assert [s.waits_for_prompt for s in group] == [False, True, True]
    group[0].stop_reason = "abort"
    scheduler.finish(group[0])
    while scheduler.has_work:
        run_step(scheduler, rng)
    assert [s.stop_reason for s in group] == ["abort", "length", "length"]
    assert scheduler.pool.n_free == 50


def test_a_pool_hands_out_the_lowest_pages_and_counts_owners() -> None:
    pool = BlockPool(5)
    assert pool.take(3) == [0, 1, 2]
    pool.retain([1])
    pool.release([0, 1, 2])
    assert pool.n_free == 4
    assert pool.take(4) == [0, 2, 3, 4]
    pool.release([1])
    assert pool.take(1) == [1]
    with pytest.raises(AssertionError, match="1 pages requested, 0 free"):
        pool.take(1)


def test_a_change_of_weights_keeps_the_order_of_the_queue() -> None:
    scheduler = Scheduler(n_pages=100, page_size=4, max_slots=3, prefill_tokens=100)
    sequences = [make_sequence([i, i + 1], 5) for i in range(5)]
    for sequence in sequences:
        scheduler.submit(sequence)
    run_step(scheduler, random.Random(0))
    scheduler.restart()
    assert list(scheduler.waiting) == sequences and not scheduler.running
    assert scheduler.pool.n_free == 100
    assert [sequence.computed for sequence in sequences] == [0] * 5
    scheduler.plan()
    assert scheduler.running == sequences[:3]


def test_a_page_is_kept_for_each_running_sequence_that_may_grow() -> None:
    scheduler = Scheduler(n_pages=3, page_size=2, max_slots=2, prefill_tokens=100)
    growing, large, small = make_sequence([1, 2], 4), make_sequence([3, 4, 5], 2), make_sequence([6], 2)
    for sequence in (growing, large):
        scheduler.submit(sequence)
    scheduler.plan()
    assert scheduler.running == [growing], "two pages are free, and one is for its next tokens"
    scheduler.finish(large)
    scheduler.submit(small)
    scheduler.plan()
    assert scheduler.running == [growing, small]


def test_a_preempted_sequence_comes_before_those_that_wait() -> None:
    scheduler = Scheduler(n_pages=4, page_size=2, max_slots=2, prefill_tokens=100)
    old, young, waiting = make_sequence([1, 2], 7), make_sequence([3], 7), make_sequence([4], 2)
    for sequence in (old, young, waiting):
        scheduler.submit(sequence)
    rng = random.Random(0)
    while scheduler.running != [old]:
        run_step(scheduler, rng)
    assert list(scheduler.waiting) == [young, waiting]
