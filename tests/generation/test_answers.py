"""What one answer promises: seeds, shared prompts, stops, limits, finish reasons, refusals."""

from __future__ import annotations

import asyncio
import string
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from archon.generation.generator import _round_up
from archon.generation.sequence import Sequence, StopStrings
from archon.generation.types import ModelResponse
from archon.rl import ModelRequest
from archon.schema.errors import RolloutError
from tests.generation.models import VOCAB, make_engine, make_model, prompts, request, trainer_logprobs
from tests.tolerances import GENERATED_LOGPROB_FP64


def char_tokenizer() -> Any:
    """Token i is the i-th of these pieces: single letters, and a multi-byte character in two halves."""
    halves = "Ã©"  # as byte-level vocabularies spell the two bytes of é
    pieces = ["<e>", "<p>", *halves, *string.ascii_letters, *string.digits, "-"]
    assert len(pieces) == VOCAB
    tokenizer = Tokenizer(WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<p>"))
    tokenizer.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", pad_token="<p>")


def letters(text: str) -> list[int]:
    return [4 + ord(c) - 97 for c in text]


def same(one: ModelResponse, other: ModelResponse) -> bool:
    return one.output_tokens == other.output_tokens


def assert_as_alone(model: Any, wanted: list[ModelRequest], answers: list[ModelResponse]) -> None:
    """Each request, answered by itself, gives the same tokens and logprobs."""
    for one, answer in zip(wanted, answers, strict=True):
        (alone,) = make_engine(model).generate([one])
        assert same(alone, answer)
        torch.testing.assert_close(
            torch.tensor(alone.output_logprobs),
            torch.tensor(answer.output_logprobs),
            rtol=0,
            atol=GENERATED_LOGPROB_FP64,
        )


def test_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    model = make_model(torch.float64)
    prompt = prompts(9, seed=3)[0]
    wanted = request(prompt, seed=11, max_new_tokens=30)
    (alone,) = make_engine(model).generate([wanted])
    others = [
        request(p, max_new_tokens=n, temperature=0.5) for p, n in zip(prompts(2, 9, 30, 5), (4, 40, 9, 20), strict=True)
    ]
    crowded = make_engine(model, seed=99, page_size=5, prefill_tokens=13, max_slots=3).generate(
        [*others, wanted, *others]
    )
    assert same(crowded[4], alone)
    torch.testing.assert_close(
        torch.tensor(crowded[4].output_logprobs),
        torch.tensor(alone.output_logprobs),
        rtol=0,
        atol=GENERATED_LOGPROB_FP64,
    )


def test_requests_without_a_seed_differ_and_repeat_with_the_engine_seed() -> None:
    wanted = [request(prompts(4)[0], max_new_tokens=12) for _ in range(6)]
    first, again = (make_engine(seed=5).generate(wanted) for _ in range(2))
    other = make_engine(seed=6).generate(wanted)
    assert len({tuple(answer.output_tokens) for answer in first}) == 6
    assert all(map(same, first, again))
    assert not any(map(same, first, other))


def test_a_resumed_engine_draws_the_seeds_that_come_next() -> None:
    wanted = [request(prompts(4)[0], max_new_tokens=12) for _ in range(3)]
    engine = make_engine(seed=5)
    engine.generate(wanted)
    resumed = make_engine(seed=5)
    resumed.load_state_dict(engine.state_dict())
    assert all(map(same, engine.generate(wanted), resumed.generate(wanted)))


@pytest.mark.parametrize("length", [2, 4, 8, 11])
@pytest.mark.parametrize("prefill_tokens", [3, 100])
def test_a_shared_prompt_is_read_once_and_gives_what_reading_it_alone_gives(length: int, prefill_tokens: int) -> None:
    model = make_model(torch.float64)
    prompt, other = prompts(length, length, seed=1)
    wanted = [request(p, seed=seed, max_new_tokens=10) for p in (prompt, other) for seed in range(6)]
    engine = make_engine(model, max_slots=5, prefill_tokens=prefill_tokens)
    shared = engine.generate(wanted)
    # Every token of a prompt goes through the model once, and every answer token but the last once.
    assert engine.stats.prefill_tokens == 2 * length
    assert engine.stats.decode_tokens == sum(answer.output_len - 1 for answer in shared)
    assert engine.stats.shared_prompts == 10
    assert_as_alone(model, wanted, shared)


@pytest.mark.parametrize("n_pages", [None, 14])
def test_answers_that_are_still_the_same_are_computed_once(n_pages: int | None) -> None:
    model = make_model(torch.float64)
    wanted = [request(p, seed=seed, max_new_tokens=14, temperature=0.03) for p in prompts(5, 8) for seed in range(6)]
    engine = make_engine(model, n_pages=n_pages, max_slots=12)
    answers = engine.generate(wanted)
    beginnings = [(*a.input_tokens, *a.output_tokens[:n]) for a in answers for n in range(1, a.output_len)]
    assert engine.stats.duplicate_tokens > 20
    if n_pages is None:
        assert engine.stats.decode_tokens == len(beginnings)
        assert engine.stats.duplicate_tokens == len(beginnings) - len(set(beginnings))
    assert len(set(beginnings)) > max(a.output_len for a in answers) * 2, "no two answers parted"
    assert_as_alone(model, wanted, answers)


def test_a_sequence_that_is_read_again_is_no_twin_of_one_that_drew_its_token_later() -> None:
    """After new weights two answers to one prompt are read again at once, and a third in parts: its last token is run
    next to theirs while what it drew is still of before. Stop ids that may not be sampled yet leave them one token."""
    model, only = make_model(torch.float64), 7
    short, long = prompts(3, 8, seed=2)
    others = [token for token in range(VOCAB) if token != only]
    wanted = [request(p, stop_token_ids=others, min_new_tokens=8, max_new_tokens=8) for p in (short, short, long)]
    generator = make_engine(model, prefill_tokens=9)._generator
    _, second, third = sequences = [generator.submit(each, lambda _: None) for each in wanted]
    for _ in range(3):
        generator.step()
    generator.restart(1)
    for _ in range(2):
        generator.step()
    assert third.total - third.computed == 1 and third.drawn is not None and second.drawn is not None
    assert third.drawn[1:] == second.drawn[1:] and third.drawn[0] < second.drawn[0]
    while generator.scheduler.has_work:
        generator.step()
    assert {token for sequence in sequences for token in sequence.output} == {only}
    assert_as_alone(model, wanted, [sequence.response() for sequence in sequences])


def test_pages_and_prompts_are_given_back() -> None:
    engine = make_engine()
    engine.generate([request(p, max_new_tokens=9) for p in prompts(3, 3, 9, 20) * 3])
    scheduler = engine._generator.scheduler
    assert scheduler.pool.n_free == scheduler.pool.n_pages
    assert not scheduler.prompts


def test_a_small_cache_preempts_and_gives_the_same_answers() -> None:
    model = make_model(torch.float64)
    wanted = [request(p, seed=i, max_new_tokens=20) for i, p in enumerate(prompts(3, 10, 6, 12, 1, 8) * 2)]
    roomy, tight = make_engine(model), make_engine(model, n_pages=9)
    for one, other in zip(roomy.generate(wanted), tight.generate(wanted), strict=True):
        assert same(one, other)
        torch.testing.assert_close(
            torch.tensor(one.output_logprobs), torch.tensor(other.output_logprobs), rtol=0, atol=GENERATED_LOGPROB_FP64
        )
    assert tight.stats.prefill_tokens > roomy.stats.prefill_tokens, "nothing was preempted, so nothing was tested"


def test_stop_ids_end_the_answer_and_stay_in_it() -> None:
    engine = make_engine()
    prompt = prompts(5)[0]
    (free,) = engine.generate([request(prompt, greedy=True, max_new_tokens=20)])
    stop = free.output_tokens[6]
    (stopped,) = engine.generate([request(prompt, greedy=True, max_new_tokens=20, stop_token_ids=[stop])])
    assert stopped.output_tokens == free.output_tokens[: free.output_tokens.index(stop) + 1]
    assert stopped.stop_reason == "stop"
    assert free.stop_reason == "length"


def test_the_finish_reason_is_stop_when_the_last_allowed_token_is_a_stop() -> None:
    engine = make_engine()
    prompt = prompts(5)[0]
    (free,) = engine.generate([request(prompt, greedy=True, max_new_tokens=1)])
    (stopped,) = engine.generate([request(prompt, greedy=True, max_new_tokens=1, stop_token_ids=free.output_tokens)])
    assert (free.stop_reason, stopped.stop_reason) == ("length", "stop")


def test_end_of_text_ends_every_answer_but_one_that_ignores_it() -> None:
    model = make_model()
    prompt = prompts(5)[0]
    (free,) = make_engine(model).generate([request(prompt, greedy=True, max_new_tokens=20)])
    engine = make_engine(model, eos_token_ids=[free.output_tokens[3]])
    ended, ignored = engine.generate(
        [request(prompt, greedy=True, max_new_tokens=20, ignore_eos=ignore) for ignore in (False, True)]
    )
    assert ended.output_tokens == free.output_tokens[: free.output_tokens.index(free.output_tokens[3]) + 1]
    assert ignored.output_tokens == free.output_tokens


def test_the_tokenizer_names_the_end_of_text() -> None:
    engine = make_engine(tokenizer=char_tokenizer())
    answers = engine.generate([request(prompts(5)[0], max_new_tokens=200, seed=i) for i in range(6)])
    assert {answer.stop_reason for answer in answers} == {"stop"}
    assert all(answer.output_tokens.index(0) == answer.output_len - 1 for answer in answers)


def test_nothing_stops_before_min_new_tokens() -> None:
    engine = make_engine()
    everything = list(range(VOCAB - 1))
    answers = engine.generate(
        [
            request(prompts(3)[0], seed=i, min_new_tokens=7, max_new_tokens=9, stop_token_ids=everything)
            for i in range(5)
        ]
    )
    for answer in answers:
        assert answer.output_tokens[:7] == [VOCAB - 1] * 7
        assert answer.stop_reason in ("stop", "length")
        assert answer.output_len == (8 if answer.output_tokens[7] != VOCAB - 1 else 9)


@pytest.mark.parametrize(
    ("text", "stops", "stopped_after"),
    [
        ("abcdefgh", ["d"], 4),
        ("abcdefgh", ["cde"], 5),
        ("abcdefgh", ["xyz", "fg"], 7),
        ("abcdefgh", ["z", "cdef"], 6),
        ("abcdefgh", ["cdefg", "h"], 7),
        ("abcdefgh", ["abcdefgh"], 8),
        ("ababac", ["abac"], 6),
        ("abcdefgh", ["hi"], None),
        ("ab", ["b"], 2),
    ],
)
def test_stop_strings_that_span_tokens(text: str, stops: list[str], stopped_after: int | None) -> None:
    watch = StopStrings(char_tokenizer(), stops)
    fed = [watch.feed(token) for token in letters(text)]
    assert (fed.index(True) + 1 if True in fed else None) == stopped_after


def test_stop_strings_with_a_character_in_two_tokens() -> None:
    watch = StopStrings(char_tokenizer(), ["aé", "zz"])
    assert [watch.feed(token) for token in (*letters("a"), 2, 3)] == [False, False, True]
    watch = StopStrings(char_tokenizer(), ["aé", "zz"])
    assert [watch.feed(token) for token in (2, *letters("zz"))] == [False, False, True]


def test_stop_strings_end_the_answer() -> None:
    engine = make_engine()
    tokenizer = char_tokenizer()
    prompt = prompts(5)[0]
    (free,) = engine.generate([request(prompt, greedy=True, max_new_tokens=20)])
    text = tokenizer.decode(free.output_tokens[8:10])
    assert text not in tokenizer.decode(free.output_tokens[:9])
    wanted = request(prompt, greedy=True, max_new_tokens=20, stop=text)
    wanted.tokenizer = tokenizer
    (stopped,) = engine.generate([wanted])
    assert stopped.output_tokens == free.output_tokens[:10]
    assert stopped.stop_reason == "stop"


def test_stop_id_beyond_the_vocabulary_ends_nothing_and_breaks_nothing() -> None:
    """A tokenizer's padding id may lie behind the model's vocabulary."""
    wanted = {"seed": 3, "min_new_tokens": 4, "max_new_tokens": 9}
    (free,) = make_engine().generate([request(prompts(3)[0], **wanted)])
    (same,) = make_engine().generate([request(prompts(3)[0], stop_token_ids=[VOCAB, 10**6], **wanted)])
    assert same.output_tokens == free.output_tokens


def test_stop_strings_do_not_end_the_answer_before_min_new_tokens() -> None:
    engine = make_engine(tokenizer=char_tokenizer())
    wanted = {"greedy": True, "ignore_eos": True, "max_new_tokens": 20}
    prompt = prompts(5)[0]
    (free,) = engine.generate([request(prompt, **wanted)])
    pieces = sorted({char_tokenizer().decode([token]) for token in free.output_tokens})
    early, late = engine.generate([request(prompt, stop=pieces, min_new_tokens=n, **wanted) for n in (0, 9)])
    assert (early.output_len, late.output_len) == (1, 10)
    assert early.stop_reason == late.stop_reason == "stop"


def test_prompts_are_read_within_the_budget_of_a_step() -> None:
    generator = make_engine(prefill_tokens=10, max_slots=4)._generator
    for prompt in prompts(8, 7, 30, 3):
        generator.submit(request(prompt, max_new_tokens=1), lambda _: None)
    read = [0]
    while generator.scheduler.has_work:
        generator.step()
        read.append(generator.stats.prefill_tokens)
    assert [after - before for before, after in pairwise(read)] == [10, 10, 10, 10, 8]


def test_max_tokens_counts_the_prompt() -> None:
    (answer,) = make_engine().generate([request(prompts(7)[0], max_tokens=10, max_new_tokens=20)])
    assert (answer.output_len, answer.stop_reason) == (3, "length")


def test_the_context_ends_an_answer() -> None:
    (answer,) = make_engine(max_seq_len=12).generate([request(prompts(7)[0], max_new_tokens=20)])
    assert (answer.output_len, answer.stop_reason) == (5, "length")


def test_an_answer_may_fill_the_cache_exactly() -> None:
    engine = make_engine(n_pages=3, page_size=4)
    (answer,) = engine.generate([request(prompts(5)[0], max_new_tokens=8)])  # the 13th token is never cached
    assert answer.output_len == 8
    with pytest.raises(RolloutError, match=r"5 prompt tokens and up to 9 new ones need 4 pages of 4 tokens.* has 3"):
        engine.generate([request(prompts(5)[0], max_new_tokens=9)])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (request([1, 2], n_samples=2), "n_samples is 2; expected 1"),
        (request([]), "the prompt is empty"),
        (request([1, VOCAB]), f"token id {VOCAB} is not below the vocabulary size {VOCAB}"),
        (request([1, -1]), "token id -1 is not below"),
        (request([1] * 256), "the prompt of 256 tokens leaves no room for an answer within 256 tokens"),
        (request([1] * 9, max_tokens=9), "leaves no room for an answer within 9 tokens"),
        (request([1], stop=["x"]), "need a tokenizer"),
        (ModelRequest([1], image_data=["x"]), "image_data needs a vision-language model; this is a text model"),
    ],
)
def test_a_request_that_can_never_be_honoured_is_an_error_at_submission(wanted: ModelRequest, message: str) -> None:
    engine = make_engine()
    with pytest.raises(RolloutError, match=message):
        engine.generate([request([1, 2], max_new_tokens=3), wanted])
    assert not engine._generator.scheduler.has_work, "the good request of the refused call must not linger"


def test_logprobs_are_finite_and_one_per_token() -> None:
    for answer in make_engine().generate([request(p, max_new_tokens=9, temperature=3.0) for p in prompts(1, 5, 9)]):
        assert len(answer.output_tokens) == len(answer.output_logprobs) == len(answer.output_versions) == 9
        assert all(logprob < 0 for logprob in answer.output_logprobs)
        assert answer.input_len + answer.output_len in (10, 14, 18)
        assert 0 < answer.ttft <= answer.latency


def test_few_distinct_numbers_of_rows_are_computed() -> None:
    for rows in range(1, 3000):
        assert rows <= _round_up(rows) <= max(rows * 9 / 8, rows)
    assert len({_round_up(rows) for rows in range(1, 8193)}) < 100
    assert [_round_up(rows) for rows in (1, 7, 32, 256)] == [1, 7, 32, 256]


def test_a_stop_may_follow_min_new_tokens_at_once() -> None:
    """The shortest answer with a minimum of n tokens has n tokens and the stop."""
    engine = make_engine(make_model(torch.float64))
    prompt = prompts(7)[0]
    (free,) = (answer.output_tokens for answer in engine.generate([request(prompt, greedy=True, max_new_tokens=8)]))
    lengths = [n for n in range(8) if free[n] not in free[:n]]
    assert max(lengths) > 1
    wanted = [
        request(prompt, greedy=True, max_new_tokens=8, min_new_tokens=n, stop_token_ids=[free[n]]) for n in lengths
    ]
    for n, answer in zip(lengths, engine.generate(wanted), strict=True):
        assert answer.output_tokens == free[: n + 1]
        assert answer.stop_reason == "stop"


def test_tokens_of_a_sequence_are_those_of_prompt_and_answer() -> None:
    sequence = Sequence(request([1, 2, 3]), 5, 0, frozenset(), None, lambda _: None)
    for token in (4, 5, 6, 7):
        sequence.append(token, -1.0, 0)
    whole = [1, 2, 3, 4, 5, 6, 7]
    for start in range(len(whole)):
        for stop in range(start, len(whole) + 1):
            assert sequence.tokens(start, stop) == whole[start:stop]


def test_a_failure_clears_the_cache() -> None:
    """Masked NaN is still NaN where pages are multiplied as a whole."""
    generator = make_engine()._generator
    for group in generator.cache.groups:
        for tensor in group.stored:
            tensor.fill_(torch.nan)
    generator.fail(RuntimeError("a step failed"))
    assert not any(tensor.any() for group in generator.cache.groups for tensor in group.stored)


class EvenTokens:
    """Allows even tokens, and after `limit` of them none."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def allowed(self, vocab_size: int) -> np.ndarray:
        return (np.arange(vocab_size) % 2 == 0) & (self._left > 0)

    def accept(self, token: int) -> None:
        if token % 2 or not self._left:
            raise RolloutError("no token is allowed")
        self._left -= 1


@pytest.mark.parametrize("sampling", [{}, {"greedy": True}, {"top_p": 0.7, "min_p": 0.01, "temperature": 0.6}])
@pytest.mark.parametrize("n_pages", [None, 9])
def test_constraints_choose_among_allowed_tokens_and_leave_other_answers_alone(
    sampling: dict[str, Any], n_pages: int | None
) -> None:
    """The logprobs are the model's; with few pages, sequences are preempted."""
    model = make_model(torch.float64)
    free = [request(prompt, seed=seed, max_new_tokens=12) for seed, prompt in enumerate(prompts(5, 7))]
    constrained = [request(prompt, seed=9, max_new_tokens=12, **sampling) for prompt in prompts(5, 9, seed=1)]
    for one in constrained:
        one.constraint = EvenTokens(limit=12)
    engine = make_engine(model, page_size=4, **({} if n_pages is None else {"n_pages": n_pages}))
    answers = engine.generate([free[0], *constrained, free[1]])
    assert_as_alone(model, free, [answers[0], answers[3]])
    for one, answer in zip(constrained, answers[1:3], strict=True):
        assert len(answer.output_tokens) == 12 and not any(token % 2 for token in answer.output_tokens)
        expected = trainer_logprobs(model, one.input_ids, answer.output_tokens, one.gconfig.temperature)
        torch.testing.assert_close(
            torch.tensor(answer.output_logprobs, dtype=torch.float64), expected, rtol=0, atol=GENERATED_LOGPROB_FP64
        )


def test_an_unlikely_token_is_sampled_if_only_it_is_allowed() -> None:
    """In float32 its probability is 0 next to the others."""
    engine = make_engine(make_model(), eos_token_ids=[])
    unlikely = request(prompts(5)[0], max_new_tokens=4, logit_bias={2 * token: -1000.0 for token in range(20)})
    unlikely.constraint = EvenTokens(limit=4)
    (answer,) = engine.generate([unlikely])
    assert not any(token % 2 for token in answer.output_tokens)


def test_a_constraint_without_an_allowed_token_fails_its_request_only() -> None:
    model = make_model(torch.float64)
    free, stuck = request(prompts(5)[0], seed=1, max_new_tokens=8), request(prompts(5)[0], max_new_tokens=8)
    stuck.constraint = EvenTokens(limit=3)
    engine = make_engine(model)

    async def both() -> list[Any]:
        return await asyncio.gather(engine.agenerate(free), engine.agenerate(stuck), return_exceptions=True)

    answer, error = asyncio.run(both())
    assert_as_alone(model, [free], [answer])
    assert isinstance(error, RolloutError) and str(error) == "no token is allowed"
    assert engine.unfinished == 0 and engine._generator.scheduler.pool.n_free == engine._generator.cache.n_pages
