"""Released models by name: their model type is that of transformers' documentation, and the page lists them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from archon.cli import main
from archon.models.released import find_models, released_models
from archon.models.spec import FAMILIES, get_model_spec

MODELS = Path(transformers.__file__).parent / "models"
NOT_COMPARED = {"mistralai/Ministral-3-8B-Base-2512"}
"""transformers names it for the text part, `ministral3`; the checkpoint is composite."""


def documented() -> dict[str, set[str]]:
    """The model types that transformers' configurations name for each hub id."""
    found: dict[str, set[str]] = {}
    for path in MODELS.glob("*/configuration_*.py"):
        text = path.read_text(encoding="utf-8")
        names = set(re.findall(r'auto_docstring\(checkpoint="([^"]+)"', text)) - NOT_COMPARED
        types = set(re.findall(r'model_type\s*(?::\s*str)?\s*=\s*"([^"]+)"', text))
        for name in names:
            found.setdefault(name, set()).update(types)
    return found


def test_transformers_names_the_same_model_type() -> None:
    known = documented()
    compared = [model for model in released_models() if model.name in known]
    assert len(compared) >= 20
    assert [model for model in compared if model.model_type not in known[model.name]] == []


def test_names_are_unique_and_sorted() -> None:
    names = [model.name for model in released_models()]
    assert names == sorted(set(names), key=str.lower)
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in names)


def test_every_supported_type_of_a_checkpoint_has_a_released_model() -> None:
    types = {model_type for name in FAMILIES for model_type in get_model_spec(name).supported_model_types}
    text_parts = {name for name in types if name.endswith("_text") and name != "gemma3_text"} | {"ministral3"}
    assert types - text_parts - {model.model_type for model in released_models()} == set()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Qwen3.8", "Qwen/Qwen3.8-27B"),
        ("qwen 3.6 35b", "Qwen/Qwen3.6-35B-A3B"),
        ("DeepSeek-V3.2", "a learned indexer selects the tokens of its attention; the nearest supported family is"),
        (
            "Muse-Glimmer",
            "the norms of its embeddings, queries and keys have no weights, and a matrix of its own gates",
        ),
        ("qwen3_5_text", "qwen3_5_text: a supported model_type"),
    ],
)
def test_a_user_finds_a_model(name: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["models", name])
    assert not left.value.code
    assert line in capsys.readouterr().out


def test_an_unknown_name_says_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["models", "GPT-7"])
    assert left.value.code == 2
    assert "no known model has 'GPT-7' in its name; look up model_type" in capsys.readouterr().err


def test_punctuation_counts_if_it_finds_a_model() -> None:
    assert [model.name for model in find_models("qwen3.8")] == ["Qwen/Qwen3.8-27B"]
