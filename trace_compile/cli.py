"""The command line: ``trace-compile demo``.

A user's mistake ends in one line and exit code 1; ``--debug`` shows the traceback. Anything else that goes wrong is a
bug and shows its traceback anyway.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trace_compile.errors import TraceCompileError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

_debug = False


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"trace-compile {version('trace-compile')}")
        except PackageNotFoundError:
            typer.echo("trace-compile, running from source without being installed")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Compiler passes that make an NVFP4 mixture-of-experts rollout and its trainer agree."""
    global _debug
    _debug = debug


@app.command()
def demo(
    preset: Annotated[str, typer.Option(help="Size of the run: cpu or h200.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for result.json, plots and checkpoints.")] = Path("demo-out"),
    steps: Annotated[int | None, typer.Option(min=1, help="RL steps per arm; default: the preset's.")] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds; every arm runs once per seed.")] = "0",
    arms: Annotated[str, typer.Option(help="Comma-separated recipes to compare.")] = "bf16,naive,qat,trace",
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Train the warm start here first.")] = False,
    warm_start: Annotated[
        Path | None, typer.Option(help="Start from the folder warmstart/ of an earlier run.", exists=True)
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Arms at a time; default: what the machine has.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The tiny model for two steps: does it run?")] = False,
) -> None:
    """Train a small MoE policy with FP4 rollouts under several recipes, compare them, and export the result."""
    try:
        from trace_compile.demo.presets import get_preset
        from trace_compile.demo.run import default_processes, run_demo
    except ModuleNotFoundError as error:
        raise TraceCompileError(
            f"the demo needs {error.name}; install it with: pip install 'trace-compile[rl]'"
        ) from error
    chosen = get_preset("micro" if smoke else preset)
    names = [name.strip() for name in arms.split(",") if name.strip()]
    run_demo(
        chosen,
        out,
        steps=steps,
        seeds=_integers(seeds),
        arms=names,
        from_scratch=from_scratch,
        warm_start=warm_start,
        processes=processes or default_processes(chosen, len(names)),
        console=Console(),
    )


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise TraceCompileError(f"--seeds takes comma-separated integers such as 0,1,2, got {text!r}") from None


def main() -> None:
    """Entry point of the ``trace-compile`` script."""
    try:
        app()
    except TraceCompileError as error:
        if _debug:
            raise
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
