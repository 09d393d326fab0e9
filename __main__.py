"""Command line: ``python -m halfsafe inspect | scan | convert | plan | doctor``. ComfyUI never imports this file.

``python path/to/halfsafe`` is the same. Exit code 0: done; 1: ``scan`` found problems; 2: an error, in one line on
stderr; of several files the worst; 130: interrupted.
"""
# ruff: noqa: E402  what is imported late is imported so that an error in it can be told in one line

import os
import signal
import sys

INTERRUPTED = 130


def _exit_at_once(*_: object) -> None:
    os.write(2, b"halfsafe: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit_at_once)  # during imports, which would end in a traceback; no file is open yet

import argparse
import json
import math
import time
from dataclasses import asdict
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TextIO

NEEDED = ("torch", "numpy", "safetensors")


def _missing() -> str:
    """Say what to install, in one line; "" where everything is there."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return ""
    advice = (
        f"Run it with the Python of your ComfyUI, or install them: {sys.executable} -m pip install {' '.join(missing)}"
    )
    return f"halfsafe: {', '.join(missing)} cannot be imported by {sys.executable}. {advice}"


def _package_of_this_folder() -> str:
    """Import this folder as the package halfsafe, whatever it is called, for ``python path/to/folder``."""
    folder = Path(__file__).absolute().parent
    spec = spec_from_file_location("halfsafe", folder / "__init__.py", submodule_search_locations=[str(folder)])
    sys.modules["halfsafe"] = module_from_spec(spec)
    return "halfsafe"


if problem := _missing():
    sys.exit(print(problem, file=sys.stderr) or 2)
if not __package__:
    __package__ = _package_of_this_folder()

from .precision.devices.names import EXAMPLES, code_of
from .precision.dtypes import STORAGE_OPTIONS
from .precision.errors import HalfsafeError, UnknownProfile
from .precision.plan.goal import GOALS
from .precision.plan.presets import DEFAULT_PRESET, PRESETS
from .precision.text import WIDTH, duration_text, size_text


class Progress:
    """Bytes done of a total, on stderr: a bar on a terminal, else a line every tenth."""

    def __init__(self, total: int, verb: str):
        self.total = max(total, 1)
        self.verb = verb
        self.done = 0
        self.shown = -1
        self.began = time.monotonic()
        self.steps = 200 if sys.stderr.isatty() else 10

    def __call__(self, count: int) -> None:
        self.done += count
        step = self.done * self.steps // self.total
        if self.done and step > self.shown:
            self.shown = step
            self._show()

    def end(self) -> None:
        """Close the bar of work that stopped before its total, because a file failed."""
        if sys.stderr.isatty() and self.done < self.total:
            _tell("")

    def _show(self) -> None:
        rate = self.done / max(time.monotonic() - self.began, 1e-9)
        left = duration_text((self.total - self.done) / max(rate, 1e-9))
        done = f"{size_text(self.done):>11} of {size_text(self.total)}"
        text = f"{self.verb} {done}, {size_text(rate):>11}/s, {left:>7} left"
        if sys.stderr.isatty():
            room = max(0, WIDTH - len("[]  ") - len(text))
            filled = room * self.done // self.total
            end = "\n" if self.done >= self.total else ""
            _tell(f"\r[{'#' * filled}{'.' * (room - filled)}] {text}", end)
        else:
            _tell(f"{100 * self.done // self.total:3d} % {text}")


def _tell(text: str, end: str = "\n") -> None:
    """Print a line on stderr; work goes on where that is full or closed."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Send what a stream still holds nowhere, which Python would fail to write as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except HalfsafeError as error:
        _tell(f"halfsafe: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        _tell(f"{chr(10) * sys.stderr.isatty()}halfsafe: interrupted")
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="halfsafe", description="Look at, check and convert model files.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_inspect_and_scan(commands)
    _add_convert(commands)
    _add_plan(commands)
    doctor = _command(commands, "doctor", _doctor, "what this device, torch and ComfyUI can do")
    doctor.add_argument(
        "--comfyui", type=Path, metavar="DIR", help="check this ComfyUI; the one around this folder without it"
    )
    return parser


def _add_inspect_and_scan(commands) -> None:
    inspect = _command(commands, "inspect", _inspect, "what a model file holds, and what ComfyUI would do with it")
    inspect.add_argument("file", type=Path)
    scan = _command(commands, "scan", _scan, "read every number: NaN, Inf, out of range, lost scales")
    scan.add_argument("files", type=Path, nargs="+", metavar="file")
    _add_jobs(scan)


def _add_convert(commands) -> None:
    convert = _command(commands, "convert", _convert, "write a file in ComfyUI's own quantization format")
    convert.add_argument(
        "sources",
        type=Path,
        nargs="+",
        metavar="source",
        help=".safetensors file, .index.json, or one part of a sharded set",
    )
    convert.add_argument(
        "target", type=Path, help=".safetensors file to write, or a folder for files of the same names"
    )
    _add_jobs(convert)
    convert.add_argument(
        "--storage", choices=STORAGE_OPTIONS[1:], required=True, metavar="DTYPE", help=", ".join(STORAGE_OPTIONS[1:])
    )
    convert.add_argument("--rules", type=Path, help="file with one rule per line, e.g. 'blocks.0.* storage=bf16'")
    convert.add_argument(
        "--preset",
        choices=PRESETS,
        default=DEFAULT_PRESET,
        metavar="NAME",
        help=f"{', '.join(PRESETS)}; {DEFAULT_PRESET} without it",
    )
    convert.add_argument(
        "--calibration", type=Path, metavar="FILE", help="round by this file, which Calibrate (Halfsafe) wrote"
    )
    convert.add_argument("--force", action="store_true", help="overwrite the target")


def _add_plan(commands) -> None:
    plan = _command(commands, "plan", _plan, "what would run on a device, layer by layer, and why")
    plan.add_argument("file", type=Path)
    plan.add_argument(
        "--device",
        type=device,
        metavar="NAME",
        help=f"decide as on this device ({EXAMPLES}, or a code such as sm_86); this one without it",
    )
    plan.add_argument("--goal", choices=GOALS, default="balanced")
    plan.add_argument("--memory", type=gigabytes, metavar="GB", help="free memory of that device, to decide storage by")


def gigabytes(text: str) -> int:
    """Parse an amount of memory to bytes; argparse names this function where it is none."""
    count = float(text) * 1e9
    if not 0 <= count < math.inf:
        raise ValueError
    return int(count)


def jobs(text: str) -> int:
    """Parse a number of files to work on at a time; argparse names this function where it is none."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def _add_jobs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--jobs", type=jobs, default=1, metavar="N", help="files to work on at a time; 1 without it")


def device(text: str) -> str:
    """Return the code of a device given by name or code."""
    try:
        return code_of(text)
    except UnknownProfile as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _command(commands, name: str, run, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.set_defaults(run=run)
    return command


def _print(options: argparse.Namespace, data: dict, text: str) -> None:
    try:
        print(json.dumps(data, indent=2) if options.json else text, flush=True)
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        _discard(sys.stdout)
    except OSError as error:
        _discard(sys.stdout)
        raise HalfsafeError(
            f"Standard output cannot be written ({error.strerror}).",
            "The command is done; only what it prints is lost.",
        ) from None


def _inspect(options: argparse.Namespace) -> int:
    from .precision.commands.file_text import inspection_text
    from .precision.commands.inspect import inspect_file

    inspection = inspect_file(options.file)
    _print(options, inspection.to_json(), inspection_text(inspection))
    return 0


def _scan(options: argparse.Namespace) -> int:
    from .precision.commands.file_text import scan_text
    from .precision.commands.inspect import Scan, scan_file
    from .precision.commands.many import bytes_in, for_each, models_in

    files = models_in(options.files)
    if len(files) == 1:
        return _scan_one(options, files[0])
    progress = Progress(bytes_in(files), "read")
    outcomes = for_each(files, scan_file, options.jobs, progress)
    progress.end()
    codes = [2 if outcome.result is None else bool(outcome.result.problems) for outcome in outcomes]
    bad = f"{codes.count(1)} with problems, {codes.count(0)} without"
    return _finish_many(options, outcomes, Scan.to_json, scan_text, f"{bad}, {codes.count(2)} not read", max(codes))


def _scan_one(options: argparse.Namespace, file: Path) -> int:
    from .precision.commands.file_text import scan_text
    from .precision.commands.inspect import scan_file
    from .precision.files.safetensors_file import open_checkpoint

    progress = Progress(open_checkpoint(file).data_bytes, "read")
    scan = scan_file(file, progress)
    _print(options, scan.to_json(), scan_text(scan))
    return 1 if scan.problems else 0


def _convert(options: argparse.Namespace) -> int:
    from .precision.commands.file_text import conversion_text
    from .precision.commands.many import bytes_in, for_each, models_in, targets_in
    from .precision.plan.rules import rules_from

    rules = rules_from(_rules_text(options.rules), options.preset)
    sources = models_in(options.sources)
    into = os.path.isdir(options.target) or len(sources) > 1
    if into and not os.path.isdir(options.target):
        raise HalfsafeError(f"{options.target} is not a folder.", "Several sources need a folder to be converted into.")
    targets = targets_in(options.target, sources) if into else {sources[0]: options.target}

    def convert(source: Path, progress: Progress):
        return _convert_one(source, targets[source], options, rules, progress)

    progress = Progress(bytes_in(sources), "converted")
    if len(sources) == 1:
        summary = convert(sources[0], progress)
        _print(options, asdict(summary), conversion_text(summary))
        return 0
    outcomes = for_each(sources, convert, options.jobs, progress)
    progress.end()
    failed = sum(outcome.result is None for outcome in outcomes)
    converted = f"{len(outcomes) - failed} converted, {failed} failed"
    return _finish_many(options, outcomes, asdict, conversion_text, converted, 2 if failed else 0)


def _convert_one(source: Path, target: Path, options: argparse.Namespace, rules, progress):
    from .precision.calibrate.calibration import read_calibration
    from .precision.commands.convert import convert_file

    if target.suffix not in (".safetensors", ".sft") or os.path.isdir(target):
        raise HalfsafeError(f"{target} is not the name of a .safetensors file.", "Give the target that ending.")
    if os.path.exists(target) and not options.force:
        raise HalfsafeError(f"{target} exists.", "Add --force to overwrite it.")
    calibration = options.calibration and read_calibration(options.calibration)
    return convert_file(source, target, options.storage, rules, progress, options.force, calibration, _tell)


def _finish_many(options: argparse.Namespace, outcomes: list, to_json, to_text, summary: str, code: int) -> int:
    """Print every file's result in the order given, what failed on stderr, and one summary; return the exit code."""
    texts = [to_text(outcome.result) for outcome in outcomes if outcome.result is not None]
    files = [outcome.to_json(to_json) for outcome in outcomes]
    _print(options, {"summary": summary, "files": files}, "\n\n".join([*texts, f"{len(outcomes)} files: {summary}"]))
    for outcome in outcomes:
        if outcome.error is not None:
            named = outcome.error if isinstance(outcome.error, HalfsafeError) else f"{outcome.file}: {outcome.error!r}"
            _tell(f"halfsafe: {' '.join(str(named).split())}")
    return code


def _rules_text(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8-sig")  # Notepad begins a file with a byte order mark
    except (OSError, ValueError) as error:
        raise HalfsafeError(
            f"{path}: the rules cannot be read ({error}). Give a text file with one rule per line."
        ) from None


def _plan(options: argparse.Namespace) -> int:
    from .precision.commands.plan import plan_file
    from .precision.devices.detect import detect

    report = plan_file(options.file, detect(profile=options.device), options.goal, options.memory)
    _print(options, report.to_json(), report.to_text())
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from .precision.commands import core_names, doctor

    if options.comfyui and not _is_comfyui(options.comfyui):
        problem = f"{options.comfyui} is no ComfyUI: it has no comfy/ops.py."
        raise HalfsafeError(problem, "Give the folder that ComfyUI's main.py is in.")
    diagnosis, text = doctor.diagnose(), ""
    if comfyui := options.comfyui or _comfyui_around():
        found = diagnosis["comfyui"] = core_names.report(comfyui)
        text = doctor.core_text(found)
    _print(options, diagnosis, doctor.to_text(diagnosis) + text)
    return 0


def _comfyui_around() -> Path | None:
    """Find the ComfyUI that has this folder among its custom nodes."""
    folder = Path(__file__).absolute().parents[2]
    return folder if _is_comfyui(folder) else None


def _is_comfyui(folder: Path) -> bool:
    return (folder / "comfy" / "ops.py").is_file()


def _run_alone() -> int:
    """Run the command of this process, which may have any encoding for its output, or none, and be interrupted."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")
    at_once = signal.getsignal(signal.SIGINT)
    if at_once is _exit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    except KeyboardInterrupt:  # a second one
        return INTERRUPTED
    finally:  # all is written and told: what Python does on its way out is not interrupted
        signal.signal(signal.SIGINT, signal.SIG_IGN if at_once is _exit_at_once else at_once)


if __name__ == "__main__":
    sys.exit(_run_alone())
