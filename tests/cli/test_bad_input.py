"""Bad input: one clear line, exit code 2, nothing lost, no traceback. One test for each kind that acceptance names."""

from __future__ import annotations

import gc
import json
import re
import socket

import pytest
from safetensors.torch import load_file, save_file

from archon.cli import main
from archon.schema.errors import UserError
from archon.training.metrics import read_jsonl


def change_config(checkpoint, **changes):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_missing_path(archon, tmp_path, command):
    arguments = ("--prompt", "1+1=") if command == "generate" else ()
    complaint = archon(command, tmp_path / "nowhere", *arguments).complaint
    assert str(tmp_path / "nowhere") in complaint


@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_not_a_checkpoint(archon, tmp_path, command):
    arguments = ("--prompt", "1+1=") if command == "generate" else ()
    complaint = archon(command, tmp_path, *arguments).complaint
    assert str(tmp_path) in complaint and "config.json" in complaint


@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_unknown_family(archon, checkpoint, command):
    change_config(checkpoint, model_type="llamba")
    arguments = ("--prompt", "1+1=") if command == "generate" else ()
    complaint = archon(command, checkpoint, *arguments).complaint
    assert "'llamba' is not supported" in complaint and "qwen3" in complaint


def test_unsupported_field(archon, checkpoint, sft_overrides):
    change_config(checkpoint, partial_rotary_factor=0.5)
    complaint = archon("sft", *sft_overrides).complaint
    assert "'partial_rotary_factor' is 0.5" in complaint


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "32"},
        {"num_attention_heads": [4]},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**400},
        {"intermediate_size": 2**62},
        {"layer_types": [["x"], {}]},
    ],
)
def test_inspect_refuses_a_value_of_the_wrong_kind(archon, checkpoint, changes):
    change_config(checkpoint, **changes)
    assert f"config field '{next(iter(changes))}' is" in archon("inspect", checkpoint).complaint


def test_model_larger_than_the_memory(archon, checkpoint, sft_overrides):
    change_config(checkpoint, vocab_size=10**12)
    complaint = archon("sft", *sft_overrides, "model.init_from_scratch=true").complaint
    assert "GiB of weights do not fit the memory of cpu" in complaint


@pytest.mark.parametrize("command", ["sft", "generate"])
def test_a_config_that_claims_more_than_the_weights(archon, checkpoint, sft_overrides, command):
    change_config(checkpoint, vocab_size=10**12)
    arguments = sft_overrides if command == "sft" else [checkpoint, "--prompt", "1+1="]
    assert "expected [1000000000000, 32] by its config" in archon(command, *arguments).complaint


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{hidden_size: wide}", "bootstrap: hf_config is not a config of qwen3"),
        ("{num_attention_heads: 3, num_key_value_heads: 2}", "bootstrap: hf_config: n_kv_heads is 2"),
        ("{hidden_sise: 32}", "bootstrap: hf_config: config field 'hidden_sise' is 32"),
    ],
)
def test_bootstrap_config_that_cannot_be_made(archon, sft_overrides, tmp_path, value, reason):
    (tmp_path / "bootstrap.yaml").write_text(f"hf_config: {value}\n")
    changes = [f"model.path={tmp_path / 'made'}", f"bootstrap={tmp_path / 'bootstrap.yaml'}"]
    assert reason in archon("sft", *sft_overrides, *changes).complaint
    assert reason in archon("bootstrap", f"hf_config={value}", f"path={tmp_path / 'made'}").complaint
    assert not list(tmp_path.glob("made*")), "nothing is left that the fixed run would stumble over"


@pytest.mark.parametrize(
    ("model_type", "images", "expected"),
    [("qwen3", "true", "qwen3_5, qwen3_5_moe, qwen3_vl"), ("qwen3_vl", "false", "gpt_oss, granite")],
)
def test_a_bootstrap_of_a_family_with_the_wrong_kind_of_tokenizer(archon, tmp_path, model_type, images, expected):
    changes = [f"path={tmp_path / 'made'}", f"model_type={model_type}", f"tokenizer.images={images}"]
    complaint = archon("bootstrap", "--dry-run", *changes).complaint
    assert f"model_type {model_type} does not fit tokenizer.images={images}; expected one of " in complaint
    assert expected in complaint


def test_a_schedule_without_an_end_is_refused_before_the_bootstrap(archon, sft_overrides, tmp_path):
    (tmp_path / "bootstrap.yaml").write_text("hf_config: {model_type: qwen3}\n")
    changes = [f"model.path={tmp_path / 'made'}", f"bootstrap={tmp_path / 'bootstrap.yaml'}", "total_steps=3"]
    schedule = ["model.scheduler.kind=cosine", "model.scheduler.warmup_steps=3"]
    complaint = archon("sft", *sft_overrides, *changes, *schedule).complaint
    assert "scheduler.warmup_steps = 3 leaves none of the 3 steps" in complaint
    assert not list(tmp_path.glob("made*"))


def test_a_bootstrap_that_says_nowhere_and_one_that_is_not_there(archon, sft_overrides):
    assert "the checkpoint has no path; set path=FOLDER" in archon("bootstrap").complaint
    assert "nowhere.yaml" in archon("sft", *sft_overrides, "bootstrap=nowhere.yaml").complaint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "bootstrap.warmup.total_steps=3",
            "bootstrap: its keys (warmup) belong in a separate file: bootstrap: FILE.yaml",
        ),
        ("ref.optimizers.lr=1", "ref: unknown key 'optimizers', did you mean 'optimizer'?"),
    ],
)
def test_an_old_key_is_one_line_that_names_the_new_one(archon, rl_overrides, old, new):
    assert new in archon("rl", *rl_overrides, old).complaint


def test_weights_that_are_not_finite(archon, checkpoint):
    shard = checkpoint / "model.safetensors"
    save_file(
        {name: tensor * float("nan") for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"}
    )
    prompts = ("--prompt", "1+", "--prompt", "2+")
    complaint = archon("generate", checkpoint, *prompts).complaint
    assert f"{checkpoint}: logits" in complaint and "not finite" in complaint


def test_fields_left_out_are_all_named(archon):
    assert (
        archon("sft").complaint
        == "archon: config: run_dir: field required; model: field required; train_data: field required"
    )


def test_truncated_shard(archon, checkpoint, sft_overrides):
    shard = checkpoint / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    complaint = archon("sft", *sft_overrides).complaint
    assert "model.safetensors" in complaint


def test_key_missing(archon, checkpoint, sft_overrides):
    shard = checkpoint / "model.safetensors"
    tensors = load_file(shard)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in archon("sft", *sft_overrides).complaint


@pytest.mark.parametrize("command", ["sft", "generate"])
def test_tokenizer_missing(archon, checkpoint, sft_overrides, command):
    for file in checkpoint.glob("*token*"):
        file.unlink()
    arguments = sft_overrides if command == "sft" else [checkpoint, "--prompt", "1+1="]
    complaint = archon(command, *arguments).complaint
    assert "tokenizer" in complaint and str(checkpoint) in complaint


def test_empty_dataset(archon, dataset, sft_overrides):
    dataset.write_text("")
    complaint = archon("sft", *sft_overrides).complaint
    assert str(dataset) in complaint and "empty" in complaint


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_dataset_line_not_json(archon, dataset, request, command):
    lines = dataset.read_text().splitlines()
    lines[4] = lines[4][:-1]
    dataset.write_text("\n".join(lines))
    complaint = archon(command, *request.getfixturevalue(f"{command}_overrides")).complaint
    assert f"{dataset}:5: not JSON" in complaint


@pytest.mark.parametrize("text", ["1+x=", "1+\\ud800="], ids=["unknown character", "half a pair"])
def test_text_that_the_tokenizer_refuses(archon, dataset, checkpoint, sft_overrides, text):
    lines = dataset.read_text().splitlines()
    lines[4] = '{"prompt": "' + text + '", "response": "1"}'
    dataset.write_text("\n".join(lines))
    assert f"{dataset}:5: the tokenizer refuses" in archon("sft", *sft_overrides).complaint
    text = json.loads(f'"{text}"')
    assert (
        "prompt 2: the tokenizer refuses"
        in archon("generate", checkpoint, "--prompt", "1+", "--prompt", text).complaint
    )


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_layers_that_the_model_does_not_have(archon, sft_overrides, dry_run):
    complaint = archon("sft", *sft_overrides, "model.mtp_loss_weight=0.1", *dry_run).complaint
    assert "archon computes none of Qwen3; set it to 0" in complaint
    lora = ["model.lora.rank=2", "model.lora.dora=true", "model.lora.quantize_base=fp8"]
    assert "DoRA divides by the norms of the whole weights" in archon("sft", *sft_overrides, *lora, *dry_run).complaint
    lora = [*lora[:1], "model.lora.quantize_base=nf4"]
    complaint = archon("sft", *sft_overrides, *lora, *dry_run).complaint
    assert "no linear layer of this model can be stored so" in complaint


def test_gold_answer_that_is_no_text(archon, dataset, rl_overrides):
    lines = dataset.read_text().splitlines()
    lines[4] = '{"prompt": "1+1=", "response": "2\\udfff"}'
    dataset.write_text("\n".join(lines))
    complaint = archon("rl", *rl_overrides).complaint
    assert f"{dataset}:5: 'response' holds half of a surrogate pair at character 1" in complaint


def test_prompt_that_is_no_text(archon, dataset, checkpoint, rl_overrides, tmp_path):
    dataset.write_text('{"prompt": "1+1=", "response": "2"}\n{"prompt": "1+\\ud800", "response": "2"}\n')
    where = f"{dataset}:2: 'prompt' holds half of a surrogate pair at character 2"
    assert where in archon("rl", *rl_overrides, "--dry-run").complaint
    evaluation = ("--data", dataset, "--reward", "exact_match", "--out", tmp_path / "out")
    for source in ([checkpoint], ["--url", "http://127.0.0.1:9/v1"]):
        assert where in archon("eval", *source, *evaluation).complaint


@pytest.mark.parametrize("what", ["file", "key", "type"])
def test_checkpoint_whose_json_holds_half_a_surrogate_pair(archon, checkpoint, what, tmp_path):
    if what == "type":
        change_config(checkpoint, model_type="\ud800")
        complaints = [archon(*command).complaint for command in (["inspect", checkpoint], ["plan", checkpoint])]
        assert all("\\ud800' is not supported" in complaint for complaint in complaints)
        return
    shard = checkpoint / "model.safetensors"
    weight_map = dict.fromkeys(load_file(shard), "model-1.safetensors")
    shard.rename(checkpoint / "model-1.safetensors")
    weight_map |= {"x": "\ud800.safetensors"} if what == "file" else {"\ud800": "model-1.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "\\ud800" in archon("convert", checkpoint, tmp_path / "out", "--to", "native").complaint


def test_a_name_that_is_no_text_moves_with_the_checkpoint(archon, checkpoint, tmp_path):
    change_config(checkpoint, architectures=["\ud800"])
    assert archon("convert", checkpoint, tmp_path / "out", "--to", "hf", "--dtype", "bfloat16").code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["\ud800"]


@pytest.mark.parametrize(
    "template",
    [
        "{% if",
        "{{ raise_exception('never') }}",
        "{{ messages.no.such }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for message in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 1 // 0 }}",
        "{{ 10.0 ** 400 }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_chat_template_that_refuses_the_prompt(archon, checkpoint, template):
    (checkpoint / "chat_template.jinja").write_text(template)
    complaint = archon("generate", checkpoint, "--prompt", "1+1=").complaint
    assert "prompt 1: the chat template refuses this conversation" in complaint


def test_prompts_that_leave_no_room_for_an_answer(archon, checkpoint, caplog):
    prompts = [f"--prompt={'1' * length}" for length in (1, 64, 65)]
    complaint = archon("generate", checkpoint, *prompts).complaint
    assert "request for prompt 2: the prompt of 64 tokens leaves no room" in complaint
    gc.collect()
    assert not caplog.records, "asyncio logs a traceback for an exception that nobody reads"


def test_prompts_file_that_is_not_text(archon, checkpoint):
    complaint = archon("generate", checkpoint, "--prompts-file", checkpoint / "model.safetensors").complaint
    assert "model.safetensors: not UTF-8" in complaint


@pytest.mark.parametrize("override", ["[=1", ".=1", "].[=1"])
def test_override_without_a_key(archon, override):
    assert f"override '{override}' is not key=value" in archon("sft", override).complaint


def test_message_of_several_lines_is_one_line(archon, monkeypatch):
    def refuse(*_):
        raise UserError("first\nsecond")

    monkeypatch.setattr("archon.checkpoint.hf_reader.read_hf_config", refuse)
    assert archon("inspect", "anywhere").complaint == "archon: first second"


def test_unknown_config_key(archon, sft_overrides):
    complaint = archon("sft", *sft_overrides, "model.optimizer.weight_decy=0").complaint
    assert "model.optimizer: unknown key 'weight_decy', did you mean 'weight_decay'?" in complaint


def test_value_of_the_wrong_type(archon, sft_overrides):
    complaint = archon("sft", *sft_overrides, "total_steps=soon").complaint
    assert "total_steps: got 'soon', input should be a valid integer" in complaint


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("seed=9999999999999999999", "seed: got 9999999999999999999, input should be less than 9223372036854775808"),
        ("actor.seed=-1", "actor.seed: got -1, input should be greater than or equal to 0"),
        ("actor.optimizer.lr=inf", "actor.optimizer.lr: got 'inf', input should be a finite number"),
        ("generator.memory_gib=inf", "generator.memory_gib: got 'inf', input should be a finite number"),
        ("logprob_check.max_mismatch=inf", "logprob_check.max_mismatch: got 'inf', input should be a finite number"),
        (
            "total_steps=1000000000000000000000000",
            "total_steps: got 1000000000000000000000000, expected an integer of at most 64",
        ),
        ("actor.layout=d" + "9" * 5000, "a degree has 5000 digits, expected at most 9"),
        ("generator.max_slots=1099511627776", "got 1099511627776, input should be less than or equal to 1048576"),
        ("actor.timeout_s=1e308", "actor.timeout_s: got 1e+308, input should be less than or equal to 1000000000"),
        ("actor.timeout_s=nan", "actor.timeout_s: got 'nan', input should be a finite number"),
        ("actor.stall_s=1e308", "actor.stall_s: got 1e+308, input should be less than or equal to 1000000000"),
        ("actor.stall_s=inf", "actor.stall_s: got 'inf', input should be a finite number"),
        ("actor.stall_s=-1", "actor.stall_s: got -1, input should be greater than 0"),
        (
            "rollout.reward_timeout=1e308",
            "reward_timeout: got 1e+308, input should be less than or equal to 1000000000",
        ),
        ("gconfig.n_samples=9223372036854775807", "input should be less than or equal to 16384"),
        ("evaluation.n_samples=1048576", "input should be less than or equal to 16384"),
        ("rollout.prompts_per_step=1000000000", "input should be less than or equal to 262144"),
        (
            "rollout.prompts_per_step=200000",
            "prompts_per_step = 200000, gconfig.n_samples = 4 and rollout.max_staleness = 0 start 800000 answers",
        ),
        ("rollout.max_staleness=100000", "at once; expected at most 262144"),
        ("actor.optimizer.lr=1e30", "actor.optimizer.lr: got 1e+30, input should be less than or equal to 1000"),
        ("actor.optimizer.weight_decay=1e10", "lr * weight_decay is 100000; expected at most 1"),
        (
            "actor.activation_checkpoint.memory_budget=2",
            "memory_budget is 2, which mode none ignores; set mode to memory_budget or auto, or remove it",
        ),
        (
            "actor.activation_checkpoint.selective=2",
            "selective is 2, which mode none ignores; set mode to selective, or remove it",
        ),
        (
            "actor.pipeline.layers_per_stage=[1, 1]",
            "layers_per_stage is [1, 1], but layout d1 has no pipeline stages; add p, such as p2, to the layout",
        ),
        ("reward=..", "unknown reward '..'; expected one of"),
        ("workflow=..", "workflow '..' cannot be imported (the path is relative)"),
        ("workflow_args.gconfig=1", "workflow_args.gconfig: got 1; set the run's `gconfig` instead"),
        ("gconfig.temperature=1e-30", "gconfig.temperature: got 1e-30, input should be greater than or equal to 0.001"),
        ("algorithm.preset=[1]", "algorithm.preset: got [1], input should be a valid string"),
        ("algorithm.preset=null", "algorithm.preset: got None, input should be a valid string"),
        ("evaluation.well_formed=(", "well_formed: '(' is not a regular expression: missing )"),
    ],
)
def test_value_that_no_run_could_honor(archon, rl_overrides, override, complaint):
    assert complaint in archon("rl", *rl_overrides, override).complaint


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["generator.max_seq_len=2"], "the prompt of 4 tokens leaves no room for an answer within 2 tokens"),
        (["reward=tests.rl.rewards_for_tests.always_nan"], "always_nan returned nan; expected a finite number"),
        (["reward=tests.rl.rewards_for_tests.always_hangs", "rollout.reward_timeout=0.2"], "ran longer than 0.2 s"),
    ],
    ids=["no room", "nan", "hang"],
)
def test_episodes_that_always_fail_by_a_mistake(archon, rl_overrides, overrides, complaint):
    complained = archon("rl", *rl_overrides, "rollout.n_gold_checks=0", *overrides).complaint
    assert "failed on 4 prompts and succeeded on none" in complained and complaint in complained


def test_run_directory_cannot_be_written(archon, sft_overrides, tmp_path):
    (tmp_path / "file").write_text("mine")
    complaint = archon("sft", *sft_overrides, f"run_dir={tmp_path / 'file' / 'run'}").complaint
    assert f"{tmp_path / 'file'} is not a folder; choose another run_dir" in complaint
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("command", ["sft", "sft --dry-run"])
@pytest.mark.parametrize("path", ["/", "/usr/..", "//"])
def test_the_root_of_the_file_system_is_no_run_directory(archon, sft_overrides, command, path):
    complaint = archon(*command.split(), *sft_overrides, f"run_dir={path}").complaint
    assert "is the root of the file system; choose another run_dir" in complaint


def test_a_run_directory_that_the_system_refuses_names_its_setting(archon, sft_overrides):
    complaint = archon("sft", *sft_overrides, "run_dir=/proc/x").complaint
    assert "run_dir /proc/x: No such file or directory; choose another run_dir" in complaint


def test_a_batch_has_a_limited_number_of_rows(archon, sft_overrides):
    complaint = archon("sft", *sft_overrides, "batch_size=1000000000").complaint
    assert "batch_size: got 1000000000, input should be less than or equal to 262144" in complaint


def test_a_call_has_a_limited_number_of_answers(archon, checkpoint, dataset, tmp_path):
    prompts = tmp_path / "prompts"
    prompts.write_text("1\n" * 200)
    arguments = ("generate", checkpoint, "--prompts-file", prompts)
    assert "input should be less than or equal to 16384" in archon(*arguments, "n_samples=1048576").complaint
    told = "200 prompts with n_samples = 16,000 are 3,200,000 answers; expected at most 262,144: divide the prompts"
    assert told in archon(*arguments, "n_samples=16000").complaint
    scored = ("eval", checkpoint, "--data", dataset, "--reward", "exact_match", "--out", tmp_path / "out")
    complaint = archon(*scored, "device=cpu", "reward_workers=1", "data.split=train", "n=16384").complaint
    assert complaint.endswith("divide the prompts") and not (tmp_path / "out").exists()


def test_port_in_use(archon, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward": 0.5}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in archon("report", tmp_path, "--serve", port).complaint


def test_resume_from_another_models_checkpoint(archon, checkpoint, sft_overrides, tmp_path):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    assert archon("sft", *sft_overrides, "total_steps=1").code == 0
    before = sorted(path.relative_to(tmp_path) for path in (tmp_path / "run" / "checkpoints").rglob("*"))
    change_config(checkpoint, num_hidden_layers=1, layer_types=["full_attention"])
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(checkpoint)).save_pretrained(checkpoint)
    complaint = archon("sft", *sft_overrides, "resume=true").complaint
    assert "written by another model: n_layers is 2 there and 1 here" in complaint
    assert before == sorted(path.relative_to(tmp_path) for path in (tmp_path / "run" / "checkpoints").rglob("*"))
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]


def test_a_run_is_not_overwritten(archon, sft_overrides, tmp_path):
    assert archon("sft", *sft_overrides, "total_steps=1").code == 0
    records = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "already holds a run" in archon("sft", *sft_overrides).complaint
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == records


def test_an_unexpected_error_keeps_its_traceback(checkpoint, monkeypatch):
    def broken(*_):
        raise RuntimeError("a defect of archon")

    monkeypatch.setattr("archon.tools.planner.inspection.inspect_checkpoint", broken)
    with pytest.raises(RuntimeError, match="a defect of archon"):
        main(["inspect", str(checkpoint)])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "x", "port=8765"], "port is not a key of the configuration, but an option: --port 8765"),
        (["serve", "x", "log_requests=true"], "an option: --log-requests"),
        (["generate", "x", "--temperature", "0.7"], "a key of the configuration: temperature=VALUE"),
        (["generate", "x", "--max-new-tokens=5"], "a key of the configuration: max_new_tokens=VALUE"),
        (["rl", "--actor.optimizer.lr", "1"], "a key of the configuration: actor.optimizer.lr=VALUE"),
        (["sft", "dry_run=true"], "an option: --dry-run"),
    ],
)
def test_an_option_written_as_a_key_and_a_key_written_as_an_option_name_the_spelling(archon, arguments, told):
    complaint = archon(*arguments).complaint
    assert told in complaint and "\n" not in complaint.strip()


def test_a_value_of_an_option_is_no_key(archon, checkpoint):
    complaint = archon("serve", checkpoint, "--lora", "port=nowhere", "max_slots=0").complaint
    assert "max_slots: got 0" in complaint


@pytest.mark.parametrize(
    ("target", "relation"),
    [
        ("checkpoint", "is"),
        ("checkpoint/inside", "is inside"),
        ("link/inside", "is inside"),
        ("other/../checkpoint/inside", "is inside"),
        (".", "contains"),
    ],
)
def test_an_output_that_overlaps_an_input_is_refused(archon, checkpoint, sft_overrides, tmp_path, target, relation):
    (tmp_path / "link").symlink_to(checkpoint)
    (tmp_path / "other").mkdir()
    before = sorted(checkpoint.rglob("*"))
    complaint = archon("convert", checkpoint, f"{tmp_path}/{target}", "--to", "native").complaint
    overlap = rf"output \S+ {relation} input {checkpoint}; choose another folder"
    assert re.search(overlap if relation == "is inside" else "expected a new folder", complaint)
    arguments = ["eval", checkpoint, "--data", "arithmetic", "--reward", "exact_match", "--out", f"{tmp_path}/{target}"]
    if relation == "is inside":  # folders that are not empty have another message
        assert f"{relation} input" in archon(*arguments).complaint
    if relation != "contains":  # a run may be next to its model in one folder
        for dry_run in ([], ["--dry-run"]):
            run = archon("sft", *sft_overrides, f"run_dir={tmp_path}/{target}", *dry_run)
            assert f"{relation} input {checkpoint}" in run.complaint
    assert sorted(checkpoint.rglob("*")) == before


def test_a_run_does_not_export_over_its_model(archon, checkpoint, sft_overrides, tmp_path):
    (tmp_path / "run").mkdir()
    export = checkpoint.rename(tmp_path / "run" / "export")
    overrides = [*sft_overrides, f"model.path={export}"]
    assert f"run/export is input {export}" in archon("sft", *overrides).complaint


@pytest.mark.parametrize("option", ["--output", "--calibrate"])
def test_a_plan_replaces_only_yaml_files(archon, checkpoint, dataset, tmp_path, option):
    (tmp_path / "pipe.yaml").touch()
    for target, reason in ((dataset, "is not a .yaml file"), (checkpoint / "plan.yaml", "is inside input")):
        assert reason in archon("plan", checkpoint, "--gpus", "1", "--seq", "32", option, target).complaint
    assert dataset.read_text().startswith("{")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["check-model", ""], "the value of an argument is empty"),
        (["inspect", ""], "the value of an argument is empty"),
        (["convert", "a", "", "--to", "hf"], "the value of an argument is empty"),
        (["report", "x", "--out", ""], "the value of option --out is empty"),
        (["report", "x", "--out="], "the value of option --out is empty"),
        (["sft", "--config", ""], "the value of option --config is empty"),
    ],
)
def test_an_empty_argument_is_refused(archon, arguments, told):
    assert told in archon(*arguments).complaint


@pytest.mark.parametrize(
    "key", ["run_dir", "model.path", "tokenizer", "train_data.path", "bootstrap", "model.lora.path"]
)
@pytest.mark.parametrize("value", ["", "a\0b"])
def test_an_empty_path_or_one_with_nul_is_refused(archon, sft_overrides, key, value, tmp_path):
    values: object = value
    for name in reversed(key.split(".")):
        values = {name: values}
    file = tmp_path / "paths.yaml"
    file.write_text(json.dumps(values))
    overrides = [override for override in sft_overrides if not override.startswith(f"{key}=")]
    complaint = archon("sft", "--config", file, *overrides).complaint
    assert f"{key}: " in complaint and "expected the name of a file" in complaint


def test_a_simulated_rank_has_no_stall(archon, checkpoint):
    arguments = [checkpoint, "--layout", "d2", "--rank", "0", "--tokens", "64", "--stall-seconds", "5"]
    assert "--rank simulates one" in archon("doctor", *arguments).complaint


def test_a_long_value_is_cut_in_its_message(archon):
    long = "9" * 5000
    for arguments in (["inspect", long], ["inspect", "x", "--lora", long], ["plan", long]):
        assert 100 < len(archon(*arguments).complaint) < 700
    usage = archon("plan", "x", "--dtype", long)
    assert (usage.code, len(usage.err.splitlines())) == (2, 4) and len(usage.err) < 700


def test_a_launch_on_several_hosts_needs_a_place_to_meet(archon):
    complaint = archon("launch", "--nnodes", 2, "sft").complaint
    assert "several hosts need --rdzv-endpoint HOST:PORT and --rdzv-id ID" in complaint
