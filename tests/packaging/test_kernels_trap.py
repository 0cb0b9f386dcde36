"""The folder ``kernels/`` must never be taken for the package ``kernels`` that transformers imports when it finds it.

Each case runs a program in a new interpreter that builds and runs a tiny Qwen3-MoE and imports our kernels and passes:
from the repository's top (where ``python -c`` puts the current folder on sys.path), with and without a package named
``kernels`` installed; then the same from an editable install and from the wheel, which must hold one top-level name.
Those builds start from a clean clone, so they see what is committed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from transformers.utils import import_utils

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys
import torch, transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
config = Qwen3MoeConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2)
logits = Qwen3MoeForCausalLM(config).eval()(torch.arange(12).reshape(2, 6)).logits
assert logits.shape == (2, 6, 32) and bool(logits.isfinite().all())
import trace_compile.kernels.quantize, trace_compile.passes.region
from transformers.utils.import_utils import is_kernels_available
kernels = sys.modules.get("kernels")
print(json.dumps({
    "package": trace_compile.__file__,
    "quantize": trace_compile.kernels.quantize.__file__,
    "kernels": getattr(kernels, "__file__", None),
    "available": is_kernels_available(),
    "leaked": sorted(name for name in sys.modules if name.split(".")[0] == "passes" or name.startswith("kernels.")),
}))
"""


def run_program(python: str | Path, cwd: Path, *search: Path) -> dict:
    """PROGRAM's report; ``search`` are the folders given as PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, search))
    done = subprocess.run([str(python), "-c", PROGRAM], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def fake_kernels(site: Path) -> Path:
    """A distribution named kernels, of a version that transformers accepts, with any name that it may import."""
    version = import_utils.KERNELS_MIN_VERSION
    package = site / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"__version__ = {version!r}\n"
        "class Anything:\n"
        "    def __init__(self, *args, **kwargs): pass\n"
        "    def __call__(self, target, *args, **kwargs): return target\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'): raise AttributeError(name)\n"
        "    return Anything\n"
    )
    info = site / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    return site


@pytest.mark.parametrize("installed", [False, True], ids=["without-kernels", "with-kernels"])
def test_from_the_repository_root(tmp_path: Path, installed: bool) -> None:
    if installed:
        report = run_program(sys.executable, ROOT, fake_kernels(tmp_path))
        assert report["kernels"] == str(tmp_path / "kernels" / "__init__.py"), (
            "our folder shadows the installed package"
        )
    else:
        report = run_program(sys.executable, ROOT)
        assert report["kernels"] is None
    assert report["available"] is installed
    assert report["leaked"] == []
    assert report["package"] == str(ROOT / "trace_compile" / "__init__.py")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone of what is committed."""
    target = tmp_path_factory.mktemp("clone") / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True, capture_output=True)
    return target


def call(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bare_venv(path: Path) -> Path:
    """A new environment that sees torch and the rest of this one, but no editable install; its python."""
    call(sys.executable, "-m", "venv", "--without-pip", path)
    python = path / "bin" / "python"
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    # Paths named in a .pth file are searched, and .pth files inside them are not read.
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    options = ("--quiet", "--no-deps", "--no-build-isolation")
    call(sys.executable, "-m", "pip", "--python", python, "install", *options, *what)


@pytest.fixture(scope="module")
def built(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, the wheel made from it, and the wheel made straight from the clone."""
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", out / "sdist", clone)
    call(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out / "direct", clone)
    (sdist,) = (out / "sdist").glob("*.tar.gz")
    (wheel,) = (out / "sdist").glob("*.whl")
    (direct,) = (out / "direct").glob("*.whl")
    return {"sdist": sdist, "wheel": wheel, "direct": direct}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


@pytest.mark.slow
def test_wheel_holds_one_name_and_every_file(clone: Path, built: dict[str, Path]) -> None:
    wheel = contents(built["wheel"])
    assert {name.split("/")[0] for name in wheel} == {"trace_compile", "trace_compile-0.1.0.dist-info"}
    assert wheel == contents(built["direct"]), "the wheel depends on whether it is built from the sdist or the checkout"
    tracked = call("git", "ls-files", "trace_compile", "passes", "kernels", cwd=clone).split()
    expected = {}
    for name in tracked:
        if not (clone / name).is_symlink():
            inside = name if name.startswith("trace_compile/") else "trace_compile/" + name
            expected[inside] = (clone / name).read_bytes()
    packed = {name: data for name, data in wheel.items() if name.startswith("trace_compile/")}
    assert packed == expected
    info = "trace_compile-0.1.0.dist-info/"
    assert {info + "licenses/LICENSE", info + "entry_points.txt"} <= set(wheel)


@pytest.mark.slow
def test_sdist_holds_regular_files_only(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        members = archive.getmembers()
    names = {member.name.split("/", 1)[1] for member in members if member.isfile()}
    assert not [member.name for member in members if member.issym() or member.islnk()]
    assert {"trace_compile/kernels/quantize.py", "trace_compile/passes/region.py", "LICENSE", "README.md"} <= names
    assert not [name for name in names if name.startswith("tests/")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["wheel", "editable"])
def test_from_an_install(mode: str, clone: Path, built: dict[str, Path], tmp_path: Path) -> None:
    python = bare_venv(tmp_path / "venv")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    install(python, *([built["wheel"]] if mode == "wheel" else ["-e", clone]))
    home = tmp_path / "venv" if mode == "wheel" else clone

    without = run_program(python, elsewhere)
    assert Path(without["package"]).is_relative_to(home) and Path(without["quantize"]).is_relative_to(home)
    assert (without["kernels"], without["available"], without["leaked"]) == (None, False, [])
    site = fake_kernels(tmp_path / "site")
    installed = run_program(python, elsewhere, site)
    assert installed["kernels"] == str(site / "kernels" / "__init__.py")
    assert (installed["available"], installed["leaked"]) == (True, [])

    outside = "import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('passes'))"
    assert call(python, "-c", outside, cwd=elsewhere).strip() == "None None"
    backends = call(python, "-c", "import torch._dynamo as d; print(d.list_backends())", cwd=elsewhere)
    assert "trace_compile" in backends
    assert "demo" in call(tmp_path / "venv" / "bin" / "trace-compile", "--help", cwd=elsewhere)
