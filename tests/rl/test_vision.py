"""RL on prompts with pictures: pixels travel with the trajectories, and trainer and generator see the same."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.models.vision.images import ProcessedImage
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.rl.episode import Episode, pack_episodes, unpack_episodes
from archon.rl.episode_context import EpisodeContext
from archon.rl.logprob_check import check_mismatch, mismatch_limit
from archon.rl.prompts import Prompt
from archon.rl.trajectories import join_groups, validate_group
from archon.rl.workflows import VisionRLVRWorkflow
from archon.schema.errors import ConfigError, RolloutError
from archon.training import SFTConfig, SFTTrainer
from archon.training.batch_sharding import take_rows
from archon.training.metrics import read_jsonl
from tests.small_vision import VISION_MODELS, write_vision_model
from tests.tolerances import FIRST_RATIO_FP32


def vowels(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """How many vowels an answer has, which differs from sample to sample."""
    return float(sum(letter in "aeiou" for letter in completions))


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("sight"), getattr(request, "param", "qwen3_5"))


SLOW = {"qwen2_5_vl"}
of_each_family = pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in VISION_MODELS],
    indirect=True,
)


def config_of(checkpoint: Path, **changes: Any) -> RLConfig:
    values: dict[str, Any] = {
        "run_dir": "unused",
        "total_steps": 3,
        "actor": {"path": str(checkpoint), "device": "cpu", "optimizer": {"lr": 1e-2}},
        "algorithm": {"preset": "grpo", "kl": {"coef": 0.0}},
        "workflow": "archon.rl.VisionRLVRWorkflow",
        "gconfig": {"n_samples": 4, "max_new_tokens": 6},
        "generator": {"max_slots": 16, "page_size": 8},
        "rollout": {"prompts_per_step": 3, "n_gold_checks": 0},
        "train_data": {"path": "shapes", "limit": 40},
        "reward": f"{__name__}.vowels",
    }
    for name, value in changes.items():
        old = values.get(name)
        values[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return RLConfig.parse(values)


@pytest.fixture
def opened(checkpoint: Path) -> Iterator[RLTrainer]:
    trainer = RLTrainer(config_of(checkpoint))
    with trainer.opened():
        yield trainer


@pytest.mark.slow
@of_each_family
def test_the_first_ratio_is_one_with_pictures_and_is_refused_where_the_pixels_did_not_travel(opened: RLTrainer) -> None:
    batch = opened.rollout_batch().trajectories
    assert [len(images) for images in batch["images"]] == [1] * len(batch["rewards"])
    difference, limit = opened.update.logprob_difference(batch), mismatch_limit("float32", 1.0)
    assert difference < FIRST_RATIO_FP32
    lost = {name: column for name, column in batch.items() if name != "images"}
    with pytest.raises(RolloutError, match="the trainer's logprobs differ from the generator's"):
        check_mismatch(opened.update.logprob_difference(lost), limit)
    others = {**batch, "images": list(reversed(batch["images"]))}
    with pytest.raises(RolloutError, match="the trainer's logprobs differ from the generator's"):
        check_mismatch(opened.update.logprob_difference(others), limit)
    for _ in range(3):
        metrics = opened.train_step()
        assert metrics["first_logprob_diff"] < FIRST_RATIO_FP32
        assert metrics["grad_norm"] > 0


@pytest.mark.slow
def test_the_tower_sees_the_picture_of_a_prompt_once(opened: RLTrainer) -> None:
    opened.rollout_batch()
    assert opened.generator._generator.image_cache.computed == 3  # type: ignore[union-attr]


@pytest.mark.slow
def test_adapters_are_trained_on_prompts_with_pictures(checkpoint: Path) -> None:
    lora = {"rank": 2, "targets": ["q_proj", "v_proj"]}
    trainer = RLTrainer(config_of(checkpoint, actor={"lora": lora}))
    with trainer.opened():
        for _ in range(2):
            metrics = trainer.train_step()
            assert metrics["first_logprob_diff"] < FIRST_RATIO_FP32
            assert metrics["grad_norm"] > 0


@pytest.mark.slow
def test_pictures_go_from_process_to_process_each_once(opened: RLTrainer) -> None:
    batch = opened.rollout_batch()
    rows = (batch.trajectories["group_ids"] == 0).nonzero().flatten().tolist()
    group = take_rows(batch.trajectories, rows)
    episode = Episode(Prompt(0, {}), EpisodeContext(0), group)
    data = pack_episodes({0: episode})
    back = Episode(Prompt(0, {}), EpisodeContext(0))
    unpack_episodes(data, [back])
    assert back.trajectories is not None
    assert [[each.digest for each in row] for row in back.trajectories["images"]] == [
        [each.digest for each in row] for row in group["images"]
    ]
    pixels = sum(each.pixel_values.numel() * 4 for each in group["images"][0])
    assert len(data) < 2 * pixels  # several rows, one picture
    text = {name: column for name, column in group.items() if name != "images"}
    assert join_groups([text, group])["images"] == [*([] for _ in rows), *group["images"]]


@pytest.mark.parametrize("images", [["a", "b"], [["a"], []], [[]], torch.zeros(2, 3), None])
def test_what_is_no_picture_of_a_row_is_refused_and_goes_from_process_to_process_as_it_is(images: Any) -> None:
    columns: dict[str, Any] = {
        name: torch.ones(2, 3).long() for name in ("input_ids", "attention_mask", "loss_mask", "versions")
    }
    columns |= {"logprobs": torch.ones(2, 3), "rewards": torch.ones(2), "images": images}
    back = Episode(Prompt(0, {}), EpisodeContext(0))
    unpack_episodes(pack_episodes({0: Episode(Prompt(0, {}), EpisodeContext(0), columns)}), [back])
    assert back.trajectories is not None
    found = back.trajectories["images"]
    assert torch.equal(found, images) if torch.is_tensor(images) else found == images
    for rewards in ([1.0, 2.0], [1.0, float("nan")]):
        with pytest.raises(RolloutError, match=r"'images' is not one list of processed images per row \(2 rows"):
            validate_group({**columns, "rewards": torch.tensor(rewards)}, EpisodeContext(0), "the workflow")


def test_a_workflow_without_sight_is_refused_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    blind = RLTrainer(config_of(checkpoint, actor={"vision": "off"}, train_data={"path": "arithmetic"}))
    with pytest.raises(ConfigError, match="needs an image processor"), blind.opened():
        raise AssertionError
    with pytest.raises(ConfigError, match="processor is a int"):
        VisionRLVRWorkflow("exact_match", blind.config.gconfig, checkpoint, 3)  # type: ignore[arg-type]


class LooksTwice:
    """Sends the row's picture, and then it again with a further question, through OpenAI's client."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        url = "data:image/png;base64," + base64.b64encode(data["images"][0]).decode()
        image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        talk: list[Any] = [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]
        first = (await client.chat.completions.create(model="any", messages=talk)).choices[0].message
        talk += [first.model_dump(exclude_none=True), {"role": "user", "content": "are you sure?"}]
        second = (await client.chat.completions.create(model="any", messages=talk)).choices[0].message
        return vowels("", (first.content or "") + (second.content or ""), [], [])


@of_each_family
@pytest.mark.slow
def test_an_agent_sends_pictures_through_openais_client_and_is_trained(checkpoint: Path) -> None:
    trainer = RLTrainer(
        config_of(checkpoint, workflow="archon.rl.AgentWorkflow", workflow_args={"agent": f"{__name__}.LooksTwice"})
    )
    with trainer.opened():
        for step in range(3):
            batch = trainer.rollout_batch().trajectories
            assert all(len(images) == 1 for images in batch["images"])
            trained = batch["loss_mask"] == 1
            assert (batch["versions"][trained] == step).all()
            metrics = trainer.train_step()
            assert metrics["first_logprob_diff"] < FIRST_RATIO_FP32
            assert metrics["grad_norm"] > 0


@of_each_family
@pytest.mark.slow
def test_sft_learns_from_pictures_and_its_tower_moves_where_it_is_trained(checkpoint: Path, tmp_path: Path) -> None:
    for vision in ("frozen", "trained"):
        config = SFTConfig.parse(
            {
                "run_dir": str(tmp_path / vision),
                "total_steps": 4,
                "batch_size": 8,
                "model": {"path": str(checkpoint), "device": "cpu", "vision": vision, "optimizer": {"lr": 1e-2}},
                "train_data": {"path": "shapes", "limit": 8},
            }
        )
        trainer = SFTTrainer(config)
        trainer.train()
        losses = [record["loss"] for record in read_jsonl(tmp_path / vision / "metrics.jsonl")]
        assert losses[-1] < losses[0]
        model = trainer.engine.full_model
        assert model.visual.patch_embedding.weight.requires_grad == (vision == "trained")
        (batch,) = [trainer._local_batch(trainer.loader.next_batch())]
        scored = trainer.engine.forward_batch(batch)
        blind = {**batch, "images": [[_black(each) for each in row] for row in batch["images"]]}
        assert (scored - trainer.engine.forward_batch(blind)).abs().max() > 1e-3
        exported = tmp_path / vision / "export" / "preprocessor_config.json"
        assert exported.read_text() == (checkpoint / "preprocessor_config.json").read_text()


def _black(image: ProcessedImage) -> ProcessedImage:
    return ProcessedImage(torch.full_like(image.pixel_values, -1.0), image.grid)
