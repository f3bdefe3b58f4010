"""The registry of families, and the one name under which the zoo is imported."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.models import get_model_spec, get_supported_model_types, is_supported_model, register_model_spec, spec
from archon.models.layers.linear import Linear
from archon.models.qwen2 import parallelize_qwen2
from archon.models.qwen3 import SPEC, Qwen3Model, parallelize_qwen3
from archon.schema.errors import UnknownModelError, UserError
from archon.tools.check.oracle import random_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> spec._Registry:
    fresh = spec._Registry()
    monkeypatch.setattr(spec, "_REGISTRY", fresh)
    return fresh


def test_families_are_known_by_their_model_types() -> None:
    assert {"llama", "mistral", "qwen2", "qwen3"} <= get_supported_model_types()
    assert get_model_spec("qwen3") is SPEC
    assert is_supported_model("qwen2")
    assert not is_supported_model("gpt2")


def test_a_thread_that_asks_while_another_reads_the_families_waits(
    registry: spec._Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(**_: object) -> list[object]:
        time.sleep(0.2)
        return []

    monkeypatch.setattr(metadata, "entry_points", slow)
    add = registry.add
    monkeypatch.setattr(registry, "add", lambda specs: (time.sleep(0.1), add(specs)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: "qwen3" in registry.specs(), range(4)))
    assert found == [True] * 4


@pytest.mark.slow
def test_mypy_accepts_model_classes_as_annotations(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,numpy.*,pydantic.*]\nfollow_imports = skip\n")
    (tmp_path / "use.py").write_text(
        "from archon.models.llama import LlamaModelArgs\n"
        "from archon.models.qwen3 import Qwen3Model\n"
        "def dim(model: Qwen3Model) -> int:\n"
        "    return model.args.dim\n"
        "def wrong(args: LlamaModelArgs) -> Qwen3Model:\n"
        "    return Qwen3Model(args)\n"
    )
    options = ["--config-file", "mypy.ini", "--follow-imports", "silent", "--cache-dir", "cache", "use.py"]
    command = [sys.executable, "-m", "mypy", *options]
    run = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    errors = [line.partition(" has ")[0] for line in run.stdout.splitlines() if " error: " in line]
    assert errors == ['use.py:6: error: Argument 1 to "BaseArchonModel"'], run.stdout + run.stderr


@pytest.mark.usefixtures("registry")
def test_an_unknown_model_names_what_is_available() -> None:
    with pytest.raises(
        UnknownModelError, match=f"'gpt2' is not supported; .* are {', '.join(sorted(get_supported_model_types()))} "
    ) as error:
        get_model_spec("gpt2")
    assert isinstance(error.value, KeyError)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, UserError)


@pytest.mark.parametrize("value", [[], {}, None, 3, ["qwen3"]], ids=str)
def test_what_is_no_string_is_one_clear_error(value: Any) -> None:
    with pytest.raises(UnknownModelError, match=rf"model_type is {re.escape(repr(value))}; expected a string"):
        get_model_spec(value)
    assert not is_supported_model(value)


@pytest.mark.usefixtures("registry")
def test_a_second_claim_to_a_model_type_is_refused() -> None:
    mine = dataclasses.replace(SPEC, name="mine", supported_model_types=frozenset({"mine", "qwen3"}))
    with pytest.raises(ValueError, match="'mine' registers model_type 'qwen3', which family 'qwen3' has already"):
        register_model_spec(mine)
    assert not is_supported_model("mine"), "a refused spec leaves no trace"
    register_model_spec(dataclasses.replace(mine, supported_model_types=frozenset({"mine"})))
    assert get_model_spec("mine").name == "mine"


@pytest.mark.usefixtures("registry")
def test_other_packages_join_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dataclasses.replace(SPEC, name="mine", supported_model_types=frozenset({"mine"}))

    class Entry:
        def load(self) -> object:
            return mine

    asked = []
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: asked.append(group) or [Entry()])
    assert get_model_spec("mine") is mine
    assert asked == ["archon.models"]


def test_the_zoo_refuses_another_name() -> None:
    result = subprocess.run([sys.executable, "-c", "import models"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "import it as `archon.models`" in result.stderr


def test_listing_the_zoo_is_light() -> None:
    code = "import sys, archon.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("function", [parallelize_qwen2, parallelize_qwen3])
def test_parallelize_functions_have_the_contracts_signature(function: object) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: p.default for name, p in parameters.items() if p.default is not p.empty} == {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "loss_parallel": True,
        "cpu_offload": False,
        "reshard_after_forward_policy": "default",
        "ac_config": None,
        "enable_compile": "auto",
        "fp8": "none",
        "fp8_blocks": None,
    }
    assert list(parameters)[:2] == ["model", "parallel_dims"]


def test_every_weight_belongs_to_a_module_with_a_role_in_the_plan() -> None:
    from archon.models.spec import DENSE_TP_PLAN

    for is_critic in (False, True):
        model = Qwen3Model(SPEC.model_args_class.from_hf_config(random_config(1, "qwen3"), is_critic=is_critic))
        for name, _ in model.named_parameters():
            assert model.get_submodule(name.rpartition(".")[0]).role in DENSE_TP_PLAN, name
    assert Linear(2, 3, bias=False, role="row").role == "row"


@pytest.mark.parametrize("family", spec.FAMILIES)
def test_a_family_is_one_short_file(family: str) -> None:
    text = (ROOT / "models" / f"{family}.py").read_text()
    assert len(text.splitlines()) <= 90
