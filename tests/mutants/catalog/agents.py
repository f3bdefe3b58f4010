"""Mistakes in what agents ask for, write and rate."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SAMPLING = "tests/rl/test_agent_sampling.py"
FORMATS = "tests/serve/test_tool_formats.py"
ONLINE = "tests/serve/test_online.py"
LIMITS = "tests/serve/test_request_limits.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "an override keeps the temperature that an agent asked for",
        "rl/agent_sampling.py",
        'cut = ["temperature", *cut]',
        "cut = [*cut]",
        (f"{SAMPLING}::test_an_override_samples_as_if_nothing_was_asked_and_says_so_once_a_field",),
    ),
    Mutant(
        "answers of any temperature are trained at the run's",
        "archon/engine/batch.py",
        'return self["temperatures"].masked_fill(self["temperatures"] == 0, default)',
        "return default",
        (f"{SAMPLING}::test_what_is_allowed_is_trained_at_the_temperature_of_each_answer",),
    ),
    Mutant(
        "a session of any age is trained",
        "rl/workflows/online.py",
        "if oldest < engine.version - self._max_age:",
        "if oldest < -self._max_age:",
        (f"{ONLINE}::test_a_session_of_old_weights_is_dropped_and_counted",),
    ),
    Mutant(
        "a group is trained as soon as one of its sessions is rated",
        "rl/workflows/online.py",
        "if len(self._waiting[name]) == size:",
        "if len(self._waiting[name]) <= size:",
        (f"{ONLINE}::test_a_group_is_trained_once_all_its_sessions_are_rated",),
    ),
    Mutant(
        "a call whose arguments have an unknown name is made without arguments",
        "archon/serve/call_syntax.py",
        "or (not arguments and not value.keys() <= _CALL_KEYS)",
        "",
        (f"{FORMATS}::test_what_is_no_valid_call_stays_the_text_that_it_is",),
    ),
    Mutant(
        "72 thousand is 72",
        "rl/rewards/numbers.py",
        "else _NO_UNIT.fullmatch(word) is None",
        "else True",
        ("tests/rl/rewards/test_math_rewards.py::test_no_other_number_is_paid_for_its_digits",),
    ),
    Mutant(
        "an argument of text that looks like a number becomes one",
        "archon/serve/call_syntax.py",
        'return value if kind in types or (value is None and "string" not in types) else text',
        "return value",
        (f"{FORMATS}::test_bare_arguments_have_the_types_of_their_schema",),
    ),
    Mutant(
        "what is no valid call loses the marks around it",
        "archon/serve/tool_calls.py",
        "self._add_text(parts, self._before + self._buffer[:end])",
        "self._add_text(parts, self._buffer[:end])",
        (f"{FORMATS}::test_what_is_no_valid_call_stays_the_text_that_it_is",),
    ),
    Mutant(
        "NaN temperatures of tokens are accepted",
        "archon/engine/batch.py",
        "wrong = values[~((values >= 0) & (values < math.inf))]",
        "wrong = values[(values < 0) | (values == math.inf)]",
        ("tests/engine/test_gradients.py::test_a_temperature_that_is_not_positive_and_finite_is_refused",),
    ),
    Mutant(
        "the temperature of a call is not checked",
        "archon/engine/batch.py",
        "if not 0 < default < math.inf:",
        'if not 0 < default < math.inf and "temperatures" in self:',
        ("tests/engine/test_gradients.py::test_a_temperature_that_is_not_positive_and_finite_is_refused",),
    ),
    Mutant(
        "one rank alone refuses a temperature",
        "archon/engine/engine.py",
        "            packed.check_temperatures(temperature)\n",
        "            if self.ranks.dp.size == 1:\n                packed.check_temperatures(temperature)\n",
        (
            "tests/distributed/test_unequal_shards.py::test_a_share_that_one_rank_refuses_is_refused_by_all[d2-train_batch-nan_temperature]",
        ),
    ),
    Mutant(
        "large requests are prepared on the event loop",
        "archon/serve/preparation.py",
        "        if size <= SMALL_BYTES:",
        "        if size <= 2**30:",
        (f"{LIMITS}::test_small_work_stays_on_the_event_loop",),
    ),
    Mutant(
        "threads that prepare requests keep Python's lock for long",
        "archon/serve/preparation.py",
        "sys.setswitchinterval(min(SWITCH_SECONDS, cls._interval))",
        "pass",
        (f"{LIMITS}::test_large_work_of_a_client_that_goes_is_dropped",),
    ),
    Mutant(
        "work of a client that has gone is done all the same",
        "archon/serve/routes.py",
        "await (running if size <= SMALL_BYTES else run_while_connected(request.receive, running))",
        "await running",
        (f"{LIMITS}::test_large_work_of_a_client_that_goes_is_dropped",),
    ),
    Mutant(
        "bytes of refused and finished requests are counted for good",
        "archon/serve/routes.py",
        "                reserved.callback(strict.release)\n",
        "",
        (f"{LIMITS}::test_bodies_of_all_requests_are_limited_while_they_are_read",),
    ),
    Mutant(
        "the nesting of a request has no limit",
        "archon/serve/request_limits.py",
        "        if depth > MAX_DEPTH:",
        "        if depth > 10 * MAX_DEPTH:",
        (f"{LIMITS}::test_every_endpoint_refuses_more_than_the_limits",),
    ),
    Mutant(
        "a text is tokenized before it is compared with the context",
        "archon/serve/prompts.py",
        "        self._check_length(text, where)\n        return encode_prompt(",
        "        return encode_prompt(",
        (f"{LIMITS}::test_a_text_that_cannot_fit_the_context_is_not_tokenized",),
    ),
    Mutant(
        "any number of connections is accepted",
        "archon/serve/server.py",
        "        if len(self.connections) > self._limits.connections:",
        "        if len(self.connections) > 100 * self._limits.connections:",
        (f"{LIMITS}::test_connections_are_limited",),
    ),
)
