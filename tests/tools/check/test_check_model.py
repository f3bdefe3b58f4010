"""`archon check-model` passes a family of another package that keeps its contracts, and names a broken one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from archon.models.spec import FAMILIES
from archon.tools.check.card import read_card
from archon.tools.check.contracts import CONTRACTS, check_family
from archon.tools.check.decoding import NEW_TOKENS, check_decoding, prompts
from archon.tools.check.family import LINE_BUDGETS, load_families
from archon.tools.check.random_configs import draw_fields
from tests.warm import run_archon

# Llama's decoder with norms after each part as well, and scaled residuals, in a config of its own.
INVENTED = '''\
"""An invented family: Llama's decoder with a norm before and after each part."""

from dataclasses import dataclass
from typing import ClassVar

from archon.models.base import BaseArchonModel, BaseModelArgs
from archon.models.hf.config import NO_WINDOWS, Field, dense_fields
from archon.models.spec import DENSE_TP_PLAN, make_parallelize_fn
from archon.models.spec import family_spec
from archon.models.hf.names import DENSE_HF_MAP
from archon.models.hf.state_dict import BaseStateDictAdapter


@dataclass
class Args(BaseModelArgs):
    norm_placement: str = "both"

    model_types: ClassVar = frozenset({"invented"})
    hf_windows: ClassVar = NO_WINDOWS
    hf_fields: ClassVar = dense_fields(num_key_value_heads=0, max_position_embeddings=2048) | {
        "head_dim": Field("head_dim", int, 0, null=0),
        "residual_scale": Field("residual_multiplier", float, 1.0),
    }
    hf_examples: ClassVar = {"residual_scale": (0.5, 2.0)}


class Model(BaseArchonModel):
    args_class: ClassVar = Args


class Adapter(BaseStateDictAdapter):
    model_class = Model
    from_hf_map = DENSE_HF_MAP | {
        "model.layers.{}.attention_out_norm.weight": "layers.{}.attention_post_norm.weight",
        "model.layers.{}.mlp_out_norm.weight": "layers.{}.ffn_post_norm.weight",
    }


SPEC = family_spec("invented", Adapter, make_parallelize_fn(DENSE_TP_PLAN))
'''
# The same computation as Llama's, under another name.
RENAMED = '''\
"""Llama under another name."""

from dataclasses import dataclass
from typing import ClassVar

from archon.models import llama
from archon.models.hf.config import Field
from archon.models.spec import family_spec
from archon.models.hf.names import DENSE_HF_MAP


@dataclass
class Args(llama.LlamaModelArgs):
    model_types: ClassVar = frozenset({"renamed"})


class Model(llama.LlamaModel):
    args_class: ClassVar = Args


class Adapter(llama.LlamaStateDictAdapter):
    model_class = Model


SPEC = family_spec("renamed", Adapter, llama.parallelize_llama)
'''
# What a family may get wrong: (mistake, the class it is in, the line, the contract that is broken, what is said of it).
MISTAKES = [
    (
        "a field that is read and not used",
        "class Args(llama.LlamaModelArgs):\n",
        '    hf_fields: ClassVar = llama.LlamaModelArgs.hf_fields | {"rms_norm_eps": Field("", float, 1e-6)}\n',
        "config fields",
        "rms_norm_eps",
    ),
    (
        "keys and values exchanged",
        "class Adapter(llama.LlamaStateDictAdapter):\n",
        (
            "    from_hf_map = DENSE_HF_MAP | {\n"
            '        "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.wv.weight",\n'
            '        "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.wk.weight",\n'
            "    }\n"
        ),
        "parity",
        "differs",
    ),
    (
        "names that no checkpoint has",
        "class Adapter(llama.LlamaStateDictAdapter):\n",
        "    from_hf_map = {hf.replace('norm', 'scale'): native for hf, native in DENSE_HF_MAP.items()}\n",
        "round trip",
        "unknown key 'model.layers.0.input_layernorm.weight'",
    ),
    (
        "hidden states shifted over the boundaries of documents",
        "class Model(llama.LlamaModel):\n",
        (
            "    def hidden_states(self, inputs):\n"
            "        hidden = super().hidden_states(inputs)\n"
            "        return hidden + 0.1 * hidden.roll(1, 0)\n\n"
        ),
        "isolation",
        "document 2 changes by",
    ),
    (
        "a mixer that the cache does not know of",
        "class Model(llama.LlamaModel):\n",
        (
            "    def hidden_states(self, inputs):\n"
            "        hidden = super().hidden_states(inputs)\n"
            "        return hidden + hidden.cumsum(0)\n\n"
        ),
        "generation",
        "has the answer",
    ),
]


def check_model(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_archon("check-model", *arguments)


@pytest.mark.slow
def test_an_invented_family_outside_the_repository_passes_and_gets_a_card(tmp_path: Path) -> None:
    file = tmp_path / "invented.py"
    file.write_text(INVENTED)
    done = check_model(file, "--cards", tmp_path / "cards")
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_card(tmp_path / "cards" / "invented.md")
    assert list(found) == list(CONTRACTS)
    assert {name for name, (mark, _) in found.items() if mark == "–"} == {"parameters", "parity"}
    assert all(mark != "✗" for mark, _ in found.values())
    assert found["two ranks"][1] == "d2, t2, c2 allgather, c2 ulysses, p2"


@pytest.mark.slow
def test_a_family_under_another_name_is_compared_with_the_type_it_computes_as(tmp_path: Path) -> None:
    file = tmp_path / "renamed.py"
    file.write_text(RENAMED)
    done = check_model(file, "--reference", "llama", "--only", "parity", "--only", "config fields")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 2 and "over 6 configurations" in done.stdout


@pytest.mark.parametrize(("mistake", "where", "line", "contract", "said"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_planted_mistake_breaks_a_contract_that_is_named_in_one_line(
    tmp_path: Path, mistake: str, where: str, line: str, contract: str, said: str
) -> None:
    file = tmp_path / "renamed.py"
    assert where in RENAMED, mistake
    file.write_text(RENAMED.replace(where, where + line))
    done = check_model(file, "--reference", "llama", "--only", contract)
    assert done.returncode == 1, done.stdout + done.stderr
    [complaint] = [text for text in done.stderr.splitlines() if text.startswith("archon: ")]
    assert complaint.startswith(f"archon: renamed: {contract}: ") and said in complaint, complaint
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_type", "model_type 'no_such_type' is not supported"),
        ("no_such_file.py", "no_such_file.py is not a file"),
        ("archon.models.args.base", "does not define SPEC"),
    ],
)
def test_what_is_no_family_is_refused_in_one_line(target: str, said: str) -> None:
    done = check_model(target)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers(family: str) -> None:
    [checked] = load_families(family)
    answers = 2 * len(prompts(30))
    assert check_decoding(1, family, checked.reference, page_sizes=(3,)) == answers * NEW_TOKENS


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_to_its_lines(family: str) -> None:
    [checked] = load_families(family)
    assert checked.line_budget in LINE_BUDGETS and checked.lines <= checked.line_budget


def test_a_new_field_changes_no_other_draw() -> None:
    drawn, more = draw_fields(5, "qwen3"), draw_fields(5, "qwen3_moe")
    same = ("num_attention_heads", "head_dim", "hidden_size", "vocab_size", "rope_parameters", "attention_bias")
    assert [drawn[name] for name in same] == [more[name] for name in same]
    assert draw_fields(5, "qwen3", head_dim=32)["head_dim"] == 32


def test_a_family_whose_default_config_is_senseless_is_counted_by_a_drawn_one() -> None:
    """GLM-4.5's default in transformers rotates 21 of the 42 features of a head."""
    [checked] = load_families("glm4_moe")
    [finding] = check_family(checked, only=["parameters"])
    assert finding.passed and "with a random config (the default is rejected)" in finding.text
