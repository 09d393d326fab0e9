"""Other packs' loaders on the same file: `python scripts/bench_peers.py --comfyui DIR --peers CHECKOUT... [--save]`.

A bf16 file with the shapes of Wan2.1 1.3B is loaded to fp8 by ComfyUI's UNETLoader, by Halfsafe and by each peer, each in
a process of its own, in turns. Peers are checkouts of their packs, with what they require installed; one that is not
there, does not load, or has no loader that is known here is left out and named.

Seconds and peak anonymous memory are of the load. The error is that of one denoiser call in fp32 against the file's bf16
weights, also in fp32: what is left is what the storage costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from comfyui_server import make_base_directory
from environment import ROOT, Environment, clean_environ

RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
PEER_LOADERS = {
    "DiffusionModelLoaderKJ": (
        "patch_and_load",
        {"compute_dtype": "default", "patch_cublaslinear": False, "sage_attention": "disabled", "enable_fp16_accumulation": False},
    ),
}
OWN = ("reference", "UNETLoader", "Halfsafe")
STORAGE = "fp8_e4m3fn"


class NoPeer(Exception):
    """A peer cannot take part."""


def load_reference(path: Path):
    import nodes

    return nodes.UNETLoader().load_unet(path.name, "default")[0]


def load_core(path: Path):
    import nodes

    return nodes.UNETLoader().load_unet(path.name, STORAGE)[0]


def load_halfsafe(path: Path):
    from support import inprocess

    node = inprocess.node_classes(inprocess.load_pack())["HalfsafeLoadDiffusionModel"]
    return node.execute(path.name, STORAGE, "auto").args[0]


def peer_loader(folder: Path):
    """A function that loads a file with a peer's loader.

    Raises:
        NoPeer: the checkout is missing, does not load here, or its loader is not known.
    """
    import nodes

    if not (folder / "__init__.py").is_file():
        raise NoPeer(f"{folder.name}: there is no pack in this folder")
    if not asyncio.run(nodes.load_custom_node(str(folder), module_parent="custom_nodes")):
        raise NoPeer(f"{folder.name}: ComfyUI cannot import it here")
    known = [name for name in PEER_LOADERS if name in nodes.NODE_CLASS_MAPPINGS]
    if not known:
        raise NoPeer(f"{folder.name}: has none of the loaders {', '.join(PEER_LOADERS)}")
    method, settings = PEER_LOADERS[known[0]]
    node = nodes.NODE_CLASS_MAPPINGS[known[0]]()
    return lambda path: getattr(node, method)(model_name=path.name, weight_dtype=STORAGE, **settings)[0]


def measure(side: str, path: Path, base: Path, result: Path) -> dict:
    """Load and call once, in a process that has not imported ComfyUI yet; `result` gets or holds the reference's output."""
    sys.path[:] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), *(folder for folder in sys.path if Path(folder) != ROOT)]
    importlib.import_module("conftest")
    from support import inprocess

    inprocess.setup_comfyui(Path(os.environ["COMFYUI_DIR"]), base, "--cpu")
    importlib.import_module("nodes")
    import torch
    from measure import _timed, _weight_bytes
    from support.denoise import denoise

    try:
        load = {"reference": load_reference, "UNETLoader": load_core, "Halfsafe": load_halfsafe}.get(side) or peer_loader(Path(side))
    except NoPeer as error:
        return {"left_out": str(error)}
    model = []
    figures = _timed(lambda: model.append(load(path)))
    figures["weight_bytes"] = _weight_bytes(model[0])
    model[0].set_model_compute_dtype(torch.float32)
    output = denoise(model[0])
    if side == "reference":
        torch.save(output, result)
    reference = torch.load(result)
    error = ((output - reference).norm() / reference.norm()).item()
    return figures | {"error": error if error == error else None}


def compare(environment: Environment, base: Path, peers: list[Path], runs: int) -> tuple[list[dict], list[str]]:
    """One row for each side with medians, and why any peer was left out."""
    path = base / "models" / "diffusion_models" / "wan_1_3b_shaped.safetensors"
    script = ROOT / "tests" / "support" / "tiny_models.py"
    subprocess.run([str(environment.python), str(script), str(path.parent), path.stem], check=True, env=clean_environ())
    taken, left_out = {side: [] for side in (*OWN, *map(str, peers))}, []
    for index in range(runs):
        for side in [side for side in taken if side != OWN[0] or index == 0]:
            figures = _child(environment, side, path, base)
            print(f"{Path(side).name}: {figures}", file=sys.stderr, flush=True)
            taken[side].append(figures)
            if "left_out" in figures:
                left_out.append(figures["left_out"])
        for side in [side for side, found in taken.items() if "left_out" in found[0]]:
            del taken[side]
    return [{"loader": Path(side).name, **_medians(found)} for side, found in taken.items()], left_out


def _medians(found: list[dict]) -> dict:
    rows = {key: [run[key] for run in found if run[key] is not None] for key in found[0]}
    return {key: statistics.median(values) if values else None for key, values in rows.items()}


def _child(environment: Environment, side: str, path: Path, base: Path) -> dict:
    environ = clean_environ(COMFYUI_DIR=str(environment.comfyui), PYTHONDONTWRITEBYTECODE="1")
    command = [str(environment.python), __file__, "--child", side, str(path), str(base), str(base / "reference.pt")]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def as_table(rows: list[dict]) -> str:
    lines = ["| loader | seconds | peak memory | weights | error of one call |", "|---|---|---|---|---|"]
    for row in rows:
        memory = "unknown" if row["anonymous_bytes"] is None else f"{row['anonymous_bytes'] / 1e9:.2f} GB"
        error = "NaN" if row["error"] is None else f"{row['error']:.4f}"
        lines.append(f"| {row['loader']} | {row['seconds']:.2f} | {memory} | {row['weight_bytes'] / 1e9:.2f} GB | {error} |")
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        with contextlib.redirect_stdout(io.StringIO()):
            result = measure(sys.argv[2], *map(Path, sys.argv[3:]))
        print(json.dumps(result))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=os.environ.get("COMFYUI_DIR"), help="a ComfyUI folder")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], metavar="CHECKOUT", help="folders of other packs")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", help="where to put the model file for the time being (3 GB)")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    options = parser.parse_args()
    if options.comfyui is None:
        parser.error("name a ComfyUI folder with --comfyui or COMFYUI_DIR")
    from bench import _conditions

    environment = Environment(Path(sys.executable), Path(options.comfyui).resolve())
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="halfsafe-peers-") as folder:
        base = make_base_directory(Path(folder), ROOT)
        rows, left_out = compare(environment, base, [peer.resolve() for peer in options.peers], options.runs)
    result = _conditions(environment) | {"benchmark": "peers", "runs": options.runs, "rows": rows, "left_out": left_out}
    if options.save:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(as_table(rows), *left_out, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
