"""Families of other packages, as an installer leaves them: a module and a dist-info folder with an entry point."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from archon.models.spec import FAMILIES, VISION_FAMILIES
from tests.warm import run_code

BUILT_IN = [
    model_type
    for family in (*FAMILIES, *VISION_FAMILIES)
    for model_type in importlib.import_module(f"archon.models.{family}").SPEC.supported_model_types
]
FAMILY = """\
import dataclasses
from archon.models.qwen3 import SPEC as QWEN3

SPEC = dataclasses.replace(QWEN3, name={name!r}, supported_model_types=frozenset({types!r}))
"""


def install(site: Path, package: str, source: str, value: str = "SPEC") -> None:
    """A package of one module whose entry point has its name."""
    (site / f"{package}.py").write_text(source)
    info = site / f"{package}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[archon.models]\n{package} = {package}:{value}\n")


def family(name: str, *types: str) -> str:
    return FAMILY.format(name=name, types=types)


def list_then_ask(site: Path, folder: Path, model_type: str) -> tuple[list[str], list[str], str]:
    """What `archon models` lists and warns of, and what `archon inspect` of such a checkpoint then says, in one
    process."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    done = run_code(
        "import sys\n"
        "from archon.cli import main\n"
        "try:\n"
        "    main(['models'])\n"
        "except SystemExit as left:\n"
        "    assert not left.code, left.code\n"
        "sys.stderr.write('---\\n')\n"
        f"main(['inspect', {str(folder)!r}])\n",
        path=[site],
    )
    warned, _, complaint = done.stderr.partition("---\n")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    [line] = complaint.splitlines()
    listed = [row.split()[0] for row in done.stdout.splitlines() if "archon.models" in row]
    return listed, warned.splitlines(), line


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where packages are installed: one that works is there."""
    folder = tmp_path / "site"
    folder.mkdir()
    install(folder, "goodfamily", family("good", "good"))
    return folder


@pytest.mark.parametrize(
    ("source", "value", "reason"),
    [
        ("import no_such_module", "SPEC", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def broken(:", "SPEC", "SyntaxError: invalid syntax (badfamily.py, line 1)"),
        ("raise RuntimeError('two\\nlines')", "SPEC", "RuntimeError: two lines"),
        ("import sys; sys.exit(3)", "SPEC", "SystemExit: 3"),
        ("SPEC = 3", "SPEC", "TypeError: it is a int, expected a ModelSpec"),
        ("SPEC = 3", "OTHER", "AttributeError: module 'badfamily' has no attribute 'OTHER'"),
        (
            family("bad", "qwen3"),
            "SPEC",
            "ValueError: family 'bad' registers model_type 'qwen3', which family 'qwen3' has already",
        ),
    ],
    ids=["import", "syntax", "raises", "exits", "no spec", "no attribute", "built-in"],
)
def test_a_plugin_that_fails_is_one_warning_and_the_others_serve(
    site: Path, tmp_path: Path, source: str, value: str, reason: str
) -> None:
    install(site, "badfamily", source, value)
    named = f"the plugin 'badfamily' (entry point archon.models: badfamily:{value}) of package badfamily 1.5"
    line = f"{named} cannot be loaded and is left out: {reason}"
    listed, warned, complaint = list_then_ask(site, tmp_path, "badfamily")
    assert listed == sorted(["good", *BUILT_IN])
    assert len(warned) == 1 and warned[0].startswith(line)
    assert f"model_type 'badfamily' is not supported; supported are {', '.join(listed)}" in complaint
    assert line in complaint


def test_two_plugins_that_claim_one_model_type_are_both_named_and_neither_serves(site: Path, tmp_path: Path) -> None:
    install(site, "firstfamily", family("first", "twice", "first"))
    install(site, "secondfamily", family("second", "twice"))
    listed, warned, complaint = list_then_ask(site, tmp_path, "first")
    assert listed == sorted(["good", *BUILT_IN])
    assert len(warned) == 1 and warned[0].startswith("model_type 'twice' is claimed by the plugin ")
    assert "package firstfamily 1.5" in warned[0] and "package secondfamily 1.5" in warned[0]
    assert "model_type 'first' is not supported" in complaint and warned[0] in complaint


def test_a_family_may_be_registered_and_be_an_entry_point(site: Path) -> None:
    source = family("own", "own") + "from archon.models import register_model_spec\nregister_model_spec(SPEC)\n"
    install(site, "ownfamily", source)
    done = run_code("from archon.models import get_model_spec; print(get_model_spec('own').name)", path=[site])
    assert (done.returncode, done.stdout, done.stderr) == (0, "own\n", "")


def test_an_interrupted_look_at_the_plugins_is_begun_anew(site: Path) -> None:
    install(
        site,
        "slowfamily",
        "import pathlib\n"
        "seen = pathlib.Path(__file__).with_suffix('.seen')\n"
        "if not seen.exists():\n"
        "    seen.touch()\n"
        "    raise KeyboardInterrupt\n" + family("slow", "slow"),
    )
    code = (
        "from archon.models import is_supported_model\n"
        "try:\n"
        "    is_supported_model('slow')\n"
        "except KeyboardInterrupt:\n"
        "    print(is_supported_model('slow'), is_supported_model('good'), is_supported_model('qwen3'))\n"
    )
    done = run_code(code, path=[site])
    assert (done.returncode, done.stdout) == (0, "True True True\n"), done.stderr
