"""House lints: rules of this codebase that ruff and mypy do not know, each checked on the syntax tree of every file.

Each rule stands for a fault that somebody shipped: a folder that shadows another package, a format constant copied into
device code, a masked load of garbage, a 32-bit address. Add a rule here when a review finds the same thing twice. Every
test lists all offences at once, as ``path:line: what to do``.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("trace_compile", "passes", "kernels", "tests", "tools")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".json", ".yml", ".yaml", ".in", ""}
SKIPPED = {"__pycache__", "build", "dist", "demo-out"}
LINKS = ("passes", "kernels")


def python_files() -> list[Path]:
    """Every source file once: the symlinked folders inside trace_compile are visited under their own names."""
    found = []
    for folder in SOURCE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            linked = relative.parts[0] == "trace_compile" and relative.parts[1] in LINKS
            if not linked and not SKIPPED.intersection(relative.parts):
                found.append(relative)
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def dotted(path: Path) -> str:
    """Import name of a file: passes/x.py and kernels/x.py live in the package trace_compile."""
    parts = path.with_suffix("").parts
    return ".".join(("trace_compile", *parts) if parts[0] in LINKS else parts)


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of all modules that a file imports (relative imports resolved), with their lines."""
    package = dotted(path).split(".")[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            # `from a import b` may mean the module a.b: both are reported.
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


# numerics <- ops <- {passes, kernels} <- state <- the rest. Passes and kernels meet only in the op registry.
MAY_IMPORT = {
    "errors": {"errors"},
    "numerics": {"errors", "numerics"},
    "ops": {"errors", "numerics", "ops"},
    "passes": {"errors", "numerics", "ops", "passes"},
    "kernels": {"errors", "numerics", "ops", "kernels"},
    "state": {"errors", "numerics", "ops", "passes", "kernels", "state"},
}


def layer(module: str) -> str | None:
    """Which layer a module of this project belongs to; None for everything else."""
    parts = module.split(".")
    if parts[0] != "trace_compile":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "the rest"


def report(offences: list[str]) -> None:
    assert not offences, "\n" + "\n".join(offences)


def test_the_lints_see_the_sources() -> None:
    names = {str(path) for path in python_files()}
    assert {"trace_compile/errors.py", "tests/test_house.py", "kernels/quantize.py"} <= names
    assert "ast" in {module for module, _ in imported_modules(Path("tests/test_house.py"))}


def test_module_docstrings() -> None:
    report([f"{p}:1: say what, why, invariants" for p in python_files() if not ast.get_docstring(tree(p))])


def test_files_of_at_most_500_lines() -> None:
    lengths = {path: (ROOT / path).read_text().count("\n") for path in python_files()}
    report([f"{p}: {n} lines; find its second responsibility" for p, n in lengths.items() if n > 500])


def test_imports() -> None:
    offences = []
    for path in python_files():
        mine = layer(dotted(path))
        for module, line in imported_modules(path):
            if module.split(".")[0] in LINKS:
                offences.append(f"{path}:{line}: imports {module}; say trace_compile.{module}")
            theirs = layer(module)
            # `from trace_compile import errors` names the package too: what counts is the module behind it.
            if mine in MAY_IMPORT and theirs and module != "trace_compile" and theirs not in MAY_IMPORT[mine]:
                offences.append(f"{path}:{line}: {mine} may not import {module}")
    report(offences)


def test_format_constants_only_in_the_tables() -> None:
    offences = []
    # The generator of golden vectors stands apart from the package on purpose, tests hold worked results.
    own_numbers = ("tests", "trace_compile/numerics", "tools/make_vectors.py")
    for path in python_files():
        if str(path).startswith(own_numbers):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value in (448, 2688, 1e-12):
                offences.append(f"{path}:{node.lineno}: derive {node.value} from the formats table")
    report(offences)


def test_unfinished_work_is_not_committed() -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    offences = []
    for path in python_files():
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            if marks.search(line):
                offences.append(f"{path}:{number}: {line.strip()}")
    report(offences)


def device_functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list):
            yield node


def test_device_code() -> None:
    offences = []
    functions = [(p, f) for p in python_files() if p.parts[0] == "kernels" for f in device_functions(p)]
    assert functions, "no device code was found: has the decorator changed its name?"
    for path, function in functions:
        widened = {id(n.value) for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr == "to"}
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            given = {keyword.arg for keyword in node.keywords}
            where = f"{path}:{node.lineno} ({function.name})"
            if called == "tl.make_block_ptr":
                offences.append(f"{where}: tl.make_block_ptr is gone in Triton 3.9")
            if called == "tl.load" and "mask" in given and "other" not in given:
                offences.append(f"{where}: a masked load without other= reads garbage")
            if called == "tl.program_id" and id(node) not in widened:
                offences.append(f"{where}: widen program ids before they meet a stride: tl.program_id(0).to(tl.int64)")
    report(offences)


def test_no_machine_paths() -> None:
    # Spelled in two parts, so that this file passes its own test.
    forbidden = re.compile("|".join("/" + name + "/" for name in ("work", "root", "home", "opt")) + r"|pypi\.o" + "rg")
    offences = []
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT)
        hidden = any(part.startswith(".") and part != ".ci" for part in relative.parts)
        generated = SKIPPED.intersection(relative.parts) or ".egg-info" in str(relative)
        if hidden or generated or path.suffix not in TEXT_SUFFIXES or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if forbidden.search(line):
                offences.append(f"{relative}:{number}: names a place that exists on one machine only: {line.strip()}")
    report(offences)


def test_symlinks_and_the_kernels_trap() -> None:
    for name in LINKS:
        link = ROOT / "trace_compile" / name
        assert link.is_symlink(), f"{link} must be a symlink"
        assert str(link.readlink()) == f"../{name}"
    # With the repository root on sys.path it would be a regular package that shadows Hugging Face's `kernels`, and
    # transformers imports that one; without it an installed `kernels` wins.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def requirement_name(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in line for line in pins)
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    missing = {requirement_name(one) for one in wanted} - {requirement_name(line) for line in pins}
    assert not missing, f"constraints.txt pins no version of {sorted(missing)}"
