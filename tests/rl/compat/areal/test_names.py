"""Every name that rl/compat/README.md says works is imported and used; the others say what to write."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import distributed_c10d

from archon.checkpoint.hf_io import load_model
from archon.checkpoint.tokenizer import load_tokenizer
from archon.data.shapes import scenes
from archon.generation import InProcessEngine
from archon.rl.compat import areal
from archon.rl.compat.areal.names import NAMES
from archon.rl.compat.areal.paths import native_path
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout
from archon.schema.errors import ConfigError
from archon.training import SFTConfig
from tests.rl import areal_guide as guide
from tests.rl.compat.areal import table
from tests.rl.rewards_for_tests import count_digits
from tests.small_qwen3 import SMALL_QWEN3
from tests.small_vision import write_vision_model

WORKS = [row for row in NAMES if row.status == "works"]
HF_CONFIG = SMALL_QWEN3 | {"model_type": "qwen3", "vocab_size": 20}


class Here(NamedTuple):
    """What a name is used on."""

    tokenizer: Any
    engine: InProcessEngine
    data: Path
    config: Callable[..., Any]
    blank: Path


@pytest.fixture
def here(blank: Path, engine: InProcessEngine, rl_config: Callable[..., Any], tmp_path: Path) -> Here:
    rows = {
        "gsm8k": {"question": "How many?", "answer": "7.\n#### 7"},
        "geometry3k": {"problem": "<image>Find x.", "answer": "7", "images": [1]},
        "clevr_count_70k": {"problem": "<image>How many?", "answer": "7", "images": [1]},
        "torl_data": {"prompt": [{"role": "user", "content": "7?"}], "reward_model": {"ground_truth": "7"}},
        "hh-rlhf": {"chosen": "\n\nHuman: 1\n\nAssistant: 7", "rejected": "\n\nHuman: 1\n\nAssistant: 8"},
    }
    for name, row in rows.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps(row) + "\n")
    return Here(load_tokenizer(blank), engine, tmp_path, rl_config, blank)


def episode(here: Here, workflow: Any, row: dict[str, Any] | None = None) -> dict[str, Any]:
    given = row or {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
    (done,) = asyncio.run(Rollout(here.engine, workflow, log=lambda _: None).run([Prompt(0, given)]))
    assert done.error is None and done.trajectories is not None, done.error
    return done.trajectories


def answer(here: Here) -> Any:
    """One response of the real engine."""
    gconfig = areal.GenerationHyperparameters(max_new_tokens=3)
    ids = here.tokenizer("1+1=").input_ids
    return asyncio.run(here.engine.agenerate(areal.ModelRequest(input_ids=ids, gconfig=gconfig)))


def ppo_trainer(here: Here) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(6)]
    with areal.PPOTrainer(here.config(total_steps=1), train_dataset=rows) as trainer:
        assert trainer.train(workflow=areal.RLVRWorkflow)["samples"] == 24


def sft_trainer(here: Here) -> None:
    model = {"path": str(here.blank), "init_from_scratch": True}
    run = {"run_dir": str(here.data / "run"), "total_steps": 1, "batch_size": 2, "train_data": {"path": "given"}}
    with areal.SFTTrainer(
        SFTConfig.parse(run | {"model": model}), [{"input_ids": [1, 2], "loss_mask": [0, 1]}]
    ) as made:
        assert made.train()["loss"] > 0


def workflow_context(here: Here) -> None:
    class Looks(guide.OneAnswer):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            assert areal.workflow_context.stat_scope() == "rollout" and not areal.workflow_context.get().is_eval
            return await super().arun_episode(engine, data)

    episode(here, Looks(areal.GenerationHyperparameters(max_new_tokens=2), here.tokenizer, count_digits))


def hyperparameters(here: Here) -> None:
    gconfig = areal.GenerationHyperparameters(n_samples=4, max_new_tokens=3)
    assert gconfig.new(n_samples=1).n_samples == 1 and gconfig.n_samples == 4
    ids = gconfig.new_with_stop_and_pad_token_ids(here.tokenizer).stop_token_ids
    assert here.tokenizer.eos_token_id in ids


def response(here: Here) -> None:
    got = answer(here)
    assert got.input_len == 4 and got.output_len == len(got.output_logprobs) == len(got.output_versions) <= 3
    assert isinstance(got, areal.ModelResponse) and isinstance(here.engine, areal.InferenceEngine)
    assert got.stop_reason in ("stop", "length")


async def wrapped(reward: Any) -> float:
    return await reward("p", "c7", [], [], answer="7")


def reward_wrapper(here: Here) -> None:
    with areal.AsyncRewardWrapper(count_digits, timeout_seconds=15, max_workers=1, max_retries=3) as reward:
        assert asyncio.run(wrapped(reward)) == 1.0


def rollout_workflow(here: Here) -> None:
    assert issubclass(guide.Retries, areal.RolloutWorkflow)
    gconfig = areal.GenerationHyperparameters(max_new_tokens=2)
    assert episode(here, guide.Retries(gconfig, here.tokenizer, count_digits))["loss_mask"].any()
    with pytest.raises(TypeError, match="abstract"):
        areal.RolloutWorkflow()


def workflow_like(here: Here) -> None:
    value: areal.WorkflowLike = "archon.rl.RLVRWorkflow"
    assert value


def rlvr(here: Here) -> None:
    gconfig = areal.GenerationHyperparameters(n_samples=2, max_new_tokens=3)
    made = areal.RLVRWorkflow(count_digits, gconfig, str(here.blank), enable_thinking=False)
    assert episode(here, made)["rewards"].shape == (2,)


def vision_rlvr(here: Here) -> None:
    path = write_vision_model(here.data / "sight")
    engine = InProcessEngine.from_model(load_model(path), load_tokenizer(path), max_slots=2, page_size=8)
    gconfig = areal.GenerationHyperparameters(n_samples=4, max_new_tokens=2)
    made = areal.VisionRLVRWorkflow(count_digits, gconfig, str(path), str(path))
    image = scenes("test")[0][0].image()
    row = {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": [image], "answer": "2"}
    answers = episode(here._replace(engine=engine), made, row)["images"]
    assert {each.digest for (each,) in answers} == {made.processor.read(image).digest}
    with pytest.raises(ConfigError, match="it is a text model"):
        areal.VisionRLVRWorkflow(count_digits, gconfig, here.tokenizer, str(here.blank))


def multi_turn(here: Here) -> None:
    gconfig = areal.GenerationHyperparameters(n_samples=2, max_new_tokens=2)
    made = areal.MultiTurnWorkflow(count_digits, gconfig, here.tokenizer, max_turns=2, turn_discount=0.9)
    assert episode(here, made)["rewards"].shape == (2,)


def valid_datasets(here: Here) -> None:
    assert {"gsm8k", "geometry3k", "clevr_count_70k", "hh-rlhf", "torl_data"} <= set(areal.VALID_DATASETS)


def custom_dataset(here: Here) -> None:
    """In the forms of three releases."""
    path = str(here.data / "gsm8k")
    found = areal.get_custom_dataset(path=path, type="rl", split="train", tokenizer=here.tokenizer)
    config = SimpleNamespace(path=path, type="rl")
    assert areal.get_custom_dataset(config.path, config.type, "train").rows == found.rows
    section = here.config(train_data={"path": "gsm8k", "data_dir": path}).train_data
    assert areal.get_custom_dataset(split="train", dataset_config=section, tokenizer=here.tokenizer).rows == found.rows
    assert found.column_names == ["messages", "prompt", "answer"]


def loader(name: str, folder: str, *columns: str) -> Callable[[Here], None]:
    def use(here: Here) -> None:
        from tests.data.toy_tokenizers import CHATML, toy_tokenizer

        rows = getattr(areal, name)(str(here.data / folder), split="train", tokenizer=toy_tokenizer(CHATML))
        assert len(rows) == 1 and set(columns) <= set(rows.column_names), rows.column_names

    return use


def valid_rewards(here: Here) -> None:
    assert {"gsm8k", "geometry3k", "clevr_count_70k"} <= set(areal.VALID_REWARD_FN)


def reward(get: Callable[[], Any], right: str = r"so \boxed{7}") -> Callable[[Here], None]:
    def use(here: Here) -> None:
        """As the reward guide's unit tests call it."""
        for said, expected in ((right, 1.0), (right.replace("7", "8"), 0.0)):
            given = {"prompt": "3+4?", "completions": said, "prompt_ids": None, "completion_ids": None, "answer": "7"}
            assert get()(**given) == expected

    return use


def concat(here: Here) -> None:
    parts = [{"attention_mask": torch.ones(1, n, dtype=torch.bool), "input_ids": torch.ones(1, n)} for n in (2, 3)]
    assert areal.concat_padded_tensors(parts)["attention_mask"].tolist() == [[True, True, False], [True] * 3]


def math_verify(here: Here) -> None:
    for worker in (areal.MathVerifyWorker(), areal.get_math_verify_worker()):
        assert worker.verify(r"it is \boxed{3.5}", r"\boxed{7/2}") == 1.0
        assert worker.verify("it is 3.5", r"\boxed{7/2}") == 0.0
    assert areal.get_math_verify_worker() is areal.get_math_verify_worker()


def statistics(here: Here) -> None:
    class Reports(guide.OneAnswer):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            with areal.stats_tracker.record_timing("ask"):
                result = await super().arun_episode(engine, data)
            areal.stats_tracker.get(areal.workflow_context.stat_scope()).scalar(seen=3.0)
            return result

    made = Reports(areal.GenerationHyperparameters(max_new_tokens=2), here.tokenizer, count_digits)
    (done,) = asyncio.run(Rollout(here.engine, made, log=lambda _: None).run([Prompt(0, {"messages": [{"role": "user",
        "content": "1"}]})]))  # fmt: skip
    assert done.context.numbers["seen"] == [3.0] and done.context.numbers["timeperf/ask"][0] > 0


def group_timeout(here: Here) -> None:
    before = distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout
    try:
        areal.patch_dist_group_timeout(timedelta(minutes=7))
        assert distributed_c10d._get_default_timeout("gloo") == timedelta(minutes=7)
    finally:
        distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout = before


def consistency(here: Here) -> None:
    assert areal.check_tensor_consistency(torch.ones(3), "ones")  # one rank; several in test_debugging_guide.py


def interaction(here: Here) -> None:
    class Interacts(guide.OneAnswer):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            got = await self.ask(engine, data["messages"])
            return {"one": areal.InteractionWithTokenLogpReward(model_response=got, reward=torch.tensor(0.5))}

    made = Interacts(areal.GenerationHyperparameters(max_new_tokens=2), here.tokenizer, count_digits)
    assert episode(here, made)["rewards"].tolist() == [0.5]
    one = areal.InteractionWithTokenLogpReward(model_response=answer(here), reward=1.0).to_tensor_dict()
    assert (
        one["rewards"].tolist() == [1.0] and one["input_ids"].shape == one["loss_mask"].shape == one["logprobs"].shape
    )


def registry(here: Here) -> None:
    spec = areal.get_model_spec("qwen3")
    assert isinstance(spec, areal.ModelSpec) and areal.is_supported_model("qwen3")
    assert "qwen3" in areal.get_supported_model_types()
    areal.register_model_spec(spec)  # once more is no conflict
    assert spec.supported_model_types == frozenset({"qwen3"})


def family(number: int) -> Callable[[Here], None]:
    def use(here: Here) -> None:
        """Arguments of a config, a model, and its names both ways."""
        kind = f"Qwen{number}"
        config = {k: v for k, v in HF_CONFIG.items() if k != "head_dim" or number == 3} | {"model_type": kind.lower()}
        args = getattr(areal, f"{kind}ModelArgs").from_hf_config(config)
        model = getattr(areal, f"{kind}Model")(args)
        adapter = getattr(areal, f"{kind}StateDictAdapter")(config)
        assert isinstance(args, areal.BaseModelArgs) and isinstance(model, areal.BaseArchonModel)
        assert isinstance(adapter, areal.BaseStateDictAdapter) and args.dim == config["hidden_size"]
        state = {name: parameter.detach() for name, parameter in model.named_parameters()}
        assert adapter.from_hf(adapter.to_hf(state)).keys() == state.keys()
        dims = areal.ArchonParallelDims(world_size=1)
        parallelized = getattr(areal, f"parallelize_qwen{number}")(model, dims)
        assert parallelized is None or isinstance(parallelized, torch.nn.Module)

    return use


def dims(here: Here) -> None:
    made = areal.ArchonParallelDims(dp_shard=2, tp=2, world_size=4)
    assert made.tp_enabled and not made.cp_enabled and made.fsdp_enabled  # its meshes: test_model_guide.py


def pipeline(here: Here) -> None:
    from archon.parallel.pipeline import StagePlan

    config = HF_CONFIG | {"num_hidden_layers": 2}
    with torch.device("meta"):
        model = areal.Qwen3Model(areal.Qwen3ModelArgs.from_hf_config(config))
    areal.pipeline_llm(model, plan=StagePlan("1f1b", 2, ((0, 1), (1, 2))), stage=1)
    assert list(model.layers) == ["1"] and model.tok_embeddings is None and model.output is not None


def rope(here: Here) -> None:
    cache = areal.precompute_rope_cache(8, 16, 10_000.0)
    assert cache.shape == (16, 16) and cache.dtype == torch.float32
    for position, pair in ((3, 1), (15, 3)):
        angle = position / 10_000 ** (2 * pair / 8)
        for column in (pair, pair + 4):
            assert math.isclose(cache[position, column], math.cos(angle), abs_tol=1e-6)
            assert math.isclose(cache[position, 8 + column], math.sin(angle), abs_tol=1e-6)


def parallelize_fn(here: Here) -> None:
    function: areal.ParallelizeFn = areal.parallelize_qwen3
    assert callable(function)


RL, SFT = ("messages", "answer"), ("input_ids", "loss_mask")
SCORES = {"get_reward_fn": lambda: areal.get_reward_fn("gsm8k_reward_fn"),
          "get_custom_reward_fn": lambda: areal.get_custom_reward_fn("hiyouga/geometry3k"),
          "gsm8k_reward_fn": lambda: areal.gsm8k_reward_fn,
          "geometry3k_reward_fn": lambda: areal.geometry3k_reward_fn,
          "math_verify_reward_fn": lambda: areal.math_verify_reward_fn}  # fmt: skip
USES: dict[str, Callable[[Here], None]] = {
    "PPOTrainer": ppo_trainer,
    "SFTTrainer": sft_trainer,
    "workflow_context": workflow_context,
    "GenerationHyperparameters": hyperparameters,
    **dict.fromkeys(("InferenceEngine", "ModelRequest", "ModelResponse"), response),
    "AsyncRewardWrapper": reward_wrapper,
    "RolloutWorkflow": rollout_workflow,
    "WorkflowLike": workflow_like,
    "RLVRWorkflow": rlvr,
    "VisionRLVRWorkflow": vision_rlvr,
    "MultiTurnWorkflow": multi_turn,
    "VALID_DATASETS": valid_datasets,
    "get_custom_dataset": custom_dataset,
    **{f"get_{name}_rl_dataset": loader(f"get_{name}_rl_dataset", name, *RL)
       for name in ("gsm8k", "geometry3k", "clevr_count_70k", "torl_data")},
    **{f"get_{name}_sft_dataset": loader(f"get_{name}_sft_dataset", name, *SFT)
       for name in ("gsm8k", "geometry3k", "clevr_count_70k")},
    **{f"get_hhrlhf_{kind}_dataset": loader(f"get_hhrlhf_{kind}_dataset", "hh-rlhf", "chosen_ids", "rejected_ids")
       for kind in ("rw", "dpo")},
    "VALID_REWARD_FN": valid_rewards,
    **{name: reward(get) for name, get in SCORES.items()},
    "clevr_count_70k_reward_fn": reward(lambda: areal.clevr_count_70k_reward_fn, "there are [7]"),
    **dict.fromkeys(("MathVerifyWorker", "get_math_verify_worker"), math_verify),
    "concat_padded_tensors": concat,
    "stats_tracker": statistics,
    "patch_dist_group_timeout": group_timeout,
    "check_tensor_consistency": consistency,
    "InteractionWithTokenLogpReward": interaction,
    **dict.fromkeys(("ModelSpec", "get_model_spec", "get_supported_model_types", "is_supported_model",
                     "register_model_spec"), registry),
    **dict.fromkeys(("BaseArchonModel", "BaseModelArgs", "BaseStateDictAdapter"), family(3)),
    **{name.format(n): family(n) for n in (2, 3)
       for name in ("Qwen{}Model", "Qwen{}ModelArgs", "Qwen{}StateDictAdapter", "parallelize_qwen{}")},
    "ArchonParallelDims": dims,
    "ParallelizeFn": parallelize_fn,
    "pipeline_llm": pipeline,
    "precompute_rope_cache": rope,
}  # fmt: skip


@pytest.mark.parametrize("row", WORKS, ids=lambda row: row.name)
def test_a_name_that_works_is_there_and_does_what_it_is_for(row: Any, here: Here) -> None:
    assert getattr(areal, row.name) is getattr(importlib.import_module(row.home), row.name)
    USES[row.name](here)


def test_every_name_that_works_is_used_and_nothing_else_is_exported() -> None:
    names = [row.name for row in WORKS]
    assert sorted(names) == sorted(USES) == areal.__all__ and len({row.path for row in NAMES}) == len(NAMES)


def test_a_name_in_archon_rl_is_the_same_object() -> None:
    from archon import rl

    others = {"SFTTrainer"}  # there that of the configuration's rows
    shared = (set(rl.__all__) & set(areal.__all__)) - others
    assert len(shared) > 15 and all(getattr(rl, name) is getattr(areal, name) for name in shared)


@pytest.mark.parametrize("row", [row for row in NAMES if row.status != "works"], ids=lambda row: row.path)
def test_another_name_says_in_one_line_what_to_write(row: Any) -> None:
    with pytest.raises(ImportError) as error:
        getattr(areal, row.name)
    (line,) = str(error.value).splitlines()
    assert (row.instead or row.note) in line and row.path in line
    with pytest.raises(ConfigError, match=r"rl/compat/README\.md"):
        native_path(f"areal.anything.{row.name}")


def test_what_another_spelling_names_is_there() -> None:
    """Each dotted path of archon among them can be imported."""
    for row in NAMES:
        path = row.instead.removeprefix("fields of ").partition("(")[0].strip("`")
        if path.startswith("archon."):
            module, _, name = path.rpartition(".")
            assert hasattr(importlib.import_module(module), name), row


def test_the_page_is_the_table() -> None:
    assert table.README.read_text(encoding="utf-8") == table.page(), "run python -m tests.rl.compat.areal.table"


def test_a_script_changes_its_imports_by_one_rule() -> None:
    """`from areal.anything import X` becomes `from archon.rl.compat.areal import X`."""
    with pytest.raises(ImportError, match=r"areal\.api\.cli_args\.GRPOConfig: write archon\.rl\.RLConfig"):
        exec("from archon.rl.compat.areal import GRPOConfig", {})
    with pytest.raises(ImportError, match="cannot import name 'NeverHeard'"):
        exec("from archon.rl.compat.areal import NeverHeard", {})
    assert not hasattr(areal, "never_heard_of")


@pytest.mark.parametrize("path", ["openai/gsm8k", "/data/gsm8k", "/data/v1.0/gsm8k.jsonl"])
def test_the_reward_of_a_dataset_is_found_by_its_path(path: str) -> None:
    assert areal.get_custom_reward_fn(path) is areal.gsm8k_reward_fn
