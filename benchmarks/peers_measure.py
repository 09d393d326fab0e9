"""One measurement of bench_peers.py in a process of its own: `peers_measure.py JOB` takes JSON and prints JSON.

`JOB` names the `measure`, the `side` whose pack does the work, and the folders; see MEASURES and scripts/bench_peers.py.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent))

import peers_packs as packs
from measure import timed, weight_bytes

LARGE, TINY = "wan_1_3b_shaped", "wan"
STORAGES = ("default", "fp8_e4m3fn", "fp8_e5m2", "fp16", "bf16", "fp32")
COMPUTES = ("default", "fp16", "bf16", "fp32")
FLAGS = {
    "matmul.allow_fp16_accumulation": "fp16 accumulation",
    "matmul.allow_fp16_reduced_precision_reduction": "fp16 reduced-precision reduction",
    "matmul.allow_bf16_reduced_precision_reduction": "bf16 reduced-precision reduction",
    "matmul.allow_tf32": "TF32 products",
    "cudnn.allow_tf32": "TF32 convolutions",
}
ACCUMULATION = "matmul.allow_fp16_accumulation"


def load(host: packs.Host, job: dict) -> dict:
    """Seconds and memory of importing the pack, of a load and of a call in fp32; its error against the file's bf16 weights."""
    imported = _measured(lambda: host.import_side(job["side"]))
    model = []
    figures = {f"import_{name}": value for name, value in imported.items()} | _measured(lambda: model.append(packs.load(host, job["side"], job["file"], job["storage"])))
    figures["weight_bytes"] = weight_bytes(model[0])
    if job["side"] == "WanVideoWrapper":
        return figures | _wrapper_error(host, model[0])
    return figures | _call(host, model[0], job["side"] == "ComfyUI" and job["storage"] == "default")


def _measured(work: Callable) -> dict:
    """Seconds by the clock and of this process's computing, and peak anonymous memory above the start."""
    busy = []

    def counted() -> None:
        began = time.process_time()
        work()
        busy.append(time.process_time() - began)

    return timed(counted) | {"cpu_seconds": busy[0]}


def _call(host: packs.Host, model, is_reference: bool) -> dict:
    """The second of two calls is timed: the first also brings the weights of a mapped file into memory."""
    import torch
    from support.denoise import denoise

    model.set_model_compute_dtype(torch.float32)
    outputs = [denoise(model)]
    if is_reference:
        torch.save(outputs[0], host.base / "reference.pt")
    timed = _measured(lambda: outputs.append(denoise(model)))
    figures = {f"call_{name}": value for name, value in timed.items()}
    return figures | {"error": _error(outputs[1], torch.load(host.base / "reference.pt"))}


def _wrapper_error(host: packs.Host, model) -> dict:
    """Its own call, or why there is none here; the error of its stored weights in ComfyUI's Wan."""
    import torch

    latent, context = torch.zeros(1, 16, 1, 8, 8), torch.zeros(1, 512, 4096)
    own = host.attempt(lambda: {"error": _error(packs.wrapper_call(host, model, latent, 0.7, context), latent)})
    found = _call(host, packs.as_comfyui_model(model), is_reference=False)
    return {"error": found["error"], "call_fails": own.get("fails")}


def _error(output, reference) -> float | None:
    """Relative error, None for anything that is not finite."""
    error = ((output.float() - reference).norm() / reference.norm()).item()
    return error if error == error and error != float("inf") else None


def options(host: packs.Host, job: dict) -> dict:
    """Error of one call of the small model for every weight dtype and compute dtype a loader offers, or why there is none."""
    from support.denoise import denoise

    reference = denoise(packs.load(host, "ComfyUI", f"{TINY}.safetensors", compute="fp32"))

    def attempt(storage: str, compute: str) -> dict:
        return {"error": _error(denoise(packs.load(host, job["side"], f"{TINY}.safetensors", storage, compute)), reference)}

    pairs = itertools.product(STORAGES, COMPUTES)
    return {"rows": [{"storage": s, "compute": c, **host.attempt(lambda s=s, c=c: attempt(s, c))} for s, c in pairs]}


def nan(host: packs.Host, job: dict) -> dict:
    """Four steps of each overflowing model: whether the picture is finite, and its error against fp32."""
    from support import families

    def attempt(name: str) -> dict:
        reference = families.sample(packs.load(host, "ComfyUI", name, compute="fp32"), TINY)
        model = packs.load(host, job["side"], name, job["storage"], job["compute"])
        if job.get("guard"):
            model = host.own("HalfsafeNaNGuard", model=model, on_nan="retry_higher", max_retries=8)
        picture = families.sample(model, TINY)
        return {"finite": bool(picture.isfinite().all()), "error": _error(picture, reference)}

    kinds = families.OVERFLOWS[TINY]
    return {"rows": [{"kind": kind, **host.attempt(lambda k=kind: attempt(f"{TINY}_{k}.safetensors"))} for kind in kinds]}


def accumulation(host: packs.Host, job: dict) -> dict:
    """torch's flags before a node, after it, inside of the call and after the run, for every start and every end."""
    ends = list(ENDS) if job["side"] != "WanVideoModelLoader" else ["finishes"]
    cases = itertools.product((False, True), (True, False), ends)
    rows = [_flag_case(host, job["side"], *case) for case in cases]
    return {"rows": rows, "two_models": host.attempt(lambda: _two_models(host, job["side"]))}


def _summed(host: packs.Host, node: str, on: bool):
    """The model of a node that asks for fp16 sums, or for none. The settings node gets a model whose loader left the flag alone."""
    if node == "WanVideoModelLoader":
        return packs.load(host, "WanVideoWrapper", f"{LARGE}.safetensors", "fp8_e4m3fn", "fp16_fast" if on else "fp16")
    if node == "DiffusionModelLoaderKJ":
        return packs.load(host, "KJNodes", f"{TINY}.safetensors", "fp16", enable_fp16_accumulation=on)
    if node == "ModelPatchTorchSettings":
        plain = packs.load(host, "KJNodes", f"{TINY}.safetensors", "fp16", enable_fp16_accumulation=read_flags()[ACCUMULATION])
        return host.node("KJNodes", node).patch(plain, on)[0]
    return _summing(host, packs.load(host, "Halfsafe", f"{TINY}.safetensors", "fp16", "fp16"), on)


def _summing(host: packs.Host, model, on: bool):
    """The model of the Accumulation node, whatever else it offers as it is by default."""
    wanted = {"reduced_precision_reduction": "unchanged", "tf32": "unchanged", "fp8_fast_accumulation": "auto", "attention": "auto"}
    return host.own("HalfsafeAccumulation", model=model, fp16_accumulation="on" if on else "off", **wanted)


def read_flags() -> dict[str, bool]:
    """torch's own switches by name, read from torch."""
    import torch

    owners = {"matmul": torch.backends.cuda.matmul, "cudnn": torch.backends.cudnn}
    return {name: getattr(owners[name.split(".")[0]], name.split(".")[1]) for name in FLAGS}


def _write_accumulation(value: bool) -> None:
    import torch

    torch.backends.cuda.matmul.allow_fp16_accumulation = value


def _flag_case(host: packs.Host, node: str, started: bool, on: bool, end: str) -> dict:
    """``started``: the flag's value before, as `--fast fp16_accumulation` or nothing leaves it."""
    _write_accumulation(started)
    before, inside = read_flags(), []
    row = {"started": started, "asked": on, "end": end}

    def run() -> dict:
        model = _summed(host, node, on)
        row["after_node"] = read_flags()[ACCUMULATION]
        return {"run": ENDS[end](_ending(model, inside, end))}

    row |= host.attempt(run)
    after = read_flags()
    changed = {name for name in FLAGS if inside and inside[0][name] != before[name]}
    found = {"inside": inside[0][ACCUMULATION] if inside else None, "after": after[ACCUMULATION]}
    return row | found | {"sets": sorted(changed), "restored": after == before}


def _ending(model, inside: list, end: str):
    """A clone that notes the flags in its call, and then goes on, raises, or is interrupted as by the page's button."""
    import comfy.model_management
    from comfy.patcher_extension import WrappersMP

    def run(executor, *args, **kwargs):
        inside.append(read_flags())
        if end == "raises":
            raise MemoryError("on purpose")
        if end == "is interrupted":
            comfy.model_management.interrupt_current_processing()
        return executor(*args, **kwargs)

    if isinstance(model.model.model_config, comfy.supported_models_base.BASE):
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "bench", run)
        return clone
    raise packs.Cannot("not called: its model does not run on a CPU")


def _finish(model) -> str:
    from support import families

    families.sample(model, TINY, steps=1)
    return "finished"


def _fail(model) -> str:
    with contextlib.suppress(MemoryError):
        return _finish(model)
    return "raised"


def _interrupt(model) -> str:
    import comfy.model_management

    try:
        return _finish(model)
    except comfy.model_management.InterruptProcessingException:
        return "interrupted"


ENDS = {"finishes": _finish, "raises": _fail, "is interrupted": _interrupt}


def _two_models(host: packs.Host, node: str) -> dict:
    """One prompt with a model that asks for fp16 sums and one that asks for none: the flag in the call of each."""
    if node == "WanVideoModelLoader":
        raise packs.Cannot("not called: its model does not run on a CPU")
    _write_accumulation(False)
    models = {"on": _summed(host, node, True), "off": _summed(host, node, False)}
    found = {}
    for name, model in models.items():
        inside = []
        _finish(_ending(model, inside, "finishes"))
        found[name] = inside[0][ACCUMULATION]
    _write_accumulation(False)
    return {**found, "right": found == {"on": True, "off": False}}


def overhead(host: packs.Host, job: dict) -> dict:
    """Seconds of computing of 20 steps with each node that sets flags, against the same run without, in turns in this process."""
    from support import families

    sides = {"none": packs.load(host, "Halfsafe", f"{TINY}.safetensors", "fp16", "fp16")}
    sides["HalfsafeAccumulation"] = _summing(host, sides["none"], True)
    if "KJNodes" in host.packs:
        sides["ModelPatchTorchSettings"] = host.node("KJNodes", "ModelPatchTorchSettings").patch(sides["none"], True)[0]
    taken = {name: [] for name in sides}
    for index in range(job["pairs"] + 1):
        for name in sorted(sides, reverse=bool(index % 2)):
            start = time.process_time()
            families.sample(sides[name], TINY, steps=20)
            taken[name].append(time.process_time() - start)
    medians = {name: statistics.median(times[1:]) for name, times in taken.items()}
    return {"rows": [{"node": name, "cpu_seconds": value, "ratio": value / medians["none"]} for name, value in medians.items()]}


def fp8_product(host: packs.Host, job: dict) -> dict:
    """Error of a product with fp8 operands where one channel of the activation is 1000 times larger."""
    import torch
    from torch.nn.functional import linear

    module = _fp8_layer(host, job["side"])
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 3] *= 1000
    weight = module.weight.dequantize() if hasattr(module.weight, "dequantize") and hasattr(module.weight, "_qdata") else module.weight
    with torch.inference_mode():
        reference = linear(x.float(), weight.float(), module.bias.float())
        output = PRODUCTS[job["side"]](module, x.clone())
    return {"error": _error(output, reference), "layer": f"{type(module).__module__}.{type(module).__qualname__}"}


def _fp8_layer(host: packs.Host, side: str):
    if side == "WanVideoWrapper":
        layer = packs.load(host, "ComfyUI", f"{TINY}.safetensors", "fp8_e4m3fn").model.diffusion_model.blocks[0].ffn[0]
        host.node(side, "WanVideoModelLoader")
        return layer
    storage, compute = ("fp8_e4m3fn", "fp8") if side == "Halfsafe" else ("fp8_e4m3fn_fast", "default")
    return packs.load(host, side, f"{TINY}.safetensors", storage, compute).model.diffusion_model.blocks[0].ffn[0]


def _own_product(module, x):
    from halfsafe.nodes.host.run.compute import Fp8Linear

    return Fp8Linear(module)(x)


def _core_product(module, x):
    import comfy.ops

    return comfy.ops.fp8_linear(module, x)


def _wrapper_product(module, x):
    import torch

    found = [m for name, m in sys.modules.items() if "WanVideoWrapper" in name and name.endswith("nodes")]
    forward = importlib.import_module(f"{found[0].__package__}.fp8_optimization").fp8_linear_forward
    return forward(module, torch.bfloat16, x[None])[0]


PRODUCTS = {"Halfsafe": _own_product, "ComfyUI": _core_product, "KJNodes": _core_product, "WanVideoWrapper": _wrapper_product}


def several(host: packs.Host, job: dict) -> dict:
    """Jobs whose figures do not depend on what else the process did, in one process: a row for each."""
    return {"rows": [{"name": part["name"], **_part(host, part)} for part in job["parts"]]}


def _part(host: packs.Host, part: dict) -> dict:
    os.environ.pop(PROFILE, None)
    if part["measure"] in SIMULATED:
        os.environ[PROFILE] = "sm_89"
    return host.attempt(lambda: MEASURES[part["measure"]](host, part))


def gguf_file(host: packs.Host, job: dict) -> dict:
    """Write the large file as Q8_0."""
    folder = host.base / "models" / "diffusion_models"
    packs.write_gguf(folder / f"{LARGE}.safetensors", folder / f"{LARGE}.gguf")
    return {"bytes": (folder / f"{LARGE}.gguf").stat().st_size}


def files(host: packs.Host, job: dict) -> dict:
    """Write the small model and those that overflow."""
    from support import families, tiny_models

    folder = host.base / "models" / "diffusion_models"
    clean = tiny_models.wan(folder / f"{TINY}.safetensors")
    for kind, factors in families.OVERFLOWS[TINY].items():
        families.write_scaled(clean, folder / f"{TINY}_{kind}.safetensors", factors)
    tiny_models.wan_1_3b_shaped(folder / f"{LARGE}.safetensors")
    return {}


MEASURES = {f.__name__: f for f in (load, options, nan, accumulation, overhead, fp8_product, several, gguf_file, files)}
SIMULATED, PROFILE = ("accumulation", "overhead", "fp8_product"), "HALFSAFE_DEVICE_PROFILE"


def main() -> None:
    """Do the job on the command line."""
    job = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(io.StringIO()):
        host = packs.set_up(job)
        logging.disable(logging.INFO)
        result = _part(host, job)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
