"""Mistakes in requests to a fleet of servers: what is asked, what an answer means, who is asked."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE, FLEET, TRAINING = "tests/remote/test_engine.py", "tests/remote/test_fleet.py", "tests/remote/test_training.py"
SLEEP = "tests/remote/test_sleep.py"
INTERRUPTED = f"{ENGINE}::test_an_answer_that_a_push_interrupts_goes_on_with_the_new_weights"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "an interrupted answer may have its whole limit again",
        "archon/remote/engine.py",
        "limit=limit - len(first_tokens),",
        "limit=limit,",
        (INTERRUPTED,),
    ),
    Mutant(
        "an interrupted answer needs its least tokens again",
        "archon/remote/engine.py",
        "if first_tokens and g.min_new_tokens:\n",
        "if False:\n",
        (f"{ENGINE}::test_resumed_answer_asks_for_what_is_left_in_a_random_stream_of_its_own",),
    ),
    Mutant(
        "an interrupted answer goes on in the random stream that it began with",
        "archon/remote/engine.py",
        "derive_seed(sampling.seed, done))",
        "sampling.seed)",
        (f"{ENGINE}::test_resumed_answer_asks_for_what_is_left_in_a_random_stream_of_its_own",),
    ),
    Mutant(
        "an interrupted answer goes on from the prompt alone",
        "archon/remote/engine.py",
        "prompt=[*req.input_ids, *first_tokens],",
        "prompt=[*req.input_ids],",
        (INTERRUPTED,),
    ),
    Mutant(
        "the longest server decides how long an answer may be",
        "archon/remote/engine.py",
        "self.max_seq_len = min(server",
        "self.max_seq_len = max(server",
        (f"{ENGINE}::test_answers_fit_the_shortest_server",),
    ),
    Mutant(
        "the newest group is forgotten first",
        "archon/remote/engine.py",
        "self._groups.popitem(last=False)",
        "self._groups.popitem(last=True)",
        (f"{ENGINE}::test_the_oldest_groups_are_forgotten_first",),
    ),
    Mutant(
        "a server's own dtype decides nothing about its limits",
        "archon/remote/engine.py",
        'return LIMITS.get(server.dialect.facts.dtype, LIMITS["float32"])',
        'return LIMITS["bfloat16"]',
        (f"{ENGINE}::test_limit_of_a_push_is_the_configured_one_or_that_of_float32",),
    ),
    Mutant(
        "a configured limit of a push is ignored",
        "archon/remote/engine.py",
        "if self.config.max_difference is not None:",
        "if self.config.max_difference is None and False:",
        (f"{ENGINE}::test_limit_of_a_push_is_the_configured_one_or_that_of_float32",),
    ),
    Mutant(
        "a delta lacks what changed in its bits alone",
        "archon/remote/delta.py",
        "changed = (a.view(bits) != b.view(bits)).flatten().nonzero().flatten()",
        "changed = (a != b).flatten().nonzero().flatten()",
        ("tests/remote/test_delta.py",),
    ),
    Mutant(
        "a delta is written between checkpoints of other dtypes",
        "archon/remote/delta.py",
        "if a.shape != b.shape or a.dtype != b.dtype:",
        "if a.shape != b.shape:",
        ("tests/remote/test_delta.py",),
    ),
    Mutant(
        "a delta that is larger than half a checkpoint is written",
        "archon/remote/delta.py",
        "        if size > limit:\n            return False\n",
        "",
        ("tests/remote/test_delta.py",),
    ),
    Mutant(
        "a server that left and joins again is dropped",
        "archon/remote/engine.py",
        "                self._leaving.discard(url)\n",
        "",
        (f"{FLEET}::test_a_server_that_left_may_join_again",),
    ),
    Mutant(
        "a server that is too busy has refused the request",
        "archon/remote/http.py",
        "if status in (408, 429) or not 400 <= status < 500:",
        "if status == 408 or not 400 <= status < 500:",
        ("tests/remote/test_http.py::test_status_says_whether_the_request_or_the_server_is_at_fault",),
    ),
    Mutant(
        "a request that the server refuses is asked elsewhere",
        "archon/remote/http.py",
        "if status in (408, 429) or not 400 <= status < 500:",
        "if status:",
        ("tests/remote/test_http.py::test_status_says_whether_the_request_or_the_server_is_at_fault",),
    ),
    Mutant(
        "tokens that the model does not have are accepted",
        "archon/remote/answer_checks.py",
        "(ids and not 0 <= min(ids) <= max(ids) < vocab_size)",
        "(ids and not 0 <= min(ids) <= max(ids) <= vocab_size)",
        (f"{ENGINE}::test_impossible_tokens_are_refused",),
    ),
    Mutant(
        "more tokens than were asked for are accepted",
        "archon/remote/answer_checks.py",
        "if n > expected.limit:",
        "if n > 2 * expected.limit:",
        (f"{ENGINE}::test_impossible_tokens_are_refused",),
    ),
    Mutant(
        "greedy requests to servers sample",
        "archon/remote/dialects/base.py",
        '"temperature": 0.0 if self.gconfig.greedy else self.gconfig.temperature,',
        '"temperature": self.gconfig.temperature,',
        (f"{ENGINE}::test_answers_are_those_of_the_generator_in_process",),
    ),
    Mutant(
        "a paused engine sends new requests",
        "archon/remote/engine.py",
        "        self._resumed.clear()\n",
        "",
        (f"{ENGINE}::test_paused_servers_sample_nothing",),
    ),
    Mutant(
        "SGLang's scores begin at the first token",
        "archon/remote/dialects/sglang.py",
        "items.column(0).value[1:]",
        "[score or 0.0 for score in items.column(0).value[:-1]]",
        ("tests/remote/test_sglang.py::test_answers_are_those_of_the_generator_and_pushes_are_verified",),
    ),
    Mutant(
        "archon's servers stop at their own end-of-text id",
        "archon/remote/dialects/archon.py",
        '"stop_token_ids": sampling.stop_token_ids,',
        '"stop_token_ids": [],',
        ("tests/remote/test_archon.py::test_answers_are_those_of_the_generator_in_process",),
    ),
    Mutant(
        "the probe's logprobs are compared one token late",
        "rl/weight_sync.py",
        "return [float(x) for x in scores[0, 1:]]",
        "return [float(x) for x in scores[0, :-1]]",
        (f"{TRAINING}::test_every_push_is_verified_and_counted",),
    ),
    Mutant(
        "numbers of a run count requests that were asked again as resumed",
        "rl/monitor.py",
        '"Answers resumed after an interruption.", stats.resumed)',
        '"Answers resumed after an interruption.", stats.retried)',
        ("tests/rl/test_monitor.py::test_a_scrape_has_the_last_step_and_every_server",),
    ),
    Mutant(
        "a sleeping server loads weights before it has memory for them",
        "archon/remote/server.py",
        'self.dialect.wake(self.http, "weights", push.seconds)',
        'self.dialect.wake(self.http, "kv_cache", push.seconds)',
        (f"{SLEEP}::test_a_push_wakes_the_weights_then_loads_then_wakes_the_cache",),
    ),
    Mutant(
        "requests go to a sleeping server",
        "archon/remote/engine.py",
        "if not (server.pushing or server.asleep)]",
        "if not server.pushing]",
        (f"{SLEEP}::test_sleep_interrupts_answers_and_holds_new_requests_until_the_server_is_awake",),
    ),
    Mutant(
        "a failed push leaves the server asleep, and no launcher restarts it",
        "archon/remote/server.py",
        "self.pushing = self.asleep = False",
        "self.pushing = False",
        (f"{SLEEP}::test_a_failed_push_leaves_no_server_asleep",),
    ),
    Mutant(
        "a step without an update leaves the server asleep",
        "rl/trainer.py",
        "self.weight_sync.wake()",
        "pass",
        (f"{SLEEP}::test_a_step_without_an_update_wakes_the_server",),
    ),
)
