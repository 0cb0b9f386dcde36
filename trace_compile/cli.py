"""The command line: ``trace-compile demo`` and ``trace-compile inspect``.

A user's mistake ends in one line and exit code 1; ``--debug`` shows the traceback. Anything else that goes wrong is a
bug and shows its traceback anyway.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

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


@app.command("inspect")
def inspect_path(
    path: Annotated[Path, typer.Argument(help="A checkpoint or program folder, a trace file or folder.")],
    reference: Annotated[
        Path | None, typer.Option(help="A checkpoint of the same weights to compare packed matrices with.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
) -> None:
    """Say what a checkpoint, program or trace holds and what is wrong with it. Exit code 1 if something is."""
    from trace_compile.inspecting import inspect

    found = inspect(path, reference=reference)
    if as_json:
        typer.echo(found.to_json())
    else:
        console = Console(soft_wrap=True)
        console.print(f"{found.path}: {found.kind}", markup=False, highlight=False)
        _print_facts(console, found.facts)
        for problem in found.problems:
            style = "bold red" if problem.severity == "error" else "yellow"
            console.print(f"{problem.severity}: {problem.text}", style=style, markup=False, highlight=False)
        if not found.problems:
            console.print("no problems found", style="green")
    if found.failed(strict=strict):
        raise typer.Exit(1)


def _print_facts(console: Console, facts: dict[str, Any], indent: str = "  ") -> None:
    """Nested facts as indented lines; a histogram gets bars."""
    for name, value in facts.items():
        if isinstance(value, dict) and value and all(type(count) is int for count in value.values()):
            console.print(f"{indent}{name}", markup=False, highlight=False)
            top = max(value.values())
            for key, count in value.items():
                bar = "█" * max(round(30 * count / top), 1 if count else 0) if top else ""
                console.print(f"{indent}  {key:>10} {count:>12,} {bar}", markup=False, highlight=False)
        elif isinstance(value, dict):
            console.print(f"{indent}{name}", markup=False, highlight=False)
            _print_facts(console, value, indent + "  ")
        else:
            text = f"{value:.6g}" if isinstance(value, float) else value
            console.print(f"{indent}{name}: {text}", markup=False, highlight=False)


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
