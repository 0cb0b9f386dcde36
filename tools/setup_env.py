"""Makes ``.venv``: the pinned environment in which ``make test``, ``make demo`` and the others run.

What: a virtual environment at the repository's top with the exact versions of constraints.txt and this project in
editable mode. Why a script: torch's wheel differs by machine. Without an NVIDIA GPU the CPU build is tried first (from
the indexes that pip is set up with, then from PyTorch's own), since the default Linux wheel brings gigabytes of CUDA.

Invariants: standard library only; does nothing (in a few milliseconds) when a stamp says that .venv was made from these
very constraints and this pyproject; prints two lines when it works and pip's whole log when it fails.

    python3 tools/setup_env.py            make or refresh .venv
    make test PYTHON=python3.12           choose the interpreter (3.11 or newer)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "stamp"
LOG = VENV / "setup.log"
EXTRAS = "dev,onnx,rl"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def environment_key() -> str:
    """Hash of all that decides what .venv holds: constraints, project metadata, this script, the interpreter."""
    digest = hashlib.sha256()
    for name in ("constraints.txt", "pyproject.toml", "tools/setup_env.py"):
        digest.update((ROOT / name).read_bytes())
    # An editable install and the scripts in .venv/bin hold absolute paths: a moved checkout needs a new set-up.
    digest.update(f"{ROOT} {sys.executable} {sys.version}".encode())
    return digest.hexdigest()


def has_nvidia_gpu() -> bool:
    """True if the driver's own tool lists at least one GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU " in listed.stdout


def pip_install(*arguments: str) -> bool:
    """``pip install`` inside .venv with all output in the log; True if it succeeded."""
    # Timeouts: torch's wheel is hundreds of megabytes, and pip's default of 15 s gives up on slow mirrors.
    options = ["--disable-pip-version-check", "--timeout", "180"]
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", *options, *arguments]
    with LOG.open("a") as log:
        log.write("$ " + " ".join(command) + "\n")
        log.flush()
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode == 0


def pinned(name: str) -> str:
    """The ``name==version`` line of constraints.txt."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.lower().startswith(name + "=="):
            return line.strip()
    raise SystemExit(f"constraints.txt pins no version of {name}; add a line {name}==VERSION")


def install_torch(gpu: bool) -> Path | None:
    """Install torch; return the constraints file that fits the build that came, or None if none could be had."""
    every = ROOT / "constraints.txt"
    torch = pinned("torch")
    if not gpu:
        cpu_build = torch + "+cpu"
        if pip_install("-c", str(every), cpu_build):
            return every
        # Few retries: where that index cannot be reached, the default build is the way on.
        if pip_install("-c", str(every), "--retries", "1", "--extra-index-url", PYTORCH_CPU_INDEX, cpu_build):
            return every
    without_triton = VENV / "constraints-cuda.txt"
    lines = [line for line in every.read_text().splitlines() if not line.startswith("triton==")]
    without_triton.write_text("\n".join(lines) + "\n")
    return without_triton if pip_install("-c", str(without_triton), torch) else None


def fail(step: str) -> None:
    """Show pip's log and stop."""
    print(LOG.read_text(), file=sys.stderr)
    raise SystemExit(f"set-up failed while {step}; the log above is in .venv/setup.log. Run the same command again.")


def reexecute_with_newer_python() -> None:
    """Continue with a Python >= 3.11 from PATH if this one is older."""
    for name in ("python3.11", "python3.12", "python3.13"):
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            os.execv(found, [found, *sys.argv])
    raise SystemExit(
        f"Python 3.11 or newer is needed, found {sys.version.split()[0]}; say make PYTHON=/path/to/python3"
    )


def main() -> None:
    """Make .venv unless its stamp says that it is up to date."""
    if sys.version_info < (3, 11):  # noqa: UP036  (an older python3 is the one that meets this script first)
        reexecute_with_newer_python()
    key = environment_key()
    if STAMP.exists() and STAMP.read_text() == key and (VENV / "bin" / "python").exists():
        return
    started = time.monotonic()
    gpu = has_nvidia_gpu()
    machine = "an NVIDIA GPU" if gpu else "a CPU"
    print(f"Setting up .venv for {machine} (once; a few minutes; log in .venv/setup.log)", flush=True)
    # --clear: what an earlier set-up left must not decide what this one holds.
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise SystemExit(f"could not make a virtual environment with {sys.executable}:\n{made.stdout}{made.stderr}")
    constraints = install_torch(gpu)
    if constraints is None:
        fail("installing torch")
    # Build tools first, so that the project is built with the pinned setuptools and not with whatever is newest today.
    if not pip_install("-c", str(constraints), "setuptools"):
        fail("installing the build tools")
    if not pip_install("-c", str(constraints), "--no-build-isolation", "-e", f"{ROOT}[{EXTRAS}]"):
        fail("installing the project and its dependencies")
    STAMP.write_text(key)
    print(f"Ready in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
