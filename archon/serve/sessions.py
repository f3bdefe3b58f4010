"""Agent sessions: the exact tokens of every request and answer, linked into a tree, with the answers' rewards."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, NamedTuple, SupportsFloat

from archon.generation.record import TokenRecord, UnusableAnswerError, check_answer, is_prefix
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelResponse
from archon.schema.errors import ConfigError, RewardError, RolloutError
from archon.schema.numbers import LARGEST_FLOAT32

ExportStyle = Literal["individual", "concat"]
SamplingPolicy = Callable[[GenerationHyperparameters], GenerationHyperparameters]
"""Policy that maps requested sampling values to allowed ones; raises `ConfigError` to refuse a request."""


class InvalidRewardError(RewardError):
    """A reward that is not finite in float32, the dtype of training."""


class LimitError(RolloutError):
    """More sessions, answers or concurrent requests than the server allows."""


class ModelChoice(NamedTuple):
    """A request's model: the name for clients, and the LoRA; None is the base model."""

    name: str
    lora: str | None = None


class Caller:
    """Whoever sends requests: the generator that answers and its default sampling values. Keeps no record."""

    def __init__(
        self, engine: InferenceEngine, gconfig: GenerationHyperparameters, policy: SamplingPolicy | None = None
    ) -> None:
        self.engine, self.gconfig, self.policy = engine, gconfig, policy
        self.overridden = 0  # answers with sampling values changed by the policy
        self.refusal: ConfigError | None = None  # first refusal of sampling values that the trainer cannot replay
        self.unfinished = 0  # answers requested that neither finished nor failed, including canceled ones

    def sampling(self, asked: GenerationHyperparameters) -> GenerationHyperparameters:
        """Return the sampling values after the policy, if any; raise `ConfigError` if it refuses."""
        if self.policy is None:
            return asked
        try:
            granted = self.policy(asked)
        except ConfigError as error:
            self.refusal = self.refusal or error
            raise
        self.overridden += asked.n_samples * (granted != asked)
        return granted

    def next_seed(self) -> int | None:
        """Return the seed of the next answer; None leaves it to the engine."""
        return None

    def admit(self, answers: int) -> None:
        """Raise `LimitError` if the limits do not allow this number of further answers."""

    def record(
        self,
        completion: str,
        choice: int,
        response: ModelResponse,
        gconfig: GenerationHyperparameters | None = None,
    ) -> None:
        """Record an answer sampled with `gconfig` (None: the caller's values).

        Raises:
            UnusableAnswerError: the answer cannot be trained on.
        """
        check_answer(response)


@dataclass(eq=False)
class Interaction:
    """One answer of a session, a node in the tree of its requests.

    `parent` is the longest answer with prompt and tokens that are a prefix of this prompt; None for a root.
    """

    completion: str  # the response's id
    choice: int  # index among its n answers
    response: ModelResponse = field(repr=False)
    gconfig: GenerationHyperparameters = field(repr=False)  # sampling values of the answer
    parent: Interaction | None = field(default=None, repr=False)
    children: list[Interaction] = field(default_factory=list, repr=False)
    reward: float | None = None

    def __post_init__(self) -> None:
        self.tokens = self.response.input_tokens + self.response.output_tokens
        self.place: tuple[str, int] = (self.completion, self.choice)

    def branch(self) -> list[Interaction]:
        """Return the answers from the root to this one."""
        path, node = [self], self.parent
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


@dataclass(frozen=True)
class Training:
    """Training hooks of a server with trained sessions.

    Attributes:
        finish: takes a session that is rated and over.
        policy: policy of the sampling values.
        needs_group: whether a session must be opened with a group.
    """

    finish: Callable[[Session], None]
    policy: SamplingPolicy | None = None
    needs_group: bool = False


@dataclass
class Trajectory:
    """One training row: its tokens, its reward, the (completion, choice) of each answer in it, and its LoRA.

    The LoRA is None for the base model.
    """

    record: TokenRecord
    reward: float
    answers: list[tuple[str, int]]
    lora: str | None = None


class Session(Caller):
    """Requests of one agent under one key.

    An answer is the child of an earlier one only if its prompt starts with exactly the tokens of that one, and the same
    LoRA answered. An agent sends text; if the text of an earlier answer is tokenized differently from its sampled
    tokens, a new tree starts, and no tokens are trained after a prefix that the model did not see.

    Args:
        seed: every answer's random stream derives from it and the answer's number; None leaves seeds to the engine.
        max_calls: maximum number of recorded answers.
        policy: policy of the sampling values; None allows all.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        gconfig: GenerationHyperparameters,
        *,
        seed: int | None = None,
        max_calls: int = 1000,
        policy: SamplingPolicy | None = None,
    ) -> None:
        super().__init__(engine, gconfig, policy)
        self.id = f"session-{secrets.token_hex(12)}"
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.group: str | None = None  # sessions of one group are compared with each other
        self.interactions: list[Interaction] = []
        self.active_requests, self.last_used = 0, time.monotonic()
        self._seed, self._n_seeds, self._max_calls = seed, 0, max_calls

    def next_seed(self) -> int | None:
        """Return the seed of the next answer."""
        self._n_seeds += 1
        return None if self._seed is None else derive_seed(self._seed, self._n_seeds - 1)

    def admit(self, answers: int) -> None:
        """Raise LimitError if the session cannot record this number of answers."""
        if len(self.interactions) + answers > self._max_calls:
            raise LimitError(
                f"this session has {len(self.interactions)} of its {self._max_calls} answers, and {answers} more "
                "are too many; export it and open another"
            )

    def record(
        self,
        completion: str,
        choice: int,
        response: ModelResponse,
        gconfig: GenerationHyperparameters | None = None,
    ) -> None:
        """Record an answer as a child of the longest earlier one that its prompt continues."""
        super().record(completion, choice, response, gconfig)
        self.admit(1)  # again: concurrent requests may have been recorded since this one was admitted
        prefixes = [
            node
            for node in self.interactions
            if node.response.lora == response.lora
            and response.input_tokens[: len(node.tokens)] == node.tokens
            and is_prefix(response.images, node.response.images)
        ]
        parent = max(reversed(prefixes), key=lambda node: len(node.tokens), default=None)
        interaction = Interaction(completion, choice, response, gconfig or self.gconfig, parent)
        if parent is not None:
            parent.children.append(interaction)
        self.interactions.append(interaction)

    def set_reward(self, reward: float, completion: str | None = None, choice: int = 0) -> None:
        """Set the reward of the last answer, or of answer `choice` of the response with the id `completion`.

        Raises `InvalidRewardError` for a reward that is not a finite number, `RolloutError` if there is no such
        answer.
        """
        reward = finite_reward(reward)
        if not self.interactions:
            raise RolloutError("a reward needs an answer; call the model first")
        nodes = [node for node in self.interactions if completion is None or node.place == (completion, choice)]
        if not nodes:
            raise RolloutError(
                f"this session has no answer {choice} of a call {completion!r}; use the id of its response"
            )
        nodes[-1].reward = reward

    def reward_every_branch(self, reward: float) -> None:
        """Set the reward of an episode: the last answer of every branch gets it, unless it already has one."""
        reward = finite_reward(reward)
        if not self.interactions and self.unfinished:
            raise UnusableAnswerError(
                "broken_off",
                f"the agent returned a reward, but canceled all of its {self.unfinished} answers; a canceled answer "
                "is not trained",
            )
        if not self.interactions:
            raise RolloutError("the agent returned a reward and has not asked the model once; nothing can be trained")
        for interaction in self.unrewarded_leaves:
            interaction.reward = reward

    @property
    def unrewarded_leaves(self) -> list[Interaction]:
        """Last answers of the branches without a reward."""
        return [node for node in self.interactions if not node.children and node.reward is None]

    def export(self, style: ExportStyle = "individual", turn_discount: float = 1.0) -> list[Trajectory]:
        """Return the training rows, in the order of their (last) answers.

        Args:
            style: `individual`: one row per answer. Its credit is its reward plus `turn_discount` times the mean credit
                of its children. `concat`: one row per branch, from a root to a leaf; all its answers are trained, with
                the reward Σ turn_discount^k · (reward of the k-th answer from the end). Branches repeat their shared
                prefix.
            turn_discount: discount per turn.

        Rows without any reward are omitted, because no reward is not a reward of 0.

        Raises:
            RolloutError: no row has a reward.
            InvalidRewardError: rewards do not sum to a finite number.
        """
        if style not in ("individual", "concat") or not 0 < turn_discount <= 1:
            raise RolloutError(
                f"export: got style {style!r} and turn_discount {turn_discount!r}; expected 'individual' or 'concat', "
                "and a number in (0, 1]"
            )
        rows = list(self._branch_rows(turn_discount) if style == "concat" else self._answer_rows(turn_discount))
        if not rows:
            raise RolloutError(
                f"none of the session's {len(self.interactions)} answers has a reward; set one before exporting"
            )
        for row in rows:
            finite_reward(row.reward)
        return rows

    def _answer_rows(self, discount: float) -> Iterator[Trajectory]:
        credit: dict[Interaction, float] = {}
        for node in reversed(self.interactions):  # children are recorded after their parents
            later = [credit[child] for child in node.children if child in credit]
            if node.reward is not None or later:
                credit[node] = (node.reward or 0.0) + (discount * sum(later) / len(later) if later else 0.0)
        for node in self.interactions:
            if node in credit:
                record = TokenRecord.from_response(node.response, node.gconfig.temperature)
                yield Trajectory(record, credit[node], [node.place], node.response.lora)

    def _branch_rows(self, discount: float) -> Iterator[Trajectory]:
        for branch in self._branches():
            rewards = [discount**turn * node.reward for turn, node in enumerate(branch) if node.reward is not None]
            if rewards:
                places = [node.place for node in branch]
                yield Trajectory(_token_record(branch), sum(rewards), places, branch[0].response.lora)

    def _branches(self) -> Iterator[list[Interaction]]:
        return (node.branch() for node in self.interactions if not node.children)

    def branches(self) -> list[TokenRecord]:
        """Return every branch, from a root to a leaf, whether rewarded or not."""
        return list(map(_token_record, self._branches()))


def _token_record(branch: list[Interaction]) -> TokenRecord:
    record = TokenRecord()
    for node in branch:
        record.observe(node.response.input_tokens[len(record.input_ids) :])
        record.answer(node.response, node.gconfig.temperature)
    return record


def finite_reward(value: object) -> float:
    """Return `value` as a float; raises `InvalidRewardError` unless it is a finite number in float32."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # for example a tensor of many elements
        number = math.nan
    if not abs(number) <= LARGEST_FLOAT32:  # refuses NaN as well
        raise InvalidRewardError(
            f"a reward must be a finite number, got {value!r:.80}; training uses float32, which ends at "
            f"{LARGEST_FLOAT32:g}"
        )
    return number


class Sessions:
    """The open sessions of a server, by id and by key.

    Args:
        max_open: concurrently open sessions.
        max_calls: answers recorded per session.
        idle_seconds: a session unused for this long is closed.
    """

    def __init__(self, max_open: int, max_calls: int, idle_seconds: float = math.inf) -> None:
        self._max_open, self._max_calls, self._idle_seconds = max_open, max_calls, idle_seconds
        self._by_id: dict[str, Session] = {}  # least recently used first
        self._by_key: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(
        self,
        engine: InferenceEngine,
        gconfig: GenerationHyperparameters,
        seed: int | None = None,
        policy: SamplingPolicy | None = None,
    ) -> Session:
        """Return a new session; raises `LimitError` at the limit of open sessions."""
        self._close_idle()
        if len(self) >= self._max_open:
            raise LimitError(f"{self._max_open} sessions are open, the maximum; close some")
        session = Session(engine, gconfig, seed=seed, max_calls=self._max_calls, policy=policy)
        self._by_id[session.id] = self._by_key[session.key] = session
        return session

    def close(self, session: Session) -> None:
        """Remove a session; its key is no longer valid."""
        self._by_id.pop(session.id, None)
        self._by_key.pop(session.key, None)

    def find_by_key(self, key: str) -> Session | None:
        """Return the session with this key."""
        self._close_idle()
        return self._touch(self._by_key.get(key))

    def find_by_id(self, session_id: str) -> Session | None:
        """Return the session with this id."""
        self._close_idle()
        return self._touch(self._by_id.get(session_id))

    @contextmanager
    def in_use(self, session: Session) -> Iterator[None]:
        """Keep a session from being closed as idle while it is used."""
        session.active_requests += 1
        try:
            yield
        finally:
            session.active_requests -= 1
            self._touch(session)

    def _touch(self, session: Session | None) -> Session | None:
        if session is not None and session.id in self._by_id:
            session.last_used = time.monotonic()
            self._by_id[session.id] = self._by_id.pop(session.id)
        return session

    def _close_idle(self) -> None:
        oldest = time.monotonic() - self._idle_seconds
        for session in list(takewhile(lambda session: session.last_used < oldest, self._by_id.values())):
            if session.active_requests == 0:
                self.close(session)
