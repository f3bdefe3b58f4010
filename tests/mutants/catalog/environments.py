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
        "total += float(reward)\n",
        "total += float(reward) if not done else 0.0\n",
        (
            "tests/rl/environments/test_textarena.py::test_a_right_guess_earns_one_and_only_the_models_tokens_are_trained",
        ),
    ),
)
