"""Every symbol that the product uses of the libraries whose interfaces change: where, and called with what.

    python -m tests.dependency_catalog            writes tests/dependency_catalog.json anew
    python -m tests.dependency_catalog --check    says which symbols the installed versions lack or call differently

The catalog is read off the syntax trees: imports, attributes of what was imported, and methods of parameters annotated
with an imported class. What is reached through other values is not seen. A symbol exists if the installed package has
it; a call agrees if its arguments bind to the signature of a function or class, or to one in the type stubs that
torch installs for what it defines in C++. Needs nothing but the standard library and the packages themselves.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CATALOG = Path(__file__).with_suffix(".json")
ROOMS = ("archon", "models", "parallel", "rl")
# The top-level module of each library, and the package that installs it.
LIBRARIES = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "flash_attn": "flash-attn",
    "fla": "flash-linear-attention",
    "torchao": "torchao",
    "megatron": "megatron-core",
}
ANY_ATTRIBUTE = {"torch.nn.Module"}
# A parameter annotated with a class may be one of its subclass.
SUBCLASS = {"torch.Tensor": "torch.distributed.tensor.DTensor"}
OWN_OPERATORS = "torch.ops.archon."
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass
class Use:
    """How the product uses one symbol: the modules that do, and the distinct forms of its calls."""

    modules: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)


class Known(NamedTuple):
    """What a name in a scope stands for: a dotted symbol of a library, or an instance of a class."""

    symbol: str
    is_instance: bool = False


class Reader(ast.NodeVisitor):
    """Collects the uses in one module; keeps what each name stands for, scope by scope."""

    def __init__(self, module: str, found: dict[str, Use]) -> None:
        self.module, self.found = module, found
        self.scopes: list[dict[str, Known | None]] = [{}]

    def known(self, node: ast.AST) -> Known | None:
        """Return what an expression stands for; None for anything else than a library's symbol."""
        if isinstance(node, ast.Name):
            for scope in reversed(self.scopes):
                if node.id in scope:
                    return scope[node.id]
            return None
        if isinstance(node, ast.Attribute):
            owner = self.known(node.value)
            return None if owner is None or owner.is_instance else Known(f"{owner.symbol}.{node.attr}")
        return None

    def method(self, node: ast.expr) -> str | None:
        """Return the symbol of a method of an annotated parameter; None for anything else."""
        owner = self.known(node.value) if isinstance(node, ast.Attribute) else None
        return f"{owner.symbol}.{node.attr}" if owner is not None and owner.is_instance else None  # type: ignore

    def note(self, symbol: str, call: str | None = None) -> None:
        if "." not in symbol or symbol.startswith(OWN_OPERATORS):
            return
        use = self.found[symbol]
        use.modules.add(self.module)
        if call is not None:
            use.calls.add(call)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] in LIBRARIES:
                self.note(alias.name)
                name = alias.asname or alias.name.split(".")[0]
                self.scopes[-1][name] = Known(alias.name if alias.asname else name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None or node.module.split(".")[0] not in LIBRARIES:
            return
        for alias in node.names:
            symbol = f"{node.module}.{alias.name}"
            self.note(symbol)
            self.scopes[-1][alias.asname or alias.name] = Known(symbol)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        known = self.known(node)
        if known is None:
            self.visit(node.value)
        else:
            self.note(known.symbol)

    def visit_Call(self, node: ast.Call) -> None:
        known, method = self.known(node.func), self.method(node.func)
        if known is not None and not known.is_instance:
            self.note(known.symbol, call_form(node))
        elif method is not None:
            self.note(method, call_form(node, "self"))
        else:
            self.visit(node.func)
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.visit(argument)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and len(self.scopes) > 1:
            self.scopes[-1][node.target.id] = self.instance(node.annotation)

    def instance(self, annotation: ast.expr | None) -> Known | None:
        known = None if annotation is None else self.known(annotation)
        # What is called on a module may be a submodule or a method of the product's own class.
        return None if known is None or known.symbol in ANY_ATTRIBUTE else Known(known.symbol, is_instance=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.enter(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.enter(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.enter(node)

    def enter(self, node: FunctionNode) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
        for expression in [*arguments.defaults, *filter(None, arguments.kw_defaults)]:
            self.visit(expression)
        for argument in [*every, *rest]:
            if argument.annotation is not None:
                self.visit(argument.annotation)
        scope: dict[str, Known | None] = dict.fromkeys(assigned_names(node))
        scope |= {argument.arg: self.instance(argument.annotation) for argument in every}
        scope |= {argument.arg: None for argument in rest}
        if not isinstance(node, ast.Lambda):
            for expression in [*node.decorator_list, *filter(None, [node.returns])]:
                self.visit(expression)
        self.scopes.append(scope)
        for statement in [node.body] if isinstance(node, ast.Lambda) else node.body:
            self.visit(statement)
        self.scopes.pop()


def assigned_names(function: FunctionNode) -> Iterator[str]:
    """Yield the names that a function binds otherwise than by imports, which hide those of the module."""
    body: list[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else [*function.body]
    while body:
        node = body.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, FunctionNode | ast.ClassDef):
            body.extend(ast.iter_child_nodes(node))


def call_form(node: ast.Call, *owner: str) -> str:
    """Return the form of a call as arguments: `_, dim=_` for `f(x, dim=0)`, and `self` before those of a method."""
    parts = [*owner]
    parts += ["*_" if isinstance(argument, ast.Starred) else "_" for argument in node.args]
    parts += sorted(f"{keyword.arg}=_" for keyword in node.keywords if keyword.arg is not None)
    parts += ["**_" for keyword in node.keywords if keyword.arg is None][:1]
    return ", ".join(parts)


def read_product(root: Path = ROOT) -> dict[str, Use]:
    """Return the uses of every symbol in the product's modules."""
    found: dict[str, Use] = defaultdict(Use)
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if room == "archon" and (root / "archon" / parts[1]).is_symlink():
                continue  # it is read where it lies
            name = ".".join(parts if room == "archon" else ("archon", *parts)).removesuffix(".__init__")
            Reader(name, found).visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def render(found: dict[str, Use]) -> str:
    """Return the catalog as JSON, a line for each symbol."""
    lines = [
        f"  {json.dumps(symbol)}: {json.dumps({'modules': sorted(use.modules), 'calls': sorted(use.calls)})}"
        for symbol, use in sorted(found.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


class Problem(NamedTuple):
    """A symbol that the installed package lacks, or a call that it does not take."""

    symbol: str
    what: str
    modules: list[str]


def resolve(symbol: str) -> Any:
    """Return what a dotted symbol names. Raises ImportError or AttributeError where there is nothing."""
    first, *rest = symbol.split(".")
    found, path = importlib.import_module(first), first
    for name in rest:
        path += f".{name}"
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(path)
    return found


def installed() -> dict[str, str]:
    """Return the version of each library that is installed, by its top-level module."""
    found = {}
    for module, package in LIBRARIES.items():
        try:
            found[module] = version(package)
        except PackageNotFoundError:
            continue
    return found


def problem_of(symbol: str, calls: list[str]) -> tuple[str | None, bool]:
    """Return (what is wrong with a symbol, or None; whether its calls could be compared with signatures)."""
    try:
        target = resolve(symbol)
    except (ImportError, AttributeError) as error:
        owner, _, name = symbol.rpartition(".")
        if owner in SUBCLASS:
            return problem_of(f"{SUBCLASS[owner]}.{name}", calls)
        return f"is gone ({error})", True
    known = signatures(symbol, target) if calls else []
    for form in calls if known else []:
        reasons = [reason for reason in (unfit(signature, form) for signature in known) if reason]
        if len(reasons) == len(known):
            return f"no longer takes ({form}): {reasons[0]}", True
    return None, bool(known) or not calls


def unfit(signature: inspect.Signature, form: str) -> str | None:
    """Return why a call of a form does not bind to a signature; None where it does."""
    call = ast.parse(f"f({form})", mode="eval").body
    assert isinstance(call, ast.Call)
    positional = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    is_open = len(positional) < len(call.args) or len(named) < len(call.keywords)
    try:
        (signature.bind_partial if is_open else signature.bind)(*positional, **named)
    except TypeError as error:
        return str(error)
    return None


def signatures(symbol: str, target: Any) -> list[inspect.Signature]:
    """Return the signatures that a function or class has, overloads included; none where nothing tells them."""
    try:
        return [inspect.signature(target)]
    except (TypeError, ValueError):
        *_, owner, name = symbol.split(".")
        if inspect.isclass(target):
            return [s for method in ("__init__", "__new__") for s in stubs().get(f"{name}.{method}", [])]
        return stubs().get(f"{owner}.{name}", []) or stubs().get(name, [])


@cache
def stubs() -> dict[str, list[inspect.Signature]]:
    """Return the signatures in torch's stubs of what is defined in C++, by `function` or `Class.method`.

    Those of classes' constructors are without `self`.
    """
    found: dict[str, list[inspect.Signature]] = defaultdict(list)
    root = Path(resolve("torch").__file__).parent
    for path in [*root.glob("_C/*.pyi"), root / "nn/functional.pyi"]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name].append(stub_signature(node))
            elif isinstance(node, ast.ClassDef):
                owner = "Tensor" if node.name == "TensorBase" else node.name
                for method in (item for item in node.body if isinstance(item, ast.FunctionDef)):
                    skip = int(method.name in ("__init__", "__new__"))
                    found[f"{owner}.{method.name}"].append(stub_signature(method, skip))
    return found


def stub_signature(node: ast.FunctionDef, skip: int = 0) -> inspect.Signature:
    """Return the signature of a function in a stub, without its first `skip` parameters."""
    kinds, arguments = inspect.Parameter, node.args
    plain = [(a, kinds.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    plain += [(a, kinds.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    required = len(plain) - len(arguments.defaults)
    found = [kinds(a.arg, kind, default=kinds.empty if i < required else None) for i, (a, kind) in enumerate(plain)]
    if arguments.vararg is not None:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if arguments.kwarg is not None:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found[skip:])


def compare(catalog: dict[str, Any]) -> tuple[list[Problem], dict[str, Any]]:
    """Return the problems with the installed packages, and counts of what was compared."""
    versions = installed()
    symbols = {name: use for name, use in catalog.items() if name.split(".")[0] in versions}
    problems, existence_only = [], []
    for symbol, use in symbols.items():
        what, is_compared = problem_of(symbol, use["calls"])
        if what is not None:
            problems.append(Problem(symbol, what, use["modules"]))
        if not is_compared:
            existence_only.append(symbol)
    facts = {
        "versions": {LIBRARIES[module]: number for module, number in versions.items()},
        "symbols": len(symbols),
        "not_installed": len(catalog) - len(symbols),
        "existence_only": len(existence_only),
    }
    return problems, facts


def main() -> int:
    """Write the catalog, or compare it with what is installed; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the catalog with the installed packages")
    parser.add_argument("--record", type=Path, help="with --check: write the result as a line of JSON")
    options = parser.parse_args()
    if not options.check:
        CATALOG.write_text(render(read_product()), encoding="utf-8")
        print(f"{CATALOG.relative_to(ROOT)}: {len(json.loads(CATALOG.read_text(encoding='utf-8')))} symbols")
        return 0
    problems, facts = compare(json.loads(CATALOG.read_text(encoding="utf-8")))
    for problem in problems:
        print(f"{problem.symbol} {problem.what}; used in {', '.join(problem.modules)}")
    print(", ".join(f"{package} {number}" for package, number in facts["versions"].items()))
    print(
        f"{facts['symbols']} symbols, of which {facts['existence_only']} tell no signature: {len(problems)} problems; "
        f"{facts['not_installed']} of packages that are not installed"
    )
    if options.record is not None:
        line = facts | {"problems": [problem._asdict() for problem in problems]}
        options.record.write_text(json.dumps(line) + "\n", encoding="utf-8")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
