"""What the benchmarks share: options, targets, and the files in `benchmarks/results/`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

from setup.environment import ROOT

FOLDER = ROOT / "benchmarks" / "results"


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with `--comfyui`, in whose place COMFYUI_DIR may stand, and `--save`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = os.environ.get("COMFYUI_DIR")
    made.add_argument(
        "--comfyui", type=Path, default=named, required=not named, help="a ComfyUI folder (default: COMFYUI_DIR)"
    )
    made.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    return made


def target(measured: float, limit: float, at_least: bool = False) -> dict:
    """How a figure stands to its limit, which it may not pass; or, with ``at_least``, has to reach."""
    return {"limit": limit, "measured": measured, "met": measured >= limit if at_least else measured <= limit}


def exit_code(result: dict) -> int:
    """0 where every target of a result is met, else 2."""
    return 0 if all(target["met"] for target in result["targets"].values()) else 2


def save(result: dict) -> None:
    """Write a result to the file of its benchmark."""
    (FOLDER / f"{result['benchmark']}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def told(result: dict, options: argparse.Namespace, as_text: Callable[[dict], str]) -> int:
    """Print a result as JSON or text, save it where that is asked for, and return the exit code."""
    if options.save:
        save(result)
    print(json.dumps(result, indent=2) if options.json else as_text(result))
    return exit_code(result)
