"""Six configurations with the shapes of those in Trinity-RFT's repository, each run for three steps by `archon rl`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from archon.cli import main
from archon.rl.bootstrap import make_tokenizer, write_blank
from archon.training.config import BootstrapConfig, TokenizerRecipe
from archon.training.metrics import read_jsonl
from tests.rl.compat.trinity.checkpoints import ALPHABET, write_judge
from tests.small_qwen3 import SMALL_QWEN3

pytestmark = pytest.mark.slow

ROLLOUT_MODEL = """
    engine_type: vllm_async
    engine_num: 2
    tensor_parallel_size: 1
    enable_prefix_caching: false
    enforce_eager: true
    dtype: bfloat16
    seed: 42
"""

HEAD = """
project: recipes
name: NAME
checkpoint_root_dir: RUNS
model:
  model_path: MODEL
  max_prompt_tokens: 1024
  max_response_tokens: 8
  max_model_len: 1536
cluster:
  node_num: 1
  gpu_per_node: 8
monitor:
  monitor_type: wandb
"""

TASKSET = """
    taskset:
      name: tasks
      storage_type: file
      path: TASKS
      split: train
      format:
        prompt_key: 'question'
        response_key: 'answer'
      rollout_args:
        temperature: 1.0
        logprobs: 0
      enable_progress_bar: false
"""

MATH = """
algorithm:
  algorithm_type: grpo
  repeat_times: 4
  kl_loss_fn_args:
    kl_coef: 0.001
buffer:
  total_epochs: 1
  batch_size: 2
  max_retry_times: 3
  max_retry_interval: 1
  explorer_input:TASKSET
    default_workflow_type: 'math_workflow'
  trainer_input:
    experience_buffer:
      name: math_buffer
      storage_type: queue
      path: 'sqlite:///math.db'
explorer:
  eval_interval: 10
  runner_num: 32
  rollout_model:ROLLOUT
synchronizer:
  sync_method: 'nccl'
  sync_interval: 1
  sync_timeout: 1200
trainer:
  trainer_type: 'verl'
  trainer_config_path: VERL
  save_interval: 100
"""

RULER = """
algorithm:
  algorithm_type: grpo
  advantage_fn_args:
    std_threshold: 0.0001
  repeat_times: 2
buffer:
  total_epochs: 1
  batch_size: 2
  explorer_input:TASKSET
    eval_tasksets:
    - name: eval
      storage_type: file
      path: TASKS
      split: 'test'
      repeat_times: 2
      format:
        prompt_key: 'question'
        response_key: 'answer'
    default_workflow_type: 'math_ruler_workflow'
  trainer_input:
    experience_buffer:
      name: gsm8k_buffer
      storage_type: queue
explorer:
  eval_interval: 10
  runner_num: 32
  rollout_model:ROLLOUT
  auxiliary_models:
    - model_path: JUDGE
      engine_num: 1
      tensor_parallel_size: 2
      enable_thinking: false
      max_prompt_tokens: 1024
      max_response_tokens: 16
      max_model_len: 2048
synchronizer:
  sync_style: dynamic_by_explorer
  sync_method: 'nccl'
  sync_interval: 2
  sync_timeout: 3600
trainer:
  trainer_type: 'verl'
  trainer_config_path: 'examples/grpo_gsm8k_ruler/train_gsm8k.yaml'
  save_interval: 100
archon: {evaluation: {greedy: false}}
"""

ENVIRONMENT = """
algorithm:
  algorithm_type: grpo
  repeat_times: 4
  add_strategy: step_wise_grpo
buffer:
  total_epochs: 20
  batch_size: 2
  max_retry_times: 3
  explorer_input:TASKSET
      workflow_args:
        env: tests.rl.compat.trinity.guide.Word
        max_env_steps: 3
        unfinished_reward: 0.0
    default_workflow_type: 'alfworld_workflow'
  trainer_input:
    experience_buffer:
      name: alfworld_buffer
      storage_type: queue
      use_priority_queue: false
explorer:
  max_repeat_times_per_runner: 1
  runner_num: 32
  max_timeout: 3600
  rollout_model:ROLLOUT
    enable_history: true
    gpu_memory_utilization: 0.7
    enable_chunked_prefill: true
  env_vars:
    TMPDIR_OF_GAMES: /tmp/games
synchronizer:
  sync_style: dynamic_by_explorer
  sync_method: 'nccl'
  sync_interval: 2
trainer:
  trainer_type: 'verl'
  save_interval: 50
"""

REACT = """
algorithm:
  algorithm_type: multi_step_grpo
  repeat_times: 2
  optimizer:
    lr: 1e-4
buffer:
  total_epochs: 1
  batch_size: 2
  train_batch_size: 4
  explorer_input:TASKSET
      default_workflow_type: 'as_react_workflow'
    eval_tasksets: []
  trainer_input:
    experience_buffer:
      name: agentscope_gsm8k_buffer
      storage_type: queue
explorer:
  eval_interval: 50
  runner_per_model: 8
  max_timeout: 360
  rollout_model:ROLLOUT
    enable_openai_api: true
    enable_history: true
    enable_auto_tool_choice: true
    tool_call_parser: hermes
    reasoning_parser: deepseek_r1
    enable_thinking: true
synchronizer:
  sync_style: dynamic_by_explorer
  sync_method: 'nccl'
  sync_interval: 2
  sync_timeout: 1200
trainer:
  save_interval: 100
  grad_clip: 1.0
  use_dynamic_bsz: true
  max_token_len_per_gpu: 4096
  ulysses_sequence_parallel_size: 2
"""

MIX = """
algorithm:
  algorithm_type: mix_chord
  repeat_times: 4
  kl_loss_fn_args:
    kl_coef: 0.0
  sample_strategy_args:
    expert_data_ratio: 0.25
  policy_loss_fn_args:
    mu_warmup_steps: 0
    mu_decay_steps: 2
    mu_peak: 0.5
    mu_valley: 0.02
    enable_phi_function: true
    clip_range: 0.2
    use_token_level_loss_in_sft: true
    use_dynamic_bsz: true
    ppo_mini_batch_size: 320
    ppo_micro_batch_size_per_gpu: 4
    ngpus_trainer: 4
    train_batch_size_expert: 4
    train_batch_size_usual: 12
buffer:
  total_epochs: 25
  batch_size: 4
  max_retry_times: 3
  explorer_input:TASKSET
      workflow_args:
        with_think: true
    eval_tasksets: []
    default_workflow_type: 'math_boxed_workflow'
  trainer_input:
    experience_buffer:
      name: math_buffer
      storage_type: queue
      path: 'sqlite:///test_mix_chord.db'
    auxiliary_buffers:
      sft_dataset:
        name: SFT_data
        storage_type: file
        path: EXPERTS
        split: 'train'
        format:
          prompt_type: messages
          messages_key: 'messages'
explorer:
  eval_interval: 10
  runner_num: 16
  rollout_model:ROLLOUT
synchronizer:
  sync_method: 'nccl'
  sync_interval: 1
trainer:
  trainer_type: 'verl'
  save_interval: 50
"""

TRAIN = """
mode: train
algorithm:
  algorithm_type: grpo
  repeat_times: 4
buffer:
  total_epochs: 1
  batch_size: 2
  max_retry_times: 3
  explorer_input:TASKSET
    default_workflow_type: 'tests.rl.compat.trinity.guide.AsyncWorkflow'
  trainer_input:
    experience_buffer:
      name: gsm8k_buffer
      storage_type: queue
      path: 'sqlite:///BUFFER'
      max_read_timeout: 60
explorer:
  rollout_model:ROLLOUT
synchronizer:
  sync_method: 'checkpoint'
  sync_interval: 10
trainer:
  trainer_type: 'verl'
  trainer_config_path: VERL
"""

VERL = """
actor_rollout_ref:
  actor:
    ppo_max_token_len_per_gpu: 4096
    grad_clip: 0.5
    optim: {lr: 1e-3, warmup_style: constant}
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is trained, the judge, tasks, demonstrations, and a configuration of veRL."""
    path = tmp_path_factory.mktemp("recipes")
    recipe = TokenizerRecipe(kind="characters", alphabet=ALPHABET, chat_template="chatml")
    hf_config = SMALL_QWEN3 | {"max_position_embeddings": 2048}
    write_blank(BootstrapConfig(hf_config=hf_config, tokenizer=recipe), path / "model")
    make_tokenizer(recipe)
    write_judge(path / "judge", "[1,0]")
    (path / "tasks").mkdir()
    for split, count in (("train", 12), ("test", 2)):
        rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(count)]
        (path / "tasks" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "experts").mkdir()
    said = [[{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}] for n in range(9)]
    (path / "experts" / "train.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in said))
    (path / "verl.yaml").write_text(VERL)
    return path


@pytest.fixture
def run(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """Run a configuration by the command line, and returns the records of its steps."""

    def run(text: str, name: str, *overrides: str, folder: str = "") -> list[dict[str, Any]]:
        names = {"MODEL": checkpoints / "model", "TASKS": checkpoints / "tasks", "JUDGE": checkpoints / "judge"}
        names |= {"EXPERTS": checkpoints / "experts", "VERL": checkpoints / "verl.yaml", "RUNS": tmp_path}
        names |= {"TASKSET": TASKSET.rstrip(), "ROLLOUT": ROLLOUT_MODEL.rstrip(), "NAME": name}
        names |= {"BUFFER": tmp_path / "buffer.db"}
        text = HEAD + text
        for key in ("TASKSET", "ROLLOUT", *names):
            text = (
                text.replace(key, str(names[key]))
                if key not in ("ROLLOUT",)
                else text.replace("rollout_model:ROLLOUT", f"rollout_model:{names[key]}")
            )
        file = tmp_path / f"{name}.yaml"
        file.write_text(text)
        assert yaml.safe_load(text)
        small = ["archon.actor.init_from_scratch=true", "archon.actor.device=cpu", "archon.actor.dtype=float32"]
        small += ["archon.generator.max_slots=16", "archon.rollout.workers.rewards=1", "archon.total_steps=3"]
        with pytest.raises(SystemExit) as left:
            main(["rl", "--config", str(file), *small, *overrides])
        assert not left.value.code, capsys.readouterr().err
        return read_jsonl(tmp_path / "recipes" / name / folder / "metrics.jsonl")

    return run


def test_math(run: Any) -> None:
    records = run(MATH, "math")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[-1]["samples"] == 8 and records[-1]["lr"] == 1e-3  # of veRL's file


def test_gsm8k_with_ruler(run: Any) -> None:
    """The judge is served here, from a checkpoint; it gives the first answer 1 and the second 0."""
    records = run(RULER, "ruler", "archon.rollout.max_staleness=0", "archon.actor.optimizer.lr=1e-3")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(record["reward"] == 0.5 and record["grad_norm"] > 0 for record in records[1:])
    assert records[-1]["gold_reward"] == 0.0 and records[-1]["eval/reward"] == 0.5


def test_a_multi_turn_environment(run: Any) -> None:
    stops = f"archon.gconfig.stop_token_ids={list(range(10, 60))}"  # a blank model seldom ends its turn
    records = run(ENVIRONMENT, "environment", "archon.rollout.max_staleness=1", stops, "model.max_response_tokens=60")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["env_steps"] > 1 for record in records) and records[-1]["staleness_max"] <= 1


def test_a_react_agent(run: Any) -> None:
    records = run(REACT, "react")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[-1]["samples"] == 4 and records[-1]["tool_calls"] == 0


def test_sft_and_rl_mixed(run: Any) -> None:
    records = run(MIX, "mix")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert [record["demonstrations_weight"] for record in records] == pytest.approx([0.5, 0.26, 0.02])
    assert all(record["demonstrations"] == 4 and record["samples"] == 12 for record in records)
    assert all(record["grad_norm"] > 0 and record["first_logprob_diff"] < 1e-4 for record in records)


def test_training_alone_on_what_was_explored(run: Any) -> None:
    explored = run(TRAIN, "alone", "mode=explore", folder="explorer")
    trained = run(TRAIN, "alone")
    assert [record["step"] for record in trained] == [1, 2, 3]
    assert [r["reward"] for r in trained] == pytest.approx([r["reward"] for r in explored])
    assert [record["experiences"] for record in trained] == [2, 4, 6]
    assert all(record["grad_norm"] > 0 for record in trained)
