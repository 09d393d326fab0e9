"""The commands ``inspect`` (``scan`` with values), ``convert`` and ``doctor``: arguments, output,
exit codes.

torch, which takes seconds to import, is imported once a command runs.
Exit code 0: done; 1: ``inspect`` found problems; 2: an error, in one line on stderr; 130:
interrupted.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import CheckpointError, HalfsafeError
from ..base.options import STORAGE_OPTIONS
from ..base.text import size_text
from ..plan.presets import DEFAULT_PRESET, PRESETS

if TYPE_CHECKING:
    from .inspect import Inspection

STORAGES = STORAGE_OPTIONS[1:]
QUIET = 2
"""Seconds that a command works before it prints how far it is, and between two such lines."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name that the terminal's encoding lacks is printed with escapes
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 0
    try:
        return options.run(options)
    except HalfsafeError as error:
        return _fail(error)


def _fail(error: HalfsafeError) -> int:
    _tell(f"halfsafe: {' '.join(str(error).split())}")
    return 2


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _print(options: argparse.Namespace, data: dict, text: str) -> None:
    try:
        sys.stdout.write(f"{json.dumps(data, indent=2) if options.json else text}\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python writes the rest as it exits
        if not isinstance(error, BrokenPipeError):  # the reader of a pipe, such as head, has seen enough
            problem = f"Standard output cannot be written ({error.strerror})."
            raise HalfsafeError(problem, "The command finished; only its output is lost.") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="halfsafe", description="Inspect, check and convert model files.")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    described = "show what a model file holds, its problems, and how ComfyUI reads its quantized layers"
    inspect = _command(commands, "inspect", _inspect, described)
    inspect.add_argument(
        "--values", action="store_true", help="read the values too: NaN, Inf, holes of zeros, out of range"
    )
    scan = _command(commands, "scan", _inspect, "the same as inspect --values")
    scan.set_defaults(values=True)
    for command in (inspect, scan):
        command.add_argument("files", type=Path, nargs="+", metavar="file")
    _add_convert(commands)
    _command(commands, "doctor", _doctor, "show what this device and this torch support")
    return parser


def _command(commands, name: str, run: Callable, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.set_defaults(run=run)
    return command


def _add_convert(commands) -> None:
    convert = _command(commands, "convert", _convert, "write a file in ComfyUI's own quantization format")
    convert.add_argument("source", type=Path, help=".safetensors file, .index.json, or one part of a sharded set")
    convert.add_argument("target", type=Path, help=".safetensors file to write")
    convert.add_argument("--storage", choices=STORAGES, required=True, metavar="DTYPE", help=", ".join(STORAGES))
    convert.add_argument("--rules", type=Path, help="file with one rule per line, e.g. 'blocks.0.* storage=bf16'")
    presets = f"{', '.join(PRESETS)}; default: {DEFAULT_PRESET}"
    convert.add_argument("--preset", choices=PRESETS, default=DEFAULT_PRESET, metavar="NAME", help=presets)
    calibration = "a file that Calibrate (Halfsafe) wrote: round with less error"
    convert.add_argument("--calibration", type=Path, metavar="FILE", help=calibration)
    convert.add_argument("--force", action="store_true", help="overwrite the target")
    without = "write no model card (the target's name with .md) beside the target"
    convert.add_argument("--no-card", action="store_false", dest="card", help=without)


def _inspect(options: argparse.Namespace) -> int:
    """Inspect the files in turn, a sharded set once; a file that cannot be read does not stop the
    others."""
    from ..files.safetensors_file import open_checkpoint
    from .inspect import inspect_file, inspection_text

    found: list[Inspection] = []
    done: set[Path] = set()
    failed = 0
    for path in options.files:
        try:
            file = open_checkpoint(path)
            if not done.issuperset(file.files):
                done.update(file.files)
                found.append(inspect_file(path, options.values, _progress(file.data_bytes, "read", path.name)))
        except CheckpointError as error:
            failed = _fail(error)
    if found:
        data = asdict(found[0]) if len(options.files) == 1 else {"files": [asdict(each) for each in found]}
        _print(options, data, "\n\n".join(map(inspection_text, found)))
    return failed or int(any(each.problems for each in found))


def _progress(total: int, verb: str, name: str) -> Callable[[int], None]:
    """Return a function that is called with the bytes just dealt with, and prints a line at a tenth
    of all if none was printed for ``QUIET`` seconds: nothing for a small file."""
    done = 0
    told = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, told
        before = done
        done = done + count
        if count and 10 * before // total < 10 * done // total and time.monotonic() - told >= QUIET:
            told = time.monotonic()
            _tell(f"{100 * done // total:3d} % {verb} of {name}, {size_text(total)}")

    return advance


def _convert(options: argparse.Namespace) -> int:
    from ..files.safetensors_file import open_checkpoint
    from ..make.calibration import CalibrationData
    from ..plan.rules import rules_from
    from .convert import convert_file

    target = options.target
    if target.suffix not in (".safetensors", ".sft") or os.path.isdir(target):
        raise HalfsafeError(f"{target} is not the name of a .safetensors file.", "End the name in .safetensors.")
    if os.path.exists(target) and not options.force:
        raise HalfsafeError(f"{target} exists.", "Add --force to overwrite it.")
    rules = rules_from(_rules_text(options.rules), options.preset)
    calibration = options.calibration and CalibrationData.read(options.calibration)
    progress = _progress(open_checkpoint(options.source).data_bytes, "converted", options.source.name)
    given = rules, progress, calibration, options.force, options.card
    summary = convert_file(options.source, target, options.storage, *given)
    _print(options, asdict(summary), summary.text())
    return 0


def _rules_text(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8-sig")  # Notepad begins a file with a byte order mark
    except (OSError, ValueError) as error:
        problem = f"{path}: the rules cannot be read ({error})."
        raise HalfsafeError(problem, "Use a text file with one rule per line.") from None


def _doctor(options: argparse.Namespace) -> int:
    from ..report import doctor

    diagnosis = doctor.diagnose()
    _print(options, diagnosis, doctor.diagnosis_result(diagnosis).text)
    return 0
