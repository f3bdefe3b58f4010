"""Sharing documents out, and episodes on their way between processes."""

from __future__ import annotations

import pytest
import torch

from archon.parallel.comm import Group
from archon.rl.episode import Episode, RemoteError, error_kind, is_one_line, pack_episodes, unpack_episodes
from archon.rl.episode_context import EpisodeContext
from archon.rl.prompts import Prompt
from archon.rl.rewards.result import RewardRaised
from archon.schema.errors import ConfigError, RolloutError
from archon.training.batch_sharding import require_documents, shard_batch, shard_indices


def batch(n: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(n).unsqueeze(1).expand(n, 3) + 10
    mask = torch.ones(n, 3, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": mask.bool(), "loss_mask": mask}


@pytest.mark.parametrize("n", [3, 4, 7])
def test_every_document_goes_to_one_rank(n: int) -> None:
    shares = [shard_batch(batch(n), Group("dp", 3, rank))["input_ids"][:, 0].tolist() for rank in range(3)]
    assert sorted(row for share in shares for row in share) == [10 + i for i in range(n)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_have_even_shares_of_the_tokens_and_keep_the_order() -> None:
    """Dealt in the order given, the long documents would all go to one rank."""
    lengths = [9, 1, 8, 2, 7, 3]
    shares = [shard_indices(lengths, Group("dp", 2, rank)) for rank in range(2)]
    assert sorted(shares[0] + shares[1]) == list(range(6))
    assert shares == [sorted(share) for share in shares]
    tokens = [sum(lengths[row] for row in share) for share in shares]
    # Neighbors by length go to different ranks, so that the differences add up to less than longest - shortest.
    assert abs(tokens[0] - tokens[1]) < 9 - 1


def test_a_rank_without_a_document_is_given_one_that_trains_nothing() -> None:
    whole = batch(2)
    spare = shard_batch(whole, Group("dp", 3, 2))
    assert spare["input_ids"].shape == (1, 3)
    assert spare["loss_mask"].sum() == 0
    assert whole["loss_mask"].sum() == 6


def test_fewer_documents_than_ranks_are_refused_with_advice() -> None:
    require_documents(4, 4, "batch_size")
    with pytest.raises(ConfigError, match=r"batch_size = 3 leaves some of the 4 .* set it to 4 or more"):
        require_documents(3, 4, "batch_size")


def episodes(n: int) -> list[Episode]:
    return [Episode(Prompt(i, {}), EpisodeContext(i)) for i in range(n)]


def test_episodes_arrive_as_they_left() -> None:
    sent = episodes(3)
    sent[0].trajectories = {
        "input_ids": torch.tensor([[1, 2], [3, 4]]),
        "rewards": torch.tensor([0.1, 1 / 3]),
        "attention_mask": torch.tensor([[True, False], [True, True]]),
        "images": [["a"], []],
    }
    sent[0].context.numbers["reward/right"] += [0.1, 1.0]
    sent[0].context.drop("reward_raised", RewardRaised("no such column", "Traceback of the process"))
    sent[2].error = RolloutError("too long")
    found = episodes(3)
    unpack_episodes(pack_episodes({0: sent[0], 2: sent[2]}), found)
    assert found[0].trajectories is not None
    assert found[0].trajectories.keys() == sent[0].trajectories.keys()
    for key, value in sent[0].trajectories.items():
        equal = found[0].trajectories[key].equal(value) if torch.is_tensor(value) else None
        assert equal or found[0].trajectories[key] == value
    assert found[0].context.numbers == sent[0].context.numbers
    assert found[0].context.drops == {"reward_raised": 1}
    assert not is_one_line(found[0].context.first_errors["reward_raised"])
    assert found[1].trajectories is None
    assert found[1].error is None
    error = found[2].error
    assert isinstance(error, RemoteError)
    assert (error_kind(error), str(error), is_one_line(error)) == ("RolloutError", "too long", True)
    assert "RolloutError: too long" in error.__notes__[0]


def test_one_tensor_may_stand_under_two_keys_and_in_two_episodes() -> None:
    one, sent, found = torch.tensor([[0, 1]]), episodes(2), episodes(2)
    for episode in sent:
        episode.trajectories = {"versions": one, "turn_ids": one, "input_ids": one.expand(2, 2)[:1]}
    unpack_episodes(pack_episodes(dict(enumerate(sent))), found)
    for episode in found:
        assert episode.trajectories is not None
        assert all(value.equal(one) for value in episode.trajectories.values())


def test_what_json_cannot_hold_is_refused() -> None:
    sent = episodes(1)
    sent[0].trajectories = {"input_ids": torch.ones(1, 1), "images": [object()]}
    with pytest.raises(RolloutError, match="cannot be sent to other processes"):
        pack_episodes({0: sent[0]})
