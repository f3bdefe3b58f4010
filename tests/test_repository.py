"""The repository: links, dependencies, import cycles, the commit-message hook, and no silent skips."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.warm import run_code

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# flash-attn, flash-attn-4 and fla need CUDA; they, W&B and Trackio are tested with stand-ins. constraints.txt pins what
# has run.
UNTESTED_EXTRAS = {"fla", "flash", "flash-attn-4", "trackio", "wandb"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("package", ["models", "parallel", "rl"])
def test_packages_are_relative_links(package):
    link = ROOT / "archon" / package
    assert link.is_symlink() and link.readlink() == Path("..") / package


@pytest.mark.parametrize("package", ["models", "parallel", "rl"])
def test_a_package_refuses_another_import_name(package):
    done = subprocess.run([sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and f"archon.{package}" in done.stderr.splitlines()[-1]


def test_every_dependency_that_is_tested_is_pinned():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[normal(name)] = version
    extras = PROJECT["optional-dependencies"]
    requirements = PROJECT["dependencies"] + [r for extra in extras.keys() - UNTESTED_EXTRAS for r in extras[extra]]
    names = {normal(re.split(r"[<>=~!\[ ]", requirement)[0]) for requirement in requirements}
    assert names <= pins.keys(), sorted(names - pins.keys())
    assert "+" not in pins["torch"], "the variant of torch is the machine's, not the constraint's"


def test_a_bare_import_is_light():
    code = "import sys, archon, archon.cli; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if not (ROOT / name).is_symlink() and (ROOT / name).is_file()]


def test_no_import_cycle_in_product_or_benchmarks():
    imports = grimp.build_graph("archon", "benchmarks")
    order = TopologicalSorter({m: imports.find_modules_directly_imported_by(m) for m in imports.modules})
    assert set(order.static_order()) == imports.modules  # a cycle raises CycleError, which names it


# From the lowest to the highest.
PACKAGES = ["schema", "parallel", "models", "checkpoint", "engine", "data", "generation", "remote", "training", "serve"]
PACKAGES += ["rl", "tools", "cli"]


def test_archon_holds_the_packages_of_the_design():
    modules = sorted(path.name for path in (ROOT / "archon").glob("*.py"))
    packages = sorted(path.parent.name for path in (ROOT / "archon").glob("*/__init__.py"))
    assert (modules, packages) == (["__init__.py", "__main__.py"], sorted(PACKAGES))


def test_no_package_registry_is_named():
    hosts = re.compile("|".join(["py" + r"pi\.org", "python" + "hosted", r"download\.py" + "torch"]))
    named = [str(path) for path in tracked_files() if hosts.search(path.read_text(encoding="utf-8", errors="ignore"))]
    assert named == []


GOOD = [
    "feat(rl): skip groups without spread\n\nThey add nothing to the gradient.",
    "fix: say which key is missing\n\nThe error named none.",
    "refactor(engine): one place for the denominator",
    "perf(models)!: keep decode weights transposed\n\nA decode step reads each weight once.\n",
    "# a comment of git\nci(ci): print the time of each phase",
    "style: sort the imports",
    "gov: say who decides",
    "refactor(checkpoint): one reader",  # a folder of archon/
    "docs(compat): the names of a guide",  # a folder of rl/
    "Merge branch 'layouts'",
]
BAD = {
    "": "empty",
    "improve things": "`type(scope)",
    "feat(rollout): more": "unknown scope 'rollout'",
    "feature(rl): more": "unknown type 'feature'",
    "feat(rl): more.": "full stop",
    "feat(rl): " + "x" * 100: "110 characters",
    "feat(rl): more\nwithout a gap": "empty line",
    "feat(rl): more": "needs a body",
    "fix: say which key is missing\n\n\n": "needs a body",
    "perf(models): faster\n\n# a comment of git": "needs a body",
}


def commit_message_hook(message, tmp_path):
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(message)
    hook = ROOT / ".ci" / "check_commit_message.py"
    return subprocess.run([sys.executable, hook, file], capture_output=True, text=True)


@pytest.mark.parametrize("message", GOOD)
def test_the_commit_hook_accepts(message, tmp_path):
    assert commit_message_hook(message, tmp_path).returncode == 0


@pytest.mark.parametrize("message", BAD)
def test_the_commit_hook_refuses(message, tmp_path):
    done = commit_message_hook(message, tmp_path)
    assert done.returncode == 1 and BAD[message] in done.stderr


@pytest.mark.parametrize(
    ("subject", "paths", "expected"),
    [
        ("style: sort the imports", ["rl/a.py"], "style(rl): sort the imports"),
        (
            "refactor!: one reader",
            ["archon/checkpoint/a.py", "tests/a.py", "README.md"],
            "refactor(checkpoint)!: one reader",
        ),
        ("test: one more", ["tests/rl/a.py"], "test(tests): one more"),
        ("test: one more", ["tests/a.py", "benchmarks/a.py"], "test(bench): one more"),
        ("refactor: one reader", ["rl/a.py", "models/a.py"], "refactor: one reader"),
        ("docs: a page", ["README.md"], "docs: a page"),
        ("build: a release", ["pyproject.toml"], "build: a release"),
        ("gov(rl): who decides", ["models/a.py"], "gov(rl): who decides"),
        ("style: sort", [], "style: sort"),
    ],
)
def test_the_commit_hook_infers_a_missing_scope_from_staged_paths(subject, paths, expected, tmp_path):
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("config", "user.name", "a")
    git("config", "user.email", "a")
    hook = tmp_path / ".git" / "hooks" / "commit-msg"
    hook.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{ROOT}/.ci/check_commit_message.py' \"$1\"\n")
    hook.chmod(0o755)
    for path in ["untracked.py", *paths]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    for path in paths:
        git("add", path)
    git("commit", "-q", "--allow-empty", "-m", subject)
    assert git("log", "-1", "--format=%B").strip() == expected


SKIPS = """
import pytest
@pytest.mark.skip(reason="later")
def test_marked(): pass
def test_called(): pytest.skip("no network")
@pytest.mark.gpu
def test_gpu(): pass
def test_other(): assert True
"""
NEEDY = """
import pytest
@pytest.mark.gpu
def test_gpu(): pass
@pytest.mark.data
def test_data(data_dir): pass
"""


def run_tests(tmp_path, body, *arguments, ci=None):
    """Run `body` under this suite's conftest, in a folder without data and on no GPU."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  data\n")
    (tmp_path / "test_sample.py").write_text(body)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('a_module_nobody_has')\n")
    unsampled = {"ARCHON_SAMPLE": None, "ARCHON_SAMPLE_FUNCTIONS": None}
    changed = {"CI": ci, "ARCHON_DATA": None, "CUDA_VISIBLE_DEVICES": ""} | unsampled
    environment = {name: value for name, value in (os.environ | changed).items() if value is not None}
    command = ["-q", "-p", "no:cacheprovider", *arguments]
    return run_code(f"import pytest, sys; sys.exit(pytest.main({command}))", environment=environment, cwd=tmp_path)


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "1"), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_any_other_skip_fails_the_run(workers, tmp_path):
    done = run_tests(tmp_path, SKIPS, *workers)
    assert done.returncode == 1, done.stdout
    blamed = done.stdout.split("skipped, which only `gpu`, `data` and `real` tests may be")[1].split(
        "short test summary"
    )[0]
    assert all(reason in blamed for reason in ("later", "no network", "a_module_nobody_has")), blamed
    assert "test_gpu" not in blamed


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "code"), [(None, 0), ("true", 1)])
def test_data_tests_may_be_skipped_where_there_is_none_but_not_in_ci(tmp_path, ci, code):
    done = run_tests(tmp_path, NEEDY, "test_sample.py", ci=ci)
    assert done.returncode == code and "2 skipped" in done.stdout, done.stdout


VLLM_EXTENSION = "archon.serve.vllm_extension.Extension"  # an argument for vLLM's process


def test_no_string_names_a_module_of_a_package_above():
    """A dotted path in a string would be an import that import-linter does not see."""
    level = {name: i for i, name in enumerate(PACKAGES)} | {"generation": PACKAGES.index("data")}
    wrong = []
    for file in tracked_files():
        package, *inner = file.relative_to(ROOT).with_suffix("").parts
        if package == "archon":
            package, *inner = inner or ["archon"]
        if file.suffix != ".py" or package not in level:
            continue
        tree = ast.parse(file.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        in_core = package == "rl" and inner[0] not in ("compat", "__init__")
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in prose:
                continue
            path = "" if " " in node.value or node.value == VLLM_EXTENSION else node.value  # sentences import nothing
            for above in re.findall(r"\barchon\.([a-z_]+)", path):
                if level.get(above, -1) > level[package]:
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} names archon.{above}")
            if in_core and re.search(r"\bcompat\.(areal|trinity)\b|\barchon\.rl\.compat\b", node.value):
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} names rl/compat")
    assert not wrong, wrong
