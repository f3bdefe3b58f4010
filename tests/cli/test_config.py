"""From a file and overrides to a typed configuration, and from the type to its table in `--help`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from archon.cli.config import field_lines, import_schema, leaves, load_config
from archon.cli.config_leaves import SCHEMAS, count, main
from archon.rl.algorithms.config import AlgorithmConfig
from archon.schema.config import (
    EXPANDED,
    RELATIVE_TO_CONFIG,
    EngineConfig,
    OptimizerConfig,
    StrictModel,
    merge_sections,
)
from archon.schema.errors import ConfigError


class Small(StrictModel):
    """A configuration with one of everything."""

    name: str = Field(description="what it is called")
    steps: int = Field(3, ge=1, description="optimizer steps")
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=0.5), description="AdamW")
    reference: OptimizerConfig | None = Field(None, description="another")
    tags: list[str] = Field(default_factory=list, description="labels")


def write(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_overrides_lie_over_the_file(tmp_path):
    file = write(tmp_path, "name: a\nsteps: 7\noptimizer:\n  lr: 1e-4\n  beta2: 0.9\n")
    config = load_config(Small, file, ["optimizer.lr=5e-5", "tags=[x,y]"])
    assert (config.name, config.steps, config.optimizer.lr, config.optimizer.beta2) == ("a", 7, 5e-5, 0.9)
    assert config.tags == ["x", "y"]


@pytest.mark.parametrize(
    "text",
    ["runs/a #1", "#1", "größe 日本", "*.jsonl", "@x", "first\nsecond", " ", "two  spaces ", "a\\b", "C#", "a, b"],
)
def test_text_in_an_override_is_kept_as_typed(text):
    assert load_config(Small, None, [f"name={text}"]).name == text


def test_values_of_other_kinds_in_an_override_are_yaml():
    config = load_config(Small, None, ["name='a #1' # note", "steps= 4", "optimizer={lr: 1e-4}", "tags=[a b, 'c #d']"])
    assert (config.name, config.steps, config.optimizer.lr, config.tags) == ("a #1", 4, 1e-4, ["a b", "c #d"])


class WithPaths(StrictModel):
    """A configuration with paths, and with text that is none."""

    folder: Annotated[str, EXPANDED] = "here"
    recipe: Annotated[str | None, RELATIVE_TO_CONFIG] = None
    file: Annotated[Path | None, EXPANDED] = None
    text: str = "~/$HOME"


def test_home_and_environment_variables_are_replaced_in_paths_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NAME", "mein Größe")
    file = write(tmp_path, "folder: ~/runs/$NAME\nrecipe: ~/x.yaml\n")
    config = load_config(WithPaths, file, ["file=$NAME.txt", "text=~/$NAME"])
    assert config.folder == f"{tmp_path}/runs/mein Größe"
    assert config.file == Path("mein Größe.txt")
    assert config.recipe == f"{tmp_path}/x.yaml"
    assert config.text == "~/$NAME"
    for path, complaint in [("$NO_SUCH/x", r"variable \$NO_SUCH is not set"), ("~nobody-here/x", "no such user")]:
        with pytest.raises(ConfigError, match=complaint):
            load_config(WithPaths, None, [f"folder={path}"])
    with pytest.raises(ConfigError, match=r"\$\{oc.env:NAME\}, or \$NAME in a path"):
        load_config(WithPaths, None, ["folder=${HOME}/x"])


def test_values_are_laid_over_others_section_by_section():
    values = {"pipeline": {"schedule": "zbv", "stages": 2}, "dtype": "float32", "tags": [1]}
    over = {"pipeline": {"stages": 4}, "tags": [2], "dtype": {"x": 1}}
    expected = {"pipeline": {"schedule": "zbv", "stages": 4}, "dtype": {"x": 1}, "tags": [2]}
    assert merge_sections(values, over) == expected


def test_environment_and_other_keys_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_NAME", "spring")
    file = write(tmp_path, "name: ${oc.env:RUN_NAME}-${steps}\nsteps: 9\n")
    assert load_config(Small, file, []).name == "spring-9"


def test_the_time_of_the_start_can_be_named(tmp_path):
    assert load_config(Small, write(tmp_path, "name: run-${now:%Y}\n"), []).name.startswith("run-2")


def test_a_key_may_stand_in_brackets():
    assert load_config(Small, None, ["[name]=b", "optimizer[lr]=2"]).optimizer.lr == 2


@pytest.mark.parametrize(
    ("text", "overrides", "complaint"),
    [
        ("name: a\nstep: 4\n", [], "unknown key 'step', did you mean 'steps'?"),
        ("name: a\noptimizer: {learning_rate: 1}\n", [], "optimizer: unknown key 'learning_rate'"),
        ("name: a\n", ["optimizer.lrr=1"], "optimizer: unknown key 'lrr', did you mean 'lr'?"),
        ("name: a\nsteps: many\n", [], "steps: got 'many', input should be a valid integer"),
        ("name: a\n", ["optimizer.lr=-1"], "optimizer.lr: got -1, input should be greater than 0"),
        ("steps: 4\n", [], "name: "),
        ("name: a\n  steps: 4\n", [], "not YAML: mapping values are not allowed in this context in line 2"),
        ("- name\n", [], "a list; expected a mapping"),
        ("5\n", [], "a single value; expected a mapping"),
        (".nan\n", [], "a single value; expected a mapping"),
        ("name: " + "[" * 4000 + "]" * 4000, [], "nested too deeply"),
        ("\n".join(" " * depth + "a:" for depth in range(3000)), [], "nested too deeply"),
        ("steps: " + "1" * 5000, [], "a value cannot be read: Exceeds the limit (4300 digits)"),
        ("steps: -0x" + "f" * 5000, [], "steps: got a number of thousands of digits"),
        ("steps: 1.5" + "1" * 5000, [], "steps: got 1.5"),
        ("name: a\n", ["steps=" + "1" * 5000], "Exceeds the limit (4300 digits)"),
        ("name: a\n", ["steps=" + "[" * 4000 + "]" * 4000], "nested too deeply"),
        ("name: a\n", [".".join("a" * 3000) + "=1"], "nested too deeply"),
        ("tags: [a]\n", ["tags.x=1"], "tags is a list, but an override sets it to a mapping"),
        ("optimizer: {lr: 1}\n", ["optimizer=[1]"], "optimizer is a mapping, but an override sets it to a list"),
        ("name: a\n", ["tags=[a]", "tags.x=1"], "override 'tags.x=1' cannot be read or merged"),
        ("name: a\n", ["optimizer..lr=1"], "override 'optimizer..lr=1' is not key=value"),
        ("name: a\n", [".steps=1"], "override '.steps=1' is not key=value"),
        ("name: a\n", ["steps.=1"], "override 'steps.=1' is not key=value"),
        ("name: a\n", ["optimizer[lr=1"], "override 'optimizer[lr=1' is not key=value"),
        ("name: a\n", ["steps.a=1"], "steps: got {'a': 1}, input should be a valid integer"),
        ("name: ${oc.env:NOBODY_SET_THIS}\n", [], "Environment variable 'NOBODY_SET_THIS' not found"),
        ("name: ${nowhere}\n", [], "nowhere"),
        ("name: a\n", ["steps"], "override 'steps' is not key=value"),
        ("name: a\n", ["steps=[1"], "override 'steps=[1' is not YAML"),
        ("name: a\n", ["optimizer.lr=.inf"], "optimizer.lr: got inf, input should be a finite number"),
        ("name: a\n", ["steps=true"], "steps: got true, expected a number"),
        ("name: a\noptimizer: {lr: true}\n", [], "optimizer: lr: got true, expected a number"),
        ("name: a\n", ["optimizer.lr=inf"], "optimizer.lr: got 'inf', input should be a finite number"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(tmp_path, text, overrides, complaint):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(Small, file, overrides)
    assert complaint in str(error.value) and "\n" not in str(error.value)
    assert str(file) in str(error.value) or overrides


def test_help_shows_every_field_with_its_default_and_meaning():
    table = list(field_lines(Small))
    assert table[:4] == [
        "  name (required)",
        "      [text] what it is called",
        "  steps = 3",
        "      [integer, >= 1] optimizer steps",
    ]
    assert "  optimizer.lr = 0.5" in table, "the default of the whole comes before the part's own"
    assert "  reference = null" in table and "  reference.lr = 1e-05" not in table
    assert table[-2:] == ["\nreference, if set:", "  same fields as optimizer"]
    assert {"name", "reference", "tags"} <= set(leaves(Small)) and "reference.lr" not in leaves(Small)
    assert "  tags = []" in table


@pytest.mark.parametrize(("command", "most"), [("rl", 192), ("sft", 91), ("preference", 91), ("bootstrap", 62)])
def test_a_configuration_has_at_most_so_many_leaves(command, most):
    assert count(command) <= most


def test_the_leaves_of_every_command_are_counted_by_section(capsys):
    main()
    counted = dict(line.split(maxsplit=2)[:2] for line in capsys.readouterr().out.splitlines())
    assert counted == {command: str(count(command)) for command in SCHEMAS}


def test_help_shows_each_choice_and_the_settings_of_all():
    table = list(field_lines(AlgorithmConfig))
    shown = dict(zip(table[::2], table[1::2], strict=True))
    assert shown["  policy_loss = ppo"].startswith("      [ppo | decoupled | gspo | ")
    assert "(kind gspo)" in shown["  policy_loss.clip_low = 0.0003"]
    assert "(kind tis or sequence_tis)" in table[table.index("  correction.max_ratio = 2.0") + 1]


def test_settings_in_an_override_are_laid_over_a_method_that_the_file_names_alone(tmp_path):
    file = write(tmp_path, "policy_loss: cispo\nkl: {coef: 0.0}\n")
    found = load_config(AlgorithmConfig, file, ["policy_loss.clip_high=2.0"]).policy_loss
    assert found.model_dump() == {"kind": "cispo", "clip_low": 1.0, "clip_high": 2.0}
    assert load_config(AlgorithmConfig, file, ["policy_loss=gspo"]).policy_loss.kind == "gspo"


@pytest.mark.parametrize("schema", [EngineConfig, *map(import_schema, SCHEMAS.values())])
def test_every_field_is_described(schema):
    lines = list(field_lines(schema))
    table = [line for line in lines if not line.startswith(("\n", "  same fields as "))]
    for key, text in zip(table[::2], table[1::2], strict=True):
        assert text.strip().rpartition("]")[2].strip(), f"{key.strip()} has no description"


@pytest.mark.parametrize(
    ("given", "meant"), [("fp32", ", did you mean 'float32'?"), ("bf16", ", did you mean 'bfloat16'?"), ("int3", "")]
)
def test_a_value_of_no_list_is_one_line_with_the_nearest_that_is(given, meant):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(path="model", dtype=given)
    expected = f"EngineConfig: dtype: got {given!r}, input should be 'float32', 'bfloat16' or 'float64'{meant}"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft", "run_dir=r", "model.optimizers.lr=1"], "unknown key 'optimizers', did you mean 'optimizer'?"),
        (["sft", "run_dir=r", "batch_size=many"], "batch_size: got 'many'"),
        (["preference", "run_dir=r", "loss=dop"], "did you mean 'dpo'?"),
        (["bootstrap", "pth=start"], "unknown key 'pth', did you mean 'path'?"),
    ],
)
def test_errors_of_a_configuration_need_no_pytorch(tmp_path: Path, arguments: list[str], message: str) -> None:
    command = "import sys; sys.modules['torch'] = None; from archon.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2 and message in run.stderr and run.stderr.count("\n") == 1
