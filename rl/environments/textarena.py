"""TextArena: single-player games. `workflow: textarena:GuessTheNumber-v0` plays one game per sample."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from archon.data.environments import EnvironmentName, import_environment
from archon.rl.environments.episodes import Step, environment_reward
from archon.rl.environments.splits import SIZE, episode_rows
from archon.schema.errors import ConfigError


def rows(name: EnvironmentName, split: str, seed: int) -> list[dict[str, Any]]:
    """Return rows with the seeds of `size` games (500 by default)."""
    known = import_environment(name, "textarena").envs.registration.ENV_REGISTRY
    name.require_task(known)
    name.require_options(["size"], "train_data of a game (options of the game go to workflow)")
    return episode_rows(name, split, seed, name.integer_option("size", SIZE))


def reward(name: EnvironmentName) -> Callable[..., float]:
    """Return the placeholder reward: the game scores episodes."""
    return environment_reward(name.text)


def make_environment(name: EnvironmentName) -> Callable[[], Game]:
    """Return a function that makes a game; options of the name are arguments of the game's class.

    Raises:
        ConfigError: unknown game or option, a multi-player game, or missing NLTK data.
    """
    textarena = import_environment(name, "textarena")
    registry = textarena.envs.registration.ENV_REGISTRY
    name.require_task(registry)

    def make() -> Game:
        return Game(textarena, textarena.make(name.task, **name.options))

    try:
        make().reset(0)
    except AssertionError as error:
        raise ConfigError(f"{name.text}: expected a single-player game, got {error}; choose another game") from error
    except LookupError as error:
        raise ConfigError(
            f"{name.text}: the game needs NLTK data, which is missing: run python -m nltk.downloader words "
            "averaged_perceptron_tagger_eng"
        ) from error
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"{name.text}: this version of Python cannot load the game: {error}") from error
    except TypeError as error:
        module, _, kind = registry[name.task].entry_point.partition(":")
        arguments = inspect.signature(import_environment(name, module).__dict__[kind]).parameters
        name.require_options(arguments, f"the game {name.task}")
        raise ConfigError(f"{name.text}: the game cannot be made: {error}") from error
    return make


class Game:
    """Single-player game with a separate random stream."""

    def __init__(self, textarena: Any, game: Any) -> None:
        self._textarena, self._game = textarena, game
        self.inner = game
        while isinstance(self.inner, textarena.Wrapper):
            self.inner = self.inner.env
        self._stream = random.getstate()

    def reset(self, seed: int) -> str:
        """Begin the game of a seed and return its rules."""
        with self._game_rng():
            self._game.reset(num_players=1, seed=seed)
            return self._new_observation()

    def step(self, action: str) -> Step:
        """Apply an action; the last step has the reward."""
        with self._game_rng():
            done, _ = self._game.step(action=action)
            observation = self._new_observation()
        if not done:
            return Step(observation)
        rewards, _ = self._game.close()
        return Step(observation, float(rewards[0]), done=True)

    def _new_observation(self) -> str:
        """Return new messages only: the game's wrappers would repeat the conversation."""
        player_action = self._textarena.ObservationType.PLAYER_ACTION
        _, messages = self.inner.get_observation()
        return "\n".join(text.strip() for _, text, kind in messages if kind != player_action)

    @contextmanager
    def _game_rng(self) -> Iterator[None]:
        """Swap in the game's state of Python's global random generator."""
        outside = random.getstate()
        random.setstate(self._stream)
        try:
            yield
        finally:
            self._stream = random.getstate()
            random.setstate(outside)
