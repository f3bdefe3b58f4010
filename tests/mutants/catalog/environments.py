"""Mistakes in environments, of other packages and of one's own."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a question's text is its gold answer",
        "rl/environments/reasoning_gym.py",
        'else str(item["answer"])',
        'else str(item["question"])',
        ("tests/rl/environments/test_reasoning_gym.py::test_the_reward_is_the_packages_own_score",),
    ),
    Mutant(
        "the scorer of an environment is asked about thoughts too",
        "rl/environments/reasoning_gym.py",
        "return str(stated[-1] if stated else completion).strip()",
        "return str(completion).strip()",
        ("tests/rl/environments/test_reasoning_gym.py::test_the_reward_is_the_packages_own_score",),
    ),
    Mutant(
        "a held-out question is trained on under another seed",
        "rl/environments/splits.py",
        'return sha256(question.encode(errors="surrogatepass")).digest()[0] % HELD_OUT_EVERY == 0',
        "return id(question) % HELD_OUT_EVERY == 0",
        ("tests/rl/environments/test_reasoning_gym.py::test_no_question_is_both_trained_on_and_held_out",),
    ),
    Mutant(
        "every game of a run is the same one",
        "rl/environments/textarena.py",
        "self._game.reset(num_players=1, seed=seed)",
        "self._game.reset(num_players=1, seed=0)",
        (
            "tests/rl/environments/test_textarena.py::test_samples_of_a_group_play_the_same_game_and_rows_different_ones",
        ),
    ),
    Mutant(
        "an action earns the reward of the step before it",
        "rl/environments/episodes.py",
        "total, done = total + step.reward, step.done",
        "total, done = total + (0.0 if step.done else step.reward), step.done",
        (
            "tests/rl/environments/test_textarena.py::test_a_right_guess_earns_one_and_only_the_models_tokens_are_trained",
        ),
    ),
    Mutant(
        "a message of a server has no limit",
        "rl/environments/openenv.py",
        "max_msg_size=MESSAGE_BYTES",
        "max_msg_size=0",
        ("tests/rl/environments/test_hostile_openenv.py::test_a_hostile_answer_costs_one_sample",),
    ),
    Mutant(
        "a server that keeps sending never ends its session",
        "rl/environments/openenv.py",
        "asyncio.timeout(CLOSE_SECONDS)",
        "asyncio.timeout(None)",
        ("tests/rl/environments/test_hostile_openenv.py::test_a_hostile_answer_costs_one_sample",),
    ),
    Mutant(
        "the end of an episode is any true value",
        "rl/environments/openenv.py",
        'answer.at("done").boolean()',
        'bool(answer.at("done").value)',
        ("tests/rl/environments/test_hostile_openenv.py::test_a_hostile_answer_costs_one_sample",),
    ),
    Mutant(
        "a server's fault ends the run",
        "rl/environments/episodes.py",
        "except ServerError as error:",
        "except TimeoutError as error:",
        ("tests/rl/environments/test_hostile_openenv.py::test_a_hostile_answer_costs_one_sample",),
    ),
    Mutant(
        "a step earns a reward that is no number",
        "rl/environments/episodes.py",
        "if not abs(number) <= MAX_REWARD:",
        "if abs(number) > MAX_REWARD:",
        ("tests/rl/environments/test_hostile_openenv.py::test_invalid_values_of_any_environment_cost_one_sample",),
    ),
)
