"""Every subcommand on a small checkpoint."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from archon import __version__
from archon.checkpoint.hf_io import load_model, save_model
from archon.cli.generate import read_prompts
from archon.models import get_supported_model_types
from archon.rl.algorithms.preset_table import preset_rows, text_table
from archon.rl.algorithms.presets import PRESETS
from archon.training.metrics import read_jsonl

RECIPES = Path(__file__).resolve().parents[2] / "rl" / "recipes"


def test_help_lists_the_commands(archon):
    done = archon("--help")
    assert done.code == 0
    commands = ("models", "inspect", "plan", "convert", "sft", "rl", "generate", "serve", "bench", "report", "doctor")
    commands += ("bootstrap", "preference", "eval", "launch", "serve-training", "init")
    for command in commands:
        assert f"  {command} " in done.out
    assert "..." not in done.out.partition("Commands:")[2]  # typer cuts long summaries


def test_the_version_is_shown(archon):
    assert archon("--version").out == f"archon {__version__}\n"


def test_python_m_archon_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "archon", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"archon {__version__}\n"


def test_models_lists_every_model_type(archon):
    listed = {line.split()[0] for line in archon("models").out.splitlines()}
    assert listed == get_supported_model_types()


@pytest.mark.parametrize("command", ["sft", "rl", "generate", "serve"])
def test_help_shows_the_fields(archon, command):
    done = archon(command, "--help")
    assert not [word for word in ("Annotated", "metadata=", "NoneType", "pydantic") if word in done.out]
    assert done.code == 0 and "Configuration (in FILE.yaml, or key=value):" in done.out
    shown = {"sft": "model.optimizer.lr", "rl": "gconfig.n_samples = 8", "generate": "temperature = 1.0"}
    assert (shown | {"serve": "max_new_tokens = 1024"})[command] in done.out


def test_inspect_says_what_a_checkpoint_is(archon, checkpoint):
    done = archon("inspect", checkpoint)
    assert done.code == 0
    assert "qwen3 (model_type qwen3)" in done.out and "key-value cache" not in done.err
    assert "parameters   16,064" in done.out


def test_inspect_says_how_a_checkpoint_is_used(archon, checkpoint, tmp_path):
    done = archon("inspect", checkpoint)
    assert "  weights      64,256 bytes of float32 in 1 file" in done.out
    assert f"  next         archon generate {checkpoint} --prompt TEXT" in done.out
    critic = load_model(checkpoint, is_critic=True, init_score=True)
    save_model(critic, tmp_path / "reward", like=checkpoint)
    done = archon("inspect", tmp_path / "reward")
    assert f"archon rl reward.model={tmp_path / 'reward'}" in done.out and "parameters   16,096" in done.out
    assert "archon generate" not in done.out
    config = json.loads((tmp_path / "reward" / "config.json").read_text())
    (tmp_path / "reward" / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b", "2": "c"}}))
    assert (
        "with 3 labels; expected a language model, or a reward model"
        in archon("inspect", tmp_path / "reward").complaint
    )
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert "  weights      its weights are pickled" in (done := archon("inspect", checkpoint)).out
    assert "archon generate" not in done.out


FOREIGN = {
    "empty": ([], "expected the folder of a model"),
    "gguf": (["model-q4.gguf", "tokenizer.json"], "gguf_file='model-q4.gguf'"),
    "tokenizer": (["tokenizer_config.json", "tokenizer.json"], "only a tokenizer"),
    "deepspeed": (["latest", "zero_to_fp32.py", "global_step9/mp_rank_00_model_states.pt"], "--safe_serialization"),
    "megatron": (
        ["latest_checkpointed_iteration.txt", "iter_0000009/mp_rank_00/model_optim_rng.pt"],
        "Megatron-Bridge",
    ),
    "megatron_dist": (["latest_checkpointed_iteration.txt", "iter_0000009/.metadata"], "Megatron-Bridge"),
    "dcp": ([".metadata", "__0_0.distcp"], "OUT --to hf --like BASE"),
    "run": (["config.yaml", "checkpoints/step-00000009/manifest.json"], "run/checkpoints OUT --to hf --like BASE"),
    "finished": (["export/config.json", "checkpoints/step-00000009/manifest.json"], "finished/export"),
    "trainer": (["checkpoint-9/config.json", "checkpoint-10/config.json"], "trainer/checkpoint-10"),
    "meta": (["params.json", "consolidated.00.pth", "tokenizer.model"], "original format of Llama or Mistral"),
    "weights": (["model.safetensors"], "copy the model's config.json"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_folder_that_is_no_checkpoint_is_named_with_advice(archon, tmp_path, kind):
    files, advice = FOREIGN[kind]
    (tmp_path / kind).mkdir()
    for name in files:
        (tmp_path / kind / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / kind / name).touch()
    assert advice in archon("inspect", tmp_path / kind).complaint


def test_inspect_prints_the_blocks_as_pseudo_code(archon, checkpoint):
    plain, full = (archon("inspect", checkpoint, *options) for options in ((), ("--blocks",)))
    assert full.code == 0 and full.out.startswith(plain.out) and "layers 0" not in plain.out
    last = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"] - 1
    assert f"layers 0-{last}: full attention; dense feed-forward" in full.out


PUBLISHED_GFLOP = {
    "Qwen3-0.6B": "6.39 | 4.99",
    "Qwen3-1.7B": "13.1 | 11.7",
    "Qwen3-4B": "31.4 | 27.8",
    "Qwen3-8B": "52.7 | 49.0",
    "Qwen3-14B": "94.0 | 89.0",
    "Qwen3-32B": "217.7 | 204.8",
    "Qwen3-30B-A3B": "27.9 | 23.1",
}


@pytest.mark.data
@pytest.mark.parametrize("name", PUBLISHED_GFLOP)
def test_inspect_prints_the_published_flops(archon, data_dir, name):
    done = archon("inspect", data_dir / "hf_configs" / name)
    assert f"{PUBLISHED_GFLOP[name]} GFLOP a token at 4096 tokens" in done.out


@pytest.mark.data
def test_inspect_counts_the_parameters_of_every_supported_config(archon, data_dir):
    rows = [line.split("\t") for line in (data_dir / "hf_configs" / "PARAMETERS.tsv").read_text().splitlines()[1:]]
    supported = [(name, int(count)) for name, kind, count in rows if kind in get_supported_model_types()]
    assert len(supported) >= 10
    for name, count in supported:
        assert f"parameters   {count:,}\n" in archon("inspect", data_dir / "hf_configs" / name).out


def test_inspect_lists_all_refused_fields_at_once(archon, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"partial_rotary_factor": 0.5, "mystery_field": 3, "hidden_act": "swishish"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    complaint = archon("inspect", checkpoint).complaint
    assert all(name in complaint for name in ("partial_rotary_factor", "mystery_field"))


def test_generate_answers_every_prompt(archon, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("\ufeff3+4=\n\n5+5=\r\n", encoding="utf-8", newline="")
    monkeypatch.setenv("HOME", str(tmp_path))
    done = archon(
        *("generate", checkpoint, "--prompt", "1+2=", "--prompts-file", "~/prompts.txt"),
        *("n_samples=2", "max_new_tokens=5", "seed=3"),
    )
    assert done.code == 0
    headings = sorted(line.split(" (")[0] for line in done.out.splitlines() if line.startswith("# "))
    assert headings == [f"# prompt {p} sample {s}" for p in (1, 2, 3) for s in (1, 2)]
    assert "6 answers" in done.err and "tokens/s" in done.err


def test_only_a_line_feed_ends_a_prompt(tmp_path):
    (tmp_path / "prompts.txt").write_bytes("\ufeffa\u2028b\x0cc\x85d\re\r\n \nsecond ".encode())
    assert read_prompts(tmp_path / "prompts.txt") == ["a\u2028b\x0cc\x85d\re", "second "]


def test_generate_is_greedy_unless_sampling_is_asked_for(archon, checkpoint):
    def answers(*overrides: str) -> list[str]:
        done = archon("generate", checkpoint, "--prompt", "1+2=", "max_new_tokens=12", "ignore_eos=true", *overrides)
        return [line for line in done.out.splitlines() if not line.startswith("# ")]

    greedy = answers()
    assert greedy == answers() == answers("greedy=true", "temperature=5.0")
    assert greedy == answers("temperature=0") == answers("temperature=0.0", "greedy=true", "seed=1")
    assert answers("temperature=5.0") != answers("temperature=5.0"), "each call has a new stream"
    assert len(set(answers("n_samples=3"))) > 1


def test_generate_is_the_same_for_the_same_seed(archon, checkpoint):
    asked = ("generate", checkpoint, "--prompt", "1+2=", "n_samples=3", "max_new_tokens=8")
    first, again, other = (archon(*asked, f"seed={seed}").out for seed in (1, 1, 2))
    assert first == again != other
    answers = [line for line in first.splitlines() if not line.startswith("# ")]
    assert len(set(answers)) > 1, "samples of one prompt differ"


def test_sft_trains_exports_and_reports(archon, sft_overrides, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = archon("sft", *sft_overrides)
    assert done.code == 0, done.err
    run = tmp_path / "run"
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")][-1] == 2
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["optimizer"]["lr"] == 1e-3
    assert (run / "report" / "report.html").is_file() and (run / "report" / "loss.png").is_file()
    AutoModelForCausalLM.from_pretrained(run / "export")
    AutoTokenizer.from_pretrained(run / "export")
    program, *command = shlex.split(done.out.rpartition("next: ")[2].replace("…", "1+1="))
    assert program == "archon" and archon(*command).code == 0


def test_rl_trains_exports_and_reports(archon, rl_overrides, tmp_path):
    from transformers import AutoModelForCausalLM

    done = archon("rl", *rl_overrides)
    assert done.code == 0, done.err
    run = tmp_path / "run"
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")][-1] == 2
    assert len(read_jsonl(run / "trajectories.jsonl")) >= 4
    page = (run / "report" / "report.html").read_text()
    assert '"completion":' in page
    AutoModelForCausalLM.from_pretrained(run / "export")


def test_report_writes_where_it_is_told(archon, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward": 0.5}\n')
    done = archon("report", tmp_path / "run", "--out", tmp_path / "elsewhere")
    assert done.out.split() == [str(tmp_path / "elsewhere" / name) for name in ("report.html", "reward.png")]


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_a_dry_run_prints_the_config_checks_it_and_creates_nothing(archon, command, request, tmp_path):
    overrides = request.getfixturevalue(f"{command}_overrides")
    done = archon(command, *overrides, "seed=5", "--dry-run")
    assert done.code == 0, done.err
    assert yaml.safe_load(done.out)["seed"] == 5
    assert "qwen3, 16,064 parameters" in done.out and "# train_data: 64 rows" in done.out
    assert ("«" in done.out.split("trained text between « and »:")[-1]) == (command == "sft")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_the_demo_checks_what_its_bootstrap_would_make(archon, tmp_path):
    done = archon("rl", "--config", RECIPES / "arithmetic_cpu.yaml", f"run_dir={tmp_path / 'run'}", "--dry-run")
    assert done.code == 0, done.err
    assert "to be created by the bootstrap" in done.out and "# eval_data: 1,000 rows" in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_mode_without_an_optimizer_needs_no_end_of_its_schedule(archon, tmp_path):
    changes = [f"run_dir={tmp_path / 'run'}", "mode=bench", "total_steps=30", "experiences.weights_from=elsewhere"]
    done = archon("rl", "--config", RECIPES / "arithmetic_cpu.yaml", *changes, "--dry-run")
    assert done.code == 0, done.err


def test_a_dry_run_prints_what_the_run_resolves_to_which_is_a_configuration_too(archon, rl_overrides, tmp_path):
    changes = ["actor.dtype=float64", "algorithm={preset: ppo, kl: {coef: 0.1}, aggregation: dr_grpo}"]
    changes += ["ref.seed=3", "critic.optimizer.lr=1e-2", "critic.init_score=true"]
    done = archon("rl", *rl_overrides, *changes, "--dry-run")
    assert done.code == 0, done.err
    resolved = yaml.safe_load(done.out)
    actor, ref, critic = (resolved[name] for name in ("actor", "ref", "critic"))
    assert ref == actor | {"seed": 3, "optimizer": None}
    head = {"is_critic": True, "init_score": True}
    assert critic == actor | head | {"optimizer": actor["optimizer"] | {"lr": 1e-2}}
    assert resolved["algorithm"]["aggregation"] == {"kind": "dr_grpo", "max_tokens": 4}
    assert "# ref: qwen3" in done.out and "# critic: qwen3" in done.out
    (tmp_path / "resolved.yaml").write_text(done.out)
    assert archon("rl", "--config", tmp_path / "resolved.yaml", "--dry-run").out == done.out


def test_presets_are_listed_and_chosen_by_an_option(archon, rl_overrides):
    listed = archon("rl", "--preset", "list")
    assert listed.code == 0 and listed.out == f"{text_table()}\n"
    header, *lines = listed.out.splitlines()
    assert len(lines) == len(PRESETS) and header.startswith("preset")
    for name, line in zip((row.name for row in preset_rows()), lines, strict=True):
        assert line.startswith(f"{name} ") and PRESETS[name].source in line
    chosen = archon("rl", *rl_overrides, "--preset", "gspo", "algorithm.kl.coef=0", "--dry-run")
    assert chosen.code == 0, chosen.err
    algorithm = yaml.safe_load(chosen.out)["algorithm"]
    assert (algorithm["preset"], algorithm["policy_loss"]["clip_high"]) == ("gspo", 4e-4)
    assert "unknown preset 'gsop', did you mean 'gspo'" in archon("rl", *rl_overrides, "--preset", "gsop").complaint


def test_a_dry_run_of_a_bootstrap_by_itself_makes_nothing(archon, tmp_path):
    made = tmp_path / "made"
    done = archon("bootstrap", "--config", RECIPES / "arithmetic_bootstrap.yaml", f"path={made}", "--dry-run")
    assert done.code == 0, done.err
    assert "# model: qwen3, 789,888 parameters, to be created by the bootstrap" in done.out
    assert "# warmup.train_data: 9,000 rows" in done.out and "# warmup.target.reward: exact_match" in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("actor.path=/nowhere/at/all", "/nowhere/at/all"),
        ("train_data.path=/nowhere/rows.jsonl", "/nowhere/rows.jsonl"),
        ("reward=no_such_reward", "unknown reward 'no_such_reward'"),
        ("reward=[exact_match, gsm8k]", "reward is a list; expected one reward"),
        ("lr=1e-4", "unknown key 'lr', did you mean 'actor.optimizer.lr'?"),
        ("train_data=x.jsonl", "train_data: got 'x.jsonl', expected a section with the key path"),
        ("model.path=x", "in RL the trained model is `actor`"),
        ("workflow=no.such.Workflow", "workflow 'no.such.Workflow' cannot be imported"),
        ("actor.layout=t3", "tp = 3 does not divide the 4 attention heads; nearest layouts that this model fits: c3"),
        ("run_dir=/dev/null/run", "/dev/null is not a folder"),
        ("actor.attn_type=varlen", "attn_type 'varlen' cannot run here"),
        ("actor.scheduler={kind: cosine, warmup_steps: 100000}", "scheduler.warmup_steps = 100000 leaves none"),
    ],
)
def test_a_dry_run_finds_what_the_run_would_stumble_over(archon, rl_overrides, change, complaint):
    assert complaint in archon("rl", *rl_overrides, change, "--dry-run").complaint


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("model.max_tokens_per_mb=4", "a row of train_data has"),
        ("model.path={}", "it holds no weights: expected model.safetensors or"),
    ],
)
def test_a_dry_run_of_training_finds_what_the_run_would_stumble_over(
    archon, sft_overrides, checkpoint, tmp_path, change, complaint
):
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    (bare / "model.safetensors").unlink()
    asked = change.format(bare)
    assert complaint in archon("sft", *sft_overrides, asked, "--dry-run").complaint
    assert archon("sft", *sft_overrides, f"model.path={bare}", "model.init_from_scratch=true", "--dry-run").code == 0


def test_a_dry_run_counts_the_rows_that_are_left_out(archon, sft_overrides, tmp_path):
    talks = [[{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]] * 3 + [[]]
    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps({"prompt": "1+1=", "conversations": t}) for t in talks))
    overrides = [*sft_overrides, f"train_data={{path: {tmp_path / 'talks.jsonl'}}}", "--dry-run"]
    assert "talks.jsonl:4: 'conversations' is []" in archon("sft", *overrides).complaint
    done = archon("sft", *overrides, "train_data.bad_rows=skip")
    assert done.code == 0 and "# train_data: 3 rows, 1 skipped" in done.out


def test_a_dry_run_alone_says_how_many_processes_the_run_needs(archon, rl_overrides):
    done = archon("rl", *rl_overrides, "actor.layout=d2", "--dry-run")
    assert done.code == 0 and "# train_data: " in done.out
    assert "# actor: layout d2 on 2 processes: start the run with torchrun --nproc-per-node 2 -m archon …" in done.out


@pytest.mark.slow
def test_sigterm_saves_and_leaves_and_the_run_goes_on(archon, rl_overrides, tmp_path):
    arguments = [sys.executable, "-m", "archon", "rl", *rl_overrides, "evaluation.every=0"]
    process = subprocess.Popen(
        [*arguments, "total_steps=100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert any(line.startswith("rl 1/100000") for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "SIGTERM: saving, then exiting" in errors and "Traceback" not in errors
    steps = [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    done = archon("rl", *rl_overrides, "evaluation.every=0", f"total_steps={steps[-1] + 1}", "resume=true")
    assert done.code == 0, done.err
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [*steps, steps[-1] + 1], "each step once, none lost"


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(("command", "recipe"), [("sft", "gsm8k_sft"), ("rl", "gsm8k_rl")])
def test_the_recipes_on_real_data_run_their_twenty_steps(archon, data_dir, tmp_path, command, recipe):
    bootstrap = yaml.safe_load((RECIPES / f"{recipe}_bootstrap.yaml").read_text())
    if command == "rl":
        bootstrap["warmup"]["total_steps"] = 20
    (tmp_path / "bootstrap.yaml").write_text(yaml.safe_dump(bootstrap))
    overrides = (f"run_dir={tmp_path / 'run'}", f"bootstrap={tmp_path / 'bootstrap.yaml'}")
    done = archon(command, "--config", RECIPES / f"{recipe}_cpu.yaml", *overrides)
    assert done.code == 0, done.err
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows][-1] == 20
    if command == "sft":
        losses = [row["loss"] for row in rows if "loss" in row]
        assert losses[-1] < losses[0] - 1
    else:
        assert all(row["skipped_update"] == 0 and row["first_logprob_diff"] < 1e-4 for row in rows if row["step"])


@pytest.mark.parametrize(("override", "tokens"), [((), 60), (("max_tokens=80",), 76)])
def test_generate_stays_within_the_models_positions_unless_told(archon, checkpoint, override, tokens):
    answer = archon("generate", checkpoint, "--prompt", "1+1=", "max_new_tokens=99", "ignore_eos=true", *override)
    assert f"({tokens} tokens, length)" in answer.out, answer.err


@pytest.mark.parametrize("loss", ["dpo", "reward"])
def test_preference_trains_on_pairs_and_exports(archon, sft_overrides, tmp_path, loss):
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a + 3)} for a in range(9)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [*sft_overrides, f"train_data.path={pairs}", f"eval_data.path={pairs}", f"loss={loss}"]
    overrides.append("eval_data.split=train")
    checked = archon("preference", *overrides, "--dry-run")
    assert checked.code == 0, checked.err
    assert "train_data: 9 rows" in checked.out
    done = archon("preference", *overrides)
    assert done.code == 0, done.err
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0 <= metrics[-1]["eval/accuracy"] <= 1
    assert (tmp_path / "run" / "export" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("sft", "--config", "missing.yaml"), "missing.yaml: cannot be read"),
        (("rl", "actor.path=missing"), "missing: it does not exist; expected the folder of a checkpoint"),
        (("preference", "model.path=."), ".: it is not a Hugging Face checkpoint"),
        (("sft", "model.optimizer"), "is not key=value"),
        (("generate", "missing", "--prompt", "1"), "missing: it does not exist"),
    ],
)
def test_a_missing_file_is_reported_before_torch_is_imported(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{RECIPES.parents[1]}"}
    command = [sys.executable, "-m", "archon", *arguments]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and complaint in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("words", "completed"), [("archon serve-", "serve-training"), ("archon sft --dr", "--dry-run")]
)
def test_a_shell_completes_commands_and_options(words: str, completed: str) -> None:
    shell = {"_ARCHON_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [Path(sys.executable).with_name("archon")]
    run = subprocess.run(command, env=os.environ | shell, capture_output=True, text=True)
    assert run.stdout.split() == [completed]
