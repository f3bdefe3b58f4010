"""A Trinity-RFT configuration: it loads, runs by `archon rl`, and what has no meaning here is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from archon.cli import main
from archon.cli.config import load_config
from archon.rl.compat.trinity.config import translate
from archon.rl.config import RLConfig, RolloutConfig
from archon.rl.trainer import RLTrainer
from archon.schema.errors import ConfigError, UserError
from archon.training.metrics import read_jsonl

# In the shape of the public guide's example for gsm8k.
GUIDE = """
project: archon-tests
name: gsm8k
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm:
  algorithm_type: grpo
  repeat_times: 4
  optimizer:
    lr: 1e-5
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen2.5-1.5B-Instruct}
  max_response_tokens: 1024
  max_model_len: 2048
cluster:
  node_num: 1
  gpu_per_node: 8
buffer:
  total_epochs: 2
  batch_size: 6
  explorer_input:
    taskset:
      name: gsm8k
      storage_type: file
      path: ${oc.env:TRINITY_TASKSET_PATH}
      split: train
      format:
        prompt_key: question
        response_key: answer
      rollout_args:
        temperature: 1.0
    eval_tasksets:
    - name: gsm8k-eval
      storage_type: file
      path: ${oc.env:TRINITY_TASKSET_PATH}
      split: test
      format:
        prompt_key: question
        response_key: answer
    default_workflow_type: math_workflow
  trainer_input:
    experience_buffer:
      name: gsm8k_buffer
      storage_type: queue
      path: sqlite:///gsm8k.db
explorer:
  eval_interval: 50
  runner_per_model: 8
  rollout_model:
    engine_num: 2
    tensor_parallel_size: 1
    enable_prefix_caching: false
    enforce_eager: true
    dtype: bfloat16
    seed: 42
synchronizer:
  sync_method: nccl
  sync_interval: 1
  sync_timeout: 1200
trainer:
  trainer_type: verl
  save_interval: 100
  grad_clip: 1.0
  use_dynamic_bsz: true
  max_token_len_per_gpu: 16384
  ulysses_sequence_parallel_size: 1
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for split, count in (("train", 20), ("test", 3)):
        rows = [{"question": f"{n}+{n}=", "answer": str(2 * n), "level": n} for n in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def guide(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRINITY_TASKSET_PATH", str(tasks))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "runs"))
    path = tmp_path / "gsm8k.yaml"
    path.write_text(GUIDE)
    return path


def put(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(data)
    *parents, last = path.split(".")
    inner = data
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    return data


@pytest.fixture
def small(tasks: Path, tmp_path: Path) -> dict[str, Any]:
    """The least that a file must say."""
    taskset = {"path": str(tasks), "default_workflow_type": "math_workflow"}
    taskset["format"] = {"prompt_key": "question", "response_key": "answer"}
    return {
        "name": "small",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "model": {"model_path": "model"},
        "buffer": {"batch_size": 4, "explorer_input": {"taskset": taskset}},
    }


def test_the_guides_yaml_loads(guide: Path, tasks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(RLConfig, guide, [], translate)
    assert config.run_dir == str(tmp_path / "runs" / "archon-tests" / "gsm8k") and config.resume and config.seed == 42
    assert config.actor.path == config.resolve().ref.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (config.algorithm.preset, config.gconfig.n_samples, config.gconfig.temperature) == ("grpo", 4, 1.0)
    assert (config.gconfig.max_new_tokens, config.generator.max_seq_len) == (1024, 2048)
    assert (config.actor.optimizer.lr, config.actor.dtype, config.actor.max_tokens_per_mb) == (1e-5, "bfloat16", 16384)
    assert (config.rollout.prompts_per_step, config.total_steps) == (6, 2 * 20 // 6)
    assert (config.train_data.path, config.train_data.split, config.eval_data.split) == (str(tasks), "train", "test")
    assert config.train_data.raw and config.eval_data.raw and config.eval_data.prompt_key == "question"
    assert (config.evaluation.every, config.checkpoint.every) == (50, 100)
    assert config.reward == "math_verify" and config.rollout.n_gold_checks == 64
    assert config.workflow_args == {
        "workflow": "math_workflow",
        "format_args": {"prompt_key": "question", "response_key": "answer"},
    }
    assert "no effect in archon: cluster.node_num, cluster.gpu_per_node" in caplog.text
    assert "synchronizer.sync_method" in caplog.text and "max_response_tokens" not in caplog.text


def test_the_guides_other_spellings_mean_the_same(small: dict[str, Any]) -> None:
    inputs = copy.deepcopy(small["buffer"]["explorer_input"])
    inputs["task_set"] = inputs.pop("taskset")
    inputs["task_set"]["default_workflow"] = inputs["task_set"].pop("default_workflow_type")
    assert translate(put(small, "buffer.explorer_input", inputs)) == translate(small)


def test_an_openai_endpoint_is_the_workflows(small: dict[str, Any]) -> None:
    config = translate(put(small, "explorer.rollout_model.enable_openai_api", True))
    assert config["workflow_args"]["enable_openai_api"] is True


def test_what_tunes_trinitys_engine_is_accepted_with_a_note(small: dict[str, Any], caplog: Any) -> None:
    plain, kept = translate(small), []
    for key in ("ulysses_sequence_parallel_size", "param_offload", "use_remove_padding"):
        small = put(small, f"trainer.{key}", 2)
        kept.append(f"trainer.{key}")
    for key in ("tool_call_parser", "reasoning_parser", "enable_chunked_prefill", "gpu_memory_utilization"):
        small = put(small, f"explorer.rollout_model.{key}", "x")
        kept.append(f"explorer.rollout_model.{key}")
    assert translate(small) == plain
    assert all(key in caplog.text for key in kept)


def test_verls_own_configuration_is_read_where_the_file_is_silent(
    small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actor = {"ppo_max_token_len_per_gpu": 4096, "optim": {"lr": "1e-5"}, "grad_clip": 0.5, "strategy": "fsdp"}
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump({"actor_rollout_ref": {"actor": actor}}))
    given = put(small, "trainer.trainer_config_path", str(tmp_path / "verl.yaml"))
    config = translate(given)["actor"]
    assert config == {"path": "model", "optimizer": {"lr": 1e-5, "max_grad_norm": 0.5}, "max_tokens_per_mb": 4096}
    inline = put(small, "trainer.trainer_config", {"actor_rollout_ref": {"actor": actor}})
    assert translate(inline)["actor"] == config
    assert translate(put(given, "algorithm.optimizer.lr", 1e-6))["actor"]["optimizer"]["lr"] == 1e-6
    assert "only actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in caplog.text
    translate(put(small, "trainer.trainer_config_path", "nowhere.yaml"))
    assert "nowhere.yaml does not exist; skipping it" in caplog.text


def test_an_explorer_that_drives_the_synchronizer_is_bounded_staleness(small: dict[str, Any]) -> None:
    dynamic = put(small, "synchronizer", {"sync_style": "dynamic_by_explorer", "sync_interval": 5, "sync_offset": 1})
    assert translate(dynamic)["rollout"]["max_staleness"] == 6
    assert "max_staleness" not in translate(put(small, "synchronizer.sync_interval", 5)).get("rollout", {})


def test_each_mode_has_its_folder_and_all_share_the_buffer(small: dict[str, Any], tmp_path: Path) -> None:
    job = tmp_path / "runs" / "small"
    small = put(small, "buffer.trainer_input.experience_buffer", {"path": "sqlite:////tmp/b.db", "storage_type": "sql"})
    small = put(small, "synchronizer.sync_interval", 10)
    explore, train = (translate(put(small, "mode", mode)) for mode in ("explore", "train"))
    assert (explore["run_dir"], train["run_dir"]) == (str(job / "explorer"), str(job))
    assert explore["experiences"] == {"path": "/tmp/b.db", "weights_from": str(job), "sync_every": 10}
    assert train["experiences"] == {"path": "/tmp/b.db", "weights_from": str(job)}
    assert train["checkpoint"]["every"] == 10, "the explorer gets new weights every sync_interval steps"
    often = put(put(small, "trainer.save_interval", 4), "mode", "train")
    assert translate(often)["checkpoint"]["every"] == 4
    bench = put(put(small, "mode", "bench"), "explorer.bench_on_latest_checkpoint", True)
    assert translate(bench)["experiences"]["latest_only"] is True
    with pytest.raises(ConfigError, match=r"expected sqlite:///FILE"):
        translate(put(put(small, "mode", "train"), "buffer.trainer_input.experience_buffer.path", "mysql://host/db"))


def test_demonstrations_have_their_share_of_the_batch(small: dict[str, Any]) -> None:
    small = put(small, "algorithm", {"algorithm_type": "mix", "repeat_times": 8, "policy_loss_fn_args": {"mu": 0.3}})
    small = put(small, "buffer.batch_size", 40)
    small = put(small, "algorithm.sample_strategy_args", {"expert_data_ratio": 0.25})
    form = {"prompt_type": "messages", "messages_key": "talk"}
    small = put(small, "buffer.trainer_input.sft_warmup_dataset", {"path": "experts", "format": form})
    config = translate(small)
    assert config["rollout"]["prompts_per_step"] == 30 and config["algorithm"]["policy_loss"] == {"mu": 0.3}
    data = {"path": "experts", "prompt_key": "talk", "response_key": None}
    assert config["demonstrations"] == {"per_step": 80, "data": data}
    with pytest.raises(ConfigError, match="leaves 307 answers for tasks of 8 each"):
        translate(put(small, "algorithm.sample_strategy_args.expert_data_ratio", 0.04))


def test_auxiliary_models_keep_what_is_not_their_engines(small: dict[str, Any]) -> None:
    models = [{"model_path": "judge", "tensor_parallel_size": 2, "enable_thinking": False, "max_model_len": None}]
    config = translate(put(small, "explorer.auxiliary_models", models))
    assert config["workflow_args"]["auxiliary_models"] == [{"model_path": "judge", "enable_thinking": False}]


def test_archons_own_configuration_passes_as_it_is() -> None:
    own = {"run_dir": "x", "actor": {"path": "y"}, "algorithm": {"preset": "grpo"}}
    assert translate(own) is own


T = "buffer.explorer_input.taskset."


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            T + "formats",
            {"prompt_key": "q"},
            r"unknown key '.*taskset.formats.prompt_key', did you mean '.*format.prom",
        ),
        (T + "rollout_args.temperatur", 1.0, "did you mean '.*rollout_args.temperature'"),
        ("algorithm.repeat_time", 8, "did you mean 'algorithm.repeat_times'"),
        ("explorer.names", "x", "unknown key 'explorer.names'"),
        ("mode", "serve", "mode is 'serve', expected 'both' or 'colocate' or 'explore' or 'train' or 'bench'"),
        ("synchronizer.sync_style", "sometimes", "sync_style is 'sometimes', expected 'fixed' or"),
        ("algorithm.algorithm_type", "sft", "which has no rollouts: run `archon sft`"),
        ("algorithm.algorithm_type", "mix", "the demonstrations are missing"),
        ("algorithm.bypass_old_logprobs", False, r"expected True: write `archon: \{algorithm: \{correction: tis"),
        ("model.lora_configs", [{"lora_rank": 8}] * 2, r"expected a list of one LoRA or none"),
        ("model.lora_configs", [{"exclude_modules": "wq"}], r"lora_configs has 'exclude_modules'; archon reads"),
        ("algorithm.policy_loss_fn_args.weight", "advantage", "archon's REC has no importance weights"),
        ("algorithm.optiimzer.lr", 1e-6, "did you mean 'algorithm.optimizer.lr'"),
        ("model.rope_theta", 1e6, "expected null: set it in the checkpoint's config.json"),
        ("model.repetition_penalty", 1.1, "the trainer cannot replay a penalty"),
        (T + "format.image_key", "image", "is 'image' of math_workflow; images are in the column images or image"),
        (T + "data_selector", {"selector_type": "difficulty_based"}, "tasks are drawn at random"),
        ("data_processor.experience_pipeline", {"operators": [{"name": "x"}]}, "process experiences in the workflow"),
        ("buffer.trainer_input.experience_buffer", {"replay_buffer": {"enable": True}}, "trained in order"),
        ("buffer.trainer_input.sft_warmup_dataset", {"path": "x"}, "does not train on demonstrations"),
        ("buffer.trainer_input.auxiliary_buffers", {"a": {}, "b": {}}, "has a, b; archon mixes in one"),
        ("stages", [{"stage_name": "sft"}], "run each stage from a separate file"),
        ("trainer.trainer_config", "verl", "expected a mapping"),
        (T + "storage_type", "sql", "expected 'file'"),
        (T + "default_workflow_type", "math_workflw", "did you mean 'math_workflow'.*dotted path"),
        (T + "default_reward_fn_type", "count_reward", "unknown reward 'count_reward'"),
        (T + "default_workflow_type", None, "taskset.default_workflow_type is missing"),
        (T + "path", None, "taskset.path is missing"),
        ("buffer.train_batch_size", 5, "5 does not divide the 32 answers of a step"),
        (
            "buffer.explorer_input.eval_tasksets",
            [{"path": "a"}, {"path": "b"}],
            "lists 2 sets, but archon evaluates on",
        ),
        (
            "buffer.explorer_input.eval_tasksets",
            [{"path": "a", "default_workflow_type": "simple_workflow"}],
            "workflow or reward differs",
        ),
        (
            "buffer.explorer_input.eval_tasksets",
            [{"path": "a", "rollout_args": {"max_tokens": 7}}],
            "max_tokens is 7, and unset in training",
        ),
        (T + "default_workflow_type", "frozen_lake_workflow", "'frozen_lake_workflow': write gym_env_workflow"),
        ("algorithm.policy_loss_fn_args.tau", 1.0, "expected 0: archon does not divide the loss"),
        ("data", {"dataset_path": "x"}, "the section data belongs to the first releases"),
        ("archon", "layout", "archon is 'layout', expected a mapping"),
        ("algorithm", "grpo", "unknown key 'algorithm'"),
        ("algorithm.algorithm_type", ["grpo"], r"algorithm_type is \['grpo'\], a value of another type"),
        ("algorithm.optimizer.lr_warmup_steps", "x", "lr_warmup_steps is 'x', a value of another type"),
        ("algorithm.optimizer.lr_warmup_steps_ratio", "0.1", "lr_warmup_steps_ratio is '0.1' of .* expected numbers"),
    ],
)
def test_what_has_no_meaning_here_is_refused_by_name(small: dict[str, Any], key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        translate(put(small, key, value), "my.yaml")


def test_a_workflow_that_scores_itself_needs_no_reward(small: dict[str, Any]) -> None:
    config = translate(put(small, T + "default_workflow_type", "tests.rl.compat.trinity.guide.AsyncWorkflow"))
    assert "reward" not in config


def test_some_settings_are_more_than_another_name(small: dict[str, Any]) -> None:
    config = translate(put(small, "algorithm", {"kl_loss_fn": "none", "policy_loss_fn_args": {"clip_range": 0.3}}))
    clipped = {"policy_loss": {"clip_low": 0.3, "clip_high": 0.3}}
    assert config["algorithm"] == {"preset": "grpo", "kl": {"coef": 0.0}} | clipped
    assert translate(put(small, "algorithm.kl_loss_fn", "low_var_kl"))["algorithm"]["kl"] == {"kind": "k3"}
    assert translate(put(small, "algorithm.algorithm_type", "ppo"))["critic"] == {"path": "model"}
    assert translate(put(small, "buffer.train_batch_size", 8))["algorithm"]["minibatches"] == 4
    assert translate(put(small, T + "rollout_args.top_k", -1))["total_steps"] == 5
    assert translate(put(small, "archon", {"total_steps": 7, "actor": {"layout": "d2"}}))["actor"]["layout"] == "d2"


def test_keys_of_trinitys_own_examples(small: dict[str, Any]) -> None:
    lora = [{"name": "lora", "lora_rank": 16, "lora_alpha": 8, "target_modules": ["q_proj"]}]
    sizes = {"rank": 16, "alpha": 8, "targets": ["q_proj"]}
    assert translate(put(small, "model.lora_configs", lora))["actor"]["lora"] == sizes
    assert translate(put(small, "trainer.ppo_max_token_len_per_gpu", 16384))["actor"]["max_tokens_per_mb"] == 16384
    greedy = [{"path": "questions", "rollout_args": {"temperature": 0.0}}]
    config = translate(put(small, "buffer.explorer_input.eval_tasksets", greedy))
    assert "temperature" not in config.get("evaluation", {})  # greedy answers are evaluated too
    config = translate(put(small, T + "default_reward_fn_type", "countdown_reward"))
    assert (config["reward"], config["rollout"]["n_gold_checks"]) == ("countdown", 0)
    config = translate(put(small, T + "default_workflow_type", "agentscope_reactv2_math_workflow"))
    assert config["workflow_args"]["workflow"] == "agentscope_reactv2_math_workflow"


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (
            {
                "algorithm_type": "asymre",
                "policy_loss_fn_args": {"tau": 0},
                "advantage_fn_args": {"baseline_shift": -0.2},
            },
            {"preset": "asymre", "advantage": {"shift": -0.2}},
        ),
        (
            {"algorithm_type": "gigpo", "advantage_fn_args": {"omega": 0.5, "fnorm": "none", "gamma": 0.9}},
            {"preset": "gigpo", "advantage": {"step_weight": 0.5, "normalize": False, "gamma": 0.9}},
        ),
        (
            {"algorithm_type": "m2po", "policy_loss_fn_args": {"m2_threshold": 0.05, "log_ratio_clip": 20.0}},
            {"preset": "m2po", "policy_loss": {"max_second_moment": 0.05}},
        ),
        (
            {"algorithm_type": "sppo", "policy_loss_fn_args": {"epsilon": 0.1}},
            {"preset": "sppo", "policy_loss": {"epsilon": 0.1}},
        ),
        (
            {"algorithm_type": "dapo", "policy_loss_fn_args": {"clip_ratio_c": 10.0}},
            {"preset": "dapo", "policy_loss": {"dual_clip": 10.0}},
        ),
        ({"algorithm_type": "reinforceplusplus"}, {"preset": "reinforce_pp"}),
        (
            {"algorithm_type": "opmd", "advantage_fn_args": {"tau": 2.0}},
            {"preset": "grpo", "advantage": {"kind": "opmd", "tau": 2.0}, "policy_loss": {"kind": "reinforce"}},
        ),
    ],
    ids=lambda value: value.get("algorithm_type", ""),
)
def test_algorithms_of_trinitys_own_examples(small: dict[str, Any], algorithm: Any, expected: Any) -> None:
    config = translate(put(small, "algorithm", algorithm))
    assert config["algorithm"] == expected
    RLConfig.parse(config)


def test_a_warm_up_may_be_a_share_of_the_steps(small: dict[str, Any]) -> None:
    small = put(put(small, "buffer.total_steps", 50), "algorithm.optimizer", {"lr_warmup_steps_ratio": 0.1})
    assert translate(small)["actor"]["scheduler"] == {"warmup_steps": 5}
    small = put(small, "algorithm.optimizer.lr_warmup_steps", -1)
    assert translate(small)["actor"]["scheduler"] == {"warmup_steps": 5}
    own = put(small, "archon", {"actor": {"scheduler": {"warmup_steps": 7}}})
    assert translate(own)["actor"]["scheduler"] == {"warmup_steps": 7}
    small = put(small, "algorithm.optimizer.lr_warmup_steps", 3)
    assert translate(small)["actor"]["scheduler"] == {"warmup_steps": 3}


def test_images_are_read_by_archons_own_workflow(small: dict[str, Any]) -> None:
    small = put(small, T + "format", {"prompt_key": "question", "response_key": "answer", "image_key": "images"})
    config = translate(put(small, T + "default_workflow_type", "simple_mm_workflow"))
    assert (config["workflow"], config["reward"]) == ("archon.rl.VisionRLVRWorkflow", "math_verify")
    assert config["train_data"]["raw"] is False and "workflow_args" not in config
    assert RLConfig.parse(config).train_data.prompt_key == "question"


def test_arguments_of_rec_keep_trinitys_meaning(small: dict[str, Any]) -> None:
    """Its default masks nothing, and archon's preset masks one side."""
    plain = translate(put(small, "algorithm.algorithm_type", "rec"))["algorithm"]
    assert plain == {"preset": "rec", "policy_loss": {"kind": "reinforce"}}
    arguments = {"clip_mode": "two-side", "epsilon_low": 0.1, "epsilon_high": 0.3, "weight": "none", "temp": 1.0}
    small = put(small, "algorithm", {"algorithm_type": "rec", "policy_loss_fn_args": arguments, "repeat_times": 4})
    small = put(small, "algorithm.advantage_fn_args", {"std_normalize": True})
    config = translate(small)["algorithm"]
    assert config["policy_loss"] == {"sides": "two", "clip_low": 0.1, "clip_high": 0.3}
    assert config["advantage"] == {"kind": "grpo"}


@pytest.fixture
def run_rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(data: dict[str, Any], *overrides: str) -> tuple[int, str]:
        path = tmp_path / "trinity.yaml"
        path.write_text(yaml.safe_dump(data))
        with pytest.raises(SystemExit) as left:
            main(["rl", "--config", str(path), *overrides])
        return left.value.code or 0, capsys.readouterr().err

    return run


@pytest.fixture
def trainable(small: dict[str, Any], blank: Path) -> dict[str, Any]:
    """Two steps of the tiny model; what only archon knows of is under `archon`."""
    small["model"] = {"model_path": str(blank), "max_response_tokens": 4}
    small["algorithm"] = {"algorithm_type": "grpo", "repeat_times": 4, "kl_loss_fn": "none", "optimizer": {"lr": 1e-3}}
    small["trainer"] = {"total_steps": 2}
    small["explorer"] = {"rollout_model": {"seed": 1}}
    small["archon"] = {"actor": {"init_from_scratch": True, "device": "cpu"}, "generator": {"max_slots": 16}}
    small["archon"]["rollout"] = {"workers": {"rewards": 1}}
    taskset = small["buffer"]["explorer_input"]["taskset"]
    small["buffer"]["explorer_input"]["eval_tasksets"] = [{"path": taskset["path"], "split": "test"}]
    return small


@pytest.mark.slow
def test_archon_rl_trains_on_it(trainable: dict[str, Any], run_rl: Any, tmp_path: Path) -> None:
    taskset = trainable["buffer"]["explorer_input"]["taskset"]
    taskset["format"]["system_prompt"] = ""
    taskset["default_reward_fn_type"] = "tests.rl.rewards_for_tests.nearness"
    code, errors = run_rl(trainable)
    assert code == 0, errors
    records = read_jsonl(tmp_path / "runs" / "small" / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert records[-1]["samples"] == 16 and records[-1]["grad_norm"] > 0 and "eval/greedy_reward" in records[-1]
    groups = read_jsonl(tmp_path / "runs" / "small" / "trajectories.jsonl")
    assert groups
    assert (tmp_path / "runs" / "small" / "export" / "model.safetensors").exists()


def test_archon_rl_trains_a_workflow_of_ones_own(trainable: dict[str, Any], run_rl: Any, tmp_path: Path) -> None:
    trainable["buffer"]["explorer_input"]["taskset"]["default_workflow_type"] = (
        "tests.rl.compat.trinity.guide.AsyncWorkflow"
    )
    code, errors = run_rl(trainable, "trainer.total_steps=1")
    assert code == 0, errors
    last = read_jsonl(tmp_path / "runs" / "small" / "metrics.jsonl")[-1]
    assert last["step"] == 1 and last["grad_norm"] > 0


def test_a_registered_name_alone_is_enough_in_python(rl_config: Any, tasks: Path) -> None:
    """Rows and columns that the workflow reads are those of `train_data`, whose section says nothing of them."""
    data = {"path": str(tasks), "prompt_key": "question", "response_key": "answer"}
    config = rl_config(total_steps=1, train_data=data, workflow="simple_workflow")
    rollout = {"prompts_per_step": 2, "workers": {"rewards": 1}}
    for given in (None, "simple_workflow"):
        with RLTrainer(config.model_copy(update={"rollout": RolloutConfig(**rollout)})).opened(given) as trainer:
            batch = trainer.rollout_batch()
        assert len(batch.prompts) == 2 and set(batch.prompts[0].row["raw_task"]) == {"question", "answer", "level"}
        assert len(batch.trajectories["rewards"].unique()) > 1


def test_a_registered_name_alone_is_enough_in_a_file(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    lines = ("from archon.rl import WORKFLOWS, Workflow", '@WORKFLOWS.register_module("of_a_plugin")')
    (plugins / "mine.py").write_text("\n".join((*lines, "class Mine(Workflow):", "    def run(self):", "        ...")))
    monkeypatch.setenv("TRINITY_PLUGIN_DIRS", str(plugins))
    for _ in range(2):
        config = translate(put(small, T + "default_workflow_type", "of_a_plugin"))
        assert config["workflow_args"]["workflow"] == "of_a_plugin"
    (plugins / "wrong.py").write_text("import nowhere_at_all")
    with pytest.raises(ConfigError, match=r"wrong.py cannot be imported: ModuleNotFoundError"):
        translate(small)
    monkeypatch.setenv("TRINITY_PLUGIN_DIRS", str(plugins / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere', which is not a folder"):
        translate(small)


def test_archon_rl_refuses_an_unknown_key_in_one_line(trainable: dict[str, Any], run_rl: Any) -> None:
    code, errors = run_rl(trainable, "buffer.batchsize=3")
    assert code == 2 and "unknown key 'buffer.batchsize', did you mean 'buffer.batch_size'" in errors
    assert "Traceback" not in errors


def test_a_dry_run_checks_it(trainable: dict[str, Any], run_rl: Any) -> None:
    trainable["buffer"]["explorer_input"]["taskset"]["default_reward_fn_type"] = "exact_match"
    code, errors = run_rl(trainable, "--dry-run")
    assert code == 0, errors
    code, errors = run_rl(put(trainable, T + "workflow_args", {"level": 1}) | {"archon": {"runs": 1}}, "--dry-run")
    assert code == 2 and "unknown key 'runs'" in errors


def test_a_mapping_in_place_of_a_list_is_refused(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected a list of tasksets"):
        translate(put(small, "buffer.explorer_input.eval_tasksets", {"path": "a"}))
