"""What GGUF files cost: `python -m benchmarks gguf --pack DIR --ggml FILE`.

load: a file of each type through Load Diffusion Model, against ComfyUI-GGUF (`--pack`, a checkout of city96/ComfyUI-GGUF) and
ComfyUI's own loader on the bf16 file they were made of: seconds of computing, memory, a call in fp32 and its error.
types: the relative error of trained weights in each type, and held in 16 or 8 bits; values unpacked a second, against the
library `gguf` asked for a whole weight at once.

`--ggml` is a libggml-base of whisper.cpp or llama.cpp, which can quantize to every type (`pip download pywhispercpp` has one);
the library can to a few only. Each load is a process of its own, the sides take turns; files are in the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from setup import machine
from setup.comfyui_server import make_base_directory
from setup.environment import ROOT, Environment, clean_environ, write_models

from . import reporting
from .files import MODELS
from .measure import set_up, timed, weight_bytes

MODEL = "wan_1_3b_part"
BY_THE_LIBRARY = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
BY_GGML = ("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS")
TRAINED = ROOT / "tests" / "assets" / "shapes.safetensors"
HELD = ("bf16", "fp16", "int8", "fp8_e4m3fn")
SPEED_SHAPE = (1536, 8960)


def main() -> int:
    options = _parse()
    environment = Environment(Path(sys.executable), options.comfyui.resolve())
    types = BY_GGML if options.ggml else BY_THE_LIBRARY
    job = {"ggml": str(options.ggml or ""), "pack": str(options.pack.resolve()) if options.pack else "", "types": types}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="halfsafe-gguf-") as folder:
        job["base"] = str(make_base_directory(Path(folder), ROOT))
        write_models(environment, Path(job["base"]) / "models" / "diffusion_models", MODEL)
        result = {"benchmark": "gguf", **machine.conditions(environment), "model": MODELS[MODEL], "pack": _commit(options.pack), "targets": {}}
        result["types"] = _in_process(environment, {**job, "measure": "types"})
        result["load"] = _loads(environment, job, options.runs)
    if options.save:
        reporting.save(result)
    print(json.dumps(result, indent=2) if options.json else _as_text(result))
    return 0


def _parse():
    parser = reporting.parser(__doc__)
    parser.add_argument("--pack", type=Path, metavar="DIR", help="a checkout of city96/ComfyUI-GGUF")
    parser.add_argument("--ggml", type=Path, metavar="FILE", help="a libggml-base, to quantize with")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", help="where to put the model files for the time being (3 GB)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def _commit(pack: Path | None) -> str:
    if pack is None:
        return "not given (--pack DIR)"
    command = ["git", "-C", str(pack), "log", "-1", "--format=ComfyUI-GGUF %h of %cs"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _loads(environment: Environment, job: dict, runs: int) -> list[dict]:
    """The fastest of some runs of each side, and the most memory that any of them took."""
    kinds = [kind for kind in ("Q8_0", "Q4_K", "Q4_0") if kind in job["types"]][:2]
    sides = [("ComfyUI", "bf16", "")]
    for kind in kinds:
        sides += [("Halfsafe", kind, "as_file"), ("Halfsafe", kind, "int8"), *([("ComfyUI-GGUF", kind, "")] if job["pack"] else [])]
        _in_process(environment, {**job, "measure": "write", "kind": kind})
    taken: dict[tuple, list[dict]] = {side: [] for side in sides}
    for run in range(runs):
        for side in sides[:: -1 if run % 2 else 1]:
            named = dict(zip(("side", "kind", "storage"), side, strict=True))
            taken[side].append(named | _in_process(environment, {**job, "measure": "load", **named}))
    return [{key: _best(key, [run[key] for run in found]) for key in found[0]} for found in taken.values()]


def _best(key: str, values: list) -> object:
    return min(values) if key.endswith("seconds") else max(values)


def _in_process(environment: Environment, job: dict):
    command = [str(environment.python), "-m", "benchmarks.gguf_files", "--measure", json.dumps(job)]
    environ = clean_environ(COMFYUI_DIR=str(environment.comfyui), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ, check=False)
    print(job["measure"], job.get("side", ""), job.get("kind", ""), done.stdout.strip()[-200:], file=sys.stderr, flush=True)
    if done.returncode:
        raise SystemExit(f"{job['measure']} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def write(job: dict) -> dict:
    """Write the model in one type as ComfyUI-GGUF's converter lays it out: matrices quantized, the rest F32."""
    from safetensors.torch import load_file
    from support import gguf_files

    folder = Path(job["base"]) / "models" / "diffusion_models"
    tensors = {}
    for name, weight in load_file(folder / f"{MODEL}.safetensors").items():
        whole = weight.dim() != 2 or weight.numel() <= 1024 or "modulation" in name
        tensors[name] = ("F32", weight.float().numpy()) if whole else (job["kind"], quantized(weight, job))
    return {"bytes": gguf_files.write(folder / f"{job['kind']}.gguf", tensors).stat().st_size}


def quantized(weight, job: dict):
    """The blocks of a weight in the job's type, by ggml where it is given: ``ggml_quantize_chunk`` of ggml.h."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from support import gguf_files

    if not job["ggml"]:
        return gguf_files.quantized(weight, job["kind"])
    kind, rows = GGMLQuantizationType[job["kind"]], np.ascontiguousarray(weight.float().numpy())
    block, size = GGML_QUANT_SIZES[kind]
    result = np.empty((rows.shape[0], rows.shape[1] // block * size), np.uint8)
    call = ctypes.CDLL(job["ggml"]).ggml_quantize_chunk
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    call(int(kind), rows.ctypes.data, result.ctypes.data, 0, *rows.shape, None)
    return result


def load(job: dict) -> dict:
    """Load with one side, and call the model twice in fp32: the first call brings a mapped file into memory."""
    import torch
    from support.denoise import denoise

    model, outputs = [], []
    loader = {"ComfyUI": _core, "Halfsafe": _halfsafe, "ComfyUI-GGUF": _pack}[job["side"]](job)
    figures = {f"load_{name}": value for name, value in timed(lambda: model.append(loader())).items()}
    model[0].set_model_compute_dtype(torch.float32)
    denoise(model[0])
    figures |= {f"call_{name}": value for name, value in timed(lambda: outputs.append(denoise(model[0]))).items()}
    reference = Path(job["base"]) / "reference.pt"
    if job["side"] == "ComfyUI":
        torch.save(outputs[0], reference)
    return figures | {"weight_bytes": weight_bytes(model[0]), "error": _error(torch.load(reference), outputs[0])}


def _core(job: dict):
    import nodes

    return lambda: nodes.UNETLoader().load_unet(f"{MODEL}.safetensors", "default")[0]


def _halfsafe(job: dict):
    from support import inprocess

    node = inprocess.node_classes(inprocess.load_pack())["HalfsafeLoadDiffusionModel"]
    return lambda: node.execute(f"{job['kind']}.gguf", job["storage"], "fp32").args[0]


def _pack(job: dict):
    import asyncio

    import nodes

    asyncio.run(nodes.load_custom_node(job["pack"], module_parent="custom_nodes"))
    node = nodes.NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]()
    return lambda: node.load_unet(f"{job['kind']}.gguf")[0]


def _error(reference, found) -> float:
    return round(((found.double() - reference.double()).norm() / reference.double().norm()).item(), 6)


def types(job: dict) -> list[dict]:
    """For each type: errors on trained weights, and the speed of unpacking one large weight."""
    import torch
    from safetensors.torch import load_file

    trained = [w.float() for w in load_file(TRAINED).values() if w.dim() == 2 and w.shape[1] % 256 == 0]
    large = torch.randn(SPEED_SHAPE, generator=torch.Generator().manual_seed(0)) * 0.02
    return [_type({**job, "kind": kind}, trained, large) for kind in job["types"]]


def _type(job: dict, trained: list, large) -> dict:
    import gguf
    import torch
    from halfsafe.precision.formats.gguf_weight import GgufWeight

    def packed(weight):
        return GgufWeight(job["kind"], tuple(weight.shape), torch.from_numpy(quantized(weight, job).reshape(-1)))

    found = [packed(weight) for weight in trained]
    row = {"type": job["kind"], "bits": round(8 * packed(large[:1]).data.numel() / large.shape[1], 2)}
    pairs = [(weight, blocks.rows(slice(0, len(weight)))) for weight, blocks in zip(trained, found, strict=True)]
    row["error"] = _relative(pairs)
    row |= {held: _relative([(weight, _held(weight, blocks, held)) for weight, blocks in zip(trained, found, strict=True)]) for held in HELD}
    whole = packed(large)
    data = whole.data.numpy().reshape(SPEED_SHAPE[0], -1)
    row["values_a_second"] = round(large.numel() / min(_seconds(lambda: whole.rows(slice(0, SPEED_SHAPE[0]))) for _ in range(3)))
    at_once = min(_seconds(lambda: gguf.quants.dequantize(data, gguf.GGMLQuantizationType[job["kind"]])) for _ in range(3))
    return row | {"values_a_second_at_once": round(large.numel() / at_once)}


def _held(weight, blocks, storage: str):
    """The values that a trained weight in a type has once it is held in a storage."""
    import torch
    from halfsafe.precision.formats.checkpoint import read_checkpoint
    from halfsafe.precision.formats.comfy_format import tensors_of
    from halfsafe.precision.formats.stored_weight import StoredWeight

    stored = StoredWeight("a.weight", torch.empty(weight.shape, dtype=torch.bfloat16, device="meta"), packed=blocks)
    return read_checkpoint(tensors_of(stored, storage, "trained"), {}, "trained").weights["a.weight"].dequantize(torch.float32)


def _relative(pairs: list) -> float:
    error = sum((found.double() - weight).square().sum().item() for weight, found in pairs)
    return round((error / sum(weight.double().square().sum().item() for weight, _ in pairs)) ** 0.5, 5)


def _seconds(work) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _as_text(result: dict) -> str:
    lines = [f"GGUF, {result['model']}; {result['pack']}"]
    for row in result["load"]:
        memory = f"{(row['load_anonymous_bytes'] or 0) / 1e9:.2f} GB at the peak, {row['weight_bytes'] / 1e9:.2f} GB of weights"
        named = f"{row['side']} {row['kind']} {row['storage']}"
        lines.append(f"  {named:28} load {row['load_cpu_seconds']:6.2f} s, call {row['call_cpu_seconds']:6.2f} s, error {row['error']:.4f}, {memory}")
    for row in result["types"]:
        held = ", ".join(f"{name} {row[name]:.4f}" for name in HELD)
        speed = f"{row['values_a_second'] / 1e6:.0f} million values a second, the library at once {row['values_a_second_at_once'] / 1e6:.0f}"
        lines.append(f"  {row['type']:7} {row['bits']:5} bits, error {row['error']:.4f}; held in {held}; {speed}")
    return "\n".join(lines)


def _measure(job: dict) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        set_up(Path(job["base"]))
        result = {"write": write, "load": load, "types": types}[job["measure"]](job)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(_measure(json.loads(sys.argv[2])) if sys.argv[1:2] == ["--measure"] else main())
