"""How long ComfyUI takes to import the pack: `python -m benchmarks load import`, or this file with `--comfyui DIR`.

Each run is a fresh process in which ComfyUI itself is imported already, as it is when it loads custom nodes; the pack is
loaded through ComfyUI's own `load_custom_node` and its nodes are asked for. Bytecode is in place, as after the first start.
The target is held against the processor's time, which is what an idle machine takes; the clock's is given beside it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from setup.comfyui_server import make_base_directory
from setup.environment import ROOT, clean_environ

from . import reporting

LIMIT = 0.2
IN_COMFYUI = """
import asyncio, json, sys, time
sys.path.insert(0, {comfyui!r})
sys.argv = ["main.py", "--cpu", "--base-directory", {base!r}, "--database-url", "sqlite:///:memory:"]
import comfy.options
comfy.options.enable_args_parsing()
import folder_paths, nodes, comfy_api.latest, comfy.sd, comfy_config.config_parser, server
before = set(sys.modules)
began, busy = time.perf_counter(), time.process_time()
loaded = asyncio.run(nodes.load_custom_node({pack!r}, module_parent="custom_nodes"))
seconds, cpu = time.perf_counter() - began, time.process_time() - busy
new = sorted(set(sys.modules) - before)
print(json.dumps({{"loaded": loaded, "seconds": seconds, "cpu_seconds": cpu, "modules": len(new), "others": [m for m in new if "Halfsafe" not in m]}}))
"""


def figures(python: Path, comfyui: Path, runs: int = 5) -> dict:
    """Median, runs and target of the import in ``comfyui`` with the interpreter ``python``. Seconds.

    Raises:
        SystemExit: the pack did not load.
    """
    with tempfile.TemporaryDirectory() as folder:
        base = make_base_directory(Path(folder), ROOT)
        pack = next(path for path in (base / "custom_nodes").iterdir() if path.is_dir())
        taken = [_import_once(python, comfyui, base, pack) for _ in range(runs + 1)][1:]
    medians = {key: round(statistics.median(run[key] for run in taken), 4) for key in ("seconds", "cpu_seconds")}
    return {
        "benchmark": "import",
        "runs": [{key: round(run[key], 4) for key in medians} for run in taken],
        "medians": medians,
        "modules": taken[-1]["modules"],
        "other_modules": taken[-1]["others"],
        "targets": {"cpu_seconds": reporting.target(medians["cpu_seconds"], LIMIT)},
    }


def _import_once(python: Path, comfyui: Path, base: Path, pack: Path) -> dict:
    code = IN_COMFYUI.format(comfyui=str(comfyui.resolve()), base=str(base), pack=str(pack))
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, env=clean_environ(), cwd=comfyui, check=False
    )
    if done.returncode:
        raise SystemExit(f"the import failed:\n{done.stderr}")
    run = json.loads(done.stdout.splitlines()[-1])
    if not run["loaded"]:
        raise SystemExit(f"ComfyUI did not load the pack:\n{done.stderr}")
    return run


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    return reporting.told(figures(Path(sys.executable), options.comfyui), options, _as_text)


def _as_text(result: dict) -> str:
    medians, target = result["medians"], result["targets"]["cpu_seconds"]
    word = "met" if target["met"] else "MISSED"
    times = f"{medians['seconds']:.3f} s, {medians['cpu_seconds']:.3f} s of it computing"
    return f"import: {times} (medians of {len(result['runs'])}), target <= {target['limit']} s {word}"


if __name__ == "__main__":
    sys.exit(main())
