"""Agent sessions: what an agent asked and was answered, token for token, and what each answer is worth."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, SupportsFloat

from archon.generation.record import TokenRecord, UnusableAnswerError, check_answer
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelResponse
from archon.schema.errors import ConfigError, RewardError, RolloutError

ExportStyle = Literal["individual", "concat"]


class InvalidRewardError(RewardError):
    """A reward that is not a finite number."""


class LimitError(RolloutError):
    """More sessions, calls or requests at a time than the server allows."""


class Caller:
    """Whoever sends requests: which generator answers, and its default sampling values. Keeps no record."""

    def __init__(self, engine: InferenceEngine, gconfig: GenerationHyperparameters) -> None:
        self.engine, self.gconfig = engine, gconfig
        self.refusal: ConfigError | None = None  # the first request whose sampling values the trainer cannot replay
        self.unfinished = 0  # answers asked for that have neither come nor failed; of those broken off for good

    def next_seed(self) -> int | None:
        """Returns the seed of the next answer; None leaves it to the engine."""
        return None

    def admit(self, answers: int) -> None:
        """Raises `LimitError` where not so many further answers are allowed."""

    def record(self, completion: str, choice: int, response: ModelResponse) -> None:
        """Records an answer; raises `UnusableAnswerError` for one that cannot be relied on."""
        check_answer(response)


@dataclass(eq=False)
class Interaction:
    """One answer of a session, and its place in the tree of calls.

    `parent` is the answer whose prompt and tokens this one's prompt begins with (the longest such), None for a root.
    """

    completion: str  # id that the client was given
    choice: int  # which of its n answers
    response: ModelResponse = field(repr=False)
    parent: Interaction | None = field(default=None, repr=False)
    children: list[Interaction] = field(default_factory=list, repr=False)
    reward: float | None = None

    def __post_init__(self) -> None:
        self.tokens = self.response.input_tokens + self.response.output_tokens
        self.place: tuple[str, int] = (self.completion, self.choice)

    def branch(self) -> list[Interaction]:
        """Returns the answers from the root to this one."""
        path, node = [self], self.parent
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


@dataclass
class Trajectory:
    """One row to train on: its tokens, its reward, and the (completion, choice) of each answer in it."""

    record: TokenRecord
    reward: float
    answers: list[tuple[str, int]]


class Session(Caller):
    """One agent's calls under one key.

    An answer is the child of an earlier one only when its prompt begins with exactly that one's tokens. An agent sends
    text; where the text of an earlier answer is tokenised otherwise than it was sampled, a new tree begins, and nothing
    is trained behind tokens that the model did not see.

    Args:
        seed: every answer's random stream derives from it and the answer's number; None leaves them to the engine.
        max_calls: answers recorded, at most.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        gconfig: GenerationHyperparameters,
        *,
        seed: int | None = None,
        max_calls: int = 1000,
    ) -> None:
        super().__init__(engine, gconfig)
        self.id = f"session-{secrets.token_hex(12)}"
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.interactions: list[Interaction] = []
        self._seed, self._asked, self._max_calls = seed, 0, max_calls

    def next_seed(self) -> int | None:
        self._asked += 1
        return None if self._seed is None else derive_seed(self._seed, self._asked - 1)

    def admit(self, answers: int) -> None:
        if len(self.interactions) + answers > self._max_calls:
            raise LimitError(
                f"this session has {len(self.interactions)} of its {self._max_calls} answers, and {answers} more "
                "are too many; export it and open another"
            )

    def record(self, completion: str, choice: int, response: ModelResponse) -> None:
        super().record(completion, choice, response)
        self.admit(1)  # again: others that were asked for at the same time may have come first
        parent = self._parent_of(response.input_tokens)
        interaction = Interaction(completion, choice, response, parent)
        if parent is not None:
            parent.children.append(interaction)
        self.interactions.append(interaction)

    def _parent_of(self, prompt: list[int]) -> Interaction | None:
        found: Interaction | None = None
        for other in self.interactions:
            longer = found is None or len(other.tokens) >= len(found.tokens)
            if longer and prompt[: len(other.tokens)] == other.tokens:
                found = other
        return found

    def set_reward(self, reward: float, completion: str | None = None, choice: int = 0) -> None:
        """Set the reward of the last answer, or of answer `choice` of the call that has the id `completion`.

        Raises `InvalidRewardError` for a reward that is not a finite number, `RolloutError` where there is no such
        answer.
        """
        reward = finite_reward(reward)
        if not self.interactions:
            raise RolloutError("a reward was given before the first answer; ask the model first")
        if completion is None:
            self.interactions[-1].reward = reward
            return
        for interaction in self.interactions:
            if interaction.place == (completion, choice):
                interaction.reward = reward
                return
        raise RolloutError(f"this session has no answer {choice} of a call {completion!r}; use the id of its response")

    def reward_every_branch(self, reward: float) -> None:
        """Set the reward of an episode: that of the last answer of every branch that has none."""
        reward = finite_reward(reward)
        if not self.interactions and self.unfinished:
            raise UnusableAnswerError(
                "broken_off",
                f"the agent returned a reward and has read none of its {self.unfinished} answers to the end; what was "
                "broken off is not trained",
            )
        if not self.interactions:
            raise RolloutError("the agent returned a reward and has not asked the model once; nothing can be trained")
        for interaction in self.interactions:
            if not interaction.children and interaction.reward is None:
                interaction.reward = reward

    def export(self, style: ExportStyle = "individual", turn_discount: float = 1.0) -> list[Trajectory]:
        """Returns the rows to train on, in the order of the (last) answers.

        `individual`: one row an answer. It is credited with its own reward and `turn_discount` times the mean credit of
        the answers that follow it.
        `concat`: one row a branch, from a root to an answer that nothing follows; all its answers are trained, with
        Σ turn_discount^k · (own reward of the k-th). Branches that part share their beginning, which stands in each.

        Rows without any reward are left out, for no reward is not a reward of 0. Raises `RolloutError` when none is
        left, `InvalidRewardError` where rewards add up to no finite number.
        """
        if style not in ("individual", "concat") or not 0 < turn_discount <= 1:
            raise RolloutError(
                f"export: got style {style!r} and turn_discount {turn_discount!r}; expected 'individual' or 'concat', "
                "and a number in (0, 1]"
            )
        rows = self._branches(turn_discount) if style == "concat" else self._answers(turn_discount)
        found = list(rows)
        if not found:
            raise RolloutError(
                f"none of the session's {len(self.interactions)} answers has a reward; set one before exporting"
            )
        for row in found:
            finite_reward(row.reward)
        return found

    def _answers(self, discount: float) -> Iterator[Trajectory]:
        credit: dict[Interaction, float] = {}
        for node in reversed(self.interactions):  # a child was recorded after its parent
            later = [credit[child] for child in node.children if child in credit]
            if node.reward is None and not later:
                continue
            credit[node] = (node.reward or 0.0) + (discount * sum(later) / len(later) if later else 0.0)
        for node in self.interactions:
            if node in credit:
                yield Trajectory(TokenRecord.of_answer(node.response), credit[node], [node.place])

    def branches(self) -> list[TokenRecord]:
        """Returns every branch, from a root to an answer that nothing follows, rewarded or not."""
        return [_record_of(leaf.branch()) for leaf in self.interactions if not leaf.children]

    def _branches(self, discount: float) -> Iterator[Trajectory]:
        for leaf in self.interactions:
            branch = [] if leaf.children else leaf.branch()
            rewards = [(turn, node.reward) for turn, node in enumerate(branch) if node.reward is not None]
            if not rewards:
                continue
            total = sum(discount**turn * reward for turn, reward in rewards)
            yield Trajectory(_record_of(branch), total, [node.place for node in branch])


def _record_of(branch: list[Interaction]) -> TokenRecord:
    """Returns the answers of a branch as one trajectory."""
    record = TokenRecord()
    for node in branch:
        record.observe(node.response.input_tokens[len(record.input_ids) :])
        record.answer(node.response)
    return record


def finite_reward(value: object) -> float:
    """Returns `value` as a float; `InvalidRewardError` unless it is a finite number."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of many elements, say
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRewardError(f"a reward must be a finite number, got {value!r:.80}")
    return number


class Sessions:
    """The open sessions of a server, by id and by key.

    Args:
        max_open: sessions at a time.
        max_calls: answers that each records.
        idle_seconds: after which a session that nobody asks by, or for, is closed.
    """

    def __init__(self, max_open: int, max_calls: int, idle_seconds: float = math.inf) -> None:
        self._max_open, self._max_calls, self._idle_seconds = max_open, max_calls, idle_seconds
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._used: dict[Session, float] = {}  # since when each is idle, the longest first; without those in use
        self._users: Counter[Session] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, engine: InferenceEngine, gconfig: GenerationHyperparameters, seed: int | None = None) -> Session:
        """Returns a new session; `LimitError` when as many are open as may be."""
        self._close_idle()
        if len(self) >= self._max_open:
            raise LimitError(f"{self._max_open} sessions are open, as many as this server allows; close some")
        session = Session(engine, gconfig, seed=seed, max_calls=self._max_calls)
        self._by_id[session.id] = self._by_key[session.key] = session
        self._touch(session)
        return session

    def close(self, session: Session) -> None:
        """Forget a session; its key is no longer valid."""
        self._by_id.pop(session.id, None)
        self._by_key.pop(session.key, None)
        self._used.pop(session, None)

    def of_key(self, key: str) -> Session | None:
        return self._found(self._by_key, key)

    def of_id(self, session_id: str) -> Session | None:
        return self._found(self._by_id, session_id)

    @contextmanager
    def in_use(self, caller: Caller) -> Iterator[None]:
        """While it is answered, a session is not idle."""
        if not isinstance(caller, Session):
            yield
            return
        self._users[caller] += 1
        self._used.pop(caller, None)
        try:
            yield
        finally:
            self._users[caller] -= 1
            if self._users[caller] == 0:
                del self._users[caller]
                self._touch(caller)

    def _found(self, among: dict[str, Session], name: str) -> Session | None:
        self._close_idle()
        session = among.get(name)
        if session is not None:
            self._touch(session)
        return session

    def _touch(self, session: Session) -> None:
        self._used.pop(session, None)
        if session not in self._users and session.id in self._by_id:
            self._used[session] = time.monotonic()

    def _close_idle(self) -> None:
        oldest = time.monotonic() - self._idle_seconds
        while self._used and (first := next(iter(self._used))) and self._used[first] < oldest:
            self.close(first)
