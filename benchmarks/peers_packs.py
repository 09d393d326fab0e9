"""Other packs in this process: importing them as ComfyUI does, loading a model with each one's node, and what they raise.

Peers are checkouts; nothing of theirs is here. A loader is called by its node's own inputs, and an option that a node does
not offer is an answer, not a default.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent
KJ_DEFAULTS = {"patch_cublaslinear": False, "sage_attention": "disabled", "enable_fp16_accumulation": False}
OWN_STORAGE, OWN_COMPUTE = {"default": "as_file"}, {"default": "auto"}


class Cannot(Exception):
    """A node that is not there, does not import, or does not offer what is asked for."""


@dataclass
class Host:
    """ComfyUI in this process, its base directory, and the folders of the peers by name."""

    base: Path
    packs: dict[str, str]
    _own: dict = field(default_factory=dict)

    def import_side(self, side: str) -> None:
        """Import the pack of ``side``; ComfyUI is there already.

        Raises:
            Cannot: ComfyUI does not import it.
        """
        if side == "Halfsafe":
            from support import inprocess

            self._own = self._own or inprocess.node_classes(inprocess.load_pack())
        elif side in self.packs:
            import_pack(Path(self.packs[side]))

    def own(self, name: str, **inputs):
        """The model that one of Halfsafe's nodes returns."""
        self.import_side("Halfsafe")
        return self._own[name].execute(**inputs).args[0]

    def node(self, pack: str, name: str):
        """A peer's node, its pack imported when it is first asked for."""
        import nodes

        if name not in nodes.NODE_CLASS_MAPPINGS:
            self.import_side(pack)
        if name not in nodes.NODE_CLASS_MAPPINGS:
            raise Cannot(f"{pack} has no node {name}")
        return nodes.NODE_CLASS_MAPPINGS[name]()

    def attempt(self, work: Callable[[], dict]) -> dict:
        """What ``work`` returns, or `fails` with the error it raised, in words that name no folder of this machine."""
        try:
            return work()
        except Exception as error:
            return {"fails": self._words(error)}

    def _words(self, error: Exception) -> str:
        if isinstance(error, Cannot):
            return str(error)
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if any(folder in frame.filename for folder in self.packs.values())]
        frame = (theirs or frames)[-1]
        text = next(iter(str(error).splitlines()), "") or frame.line
        return f"{type(error).__name__}: {text.replace(str(self.base), '...')} ({Path(frame.filename).name}:{frame.lineno})"


def set_up(job: dict) -> Host:
    """ComfyUI for a job: `base`, `packs`, and `deps`, folders with what the peers import, behind everything else."""
    sys.path[:] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), *(folder for folder in sys.path if Path(folder) != ROOT)]
    sys.path += job["deps"]
    importlib.import_module("conftest")
    inprocess = importlib.import_module("support.inprocess")
    inprocess.setup_comfyui(Path(os.environ["COMFYUI_DIR"]), Path(job["base"]), "--cpu")
    for name in ("folder_paths", "nodes", "comfy_api.latest", "comfy.sd", "server"):
        importlib.import_module(name)
    return Host(Path(job["base"]), job["packs"])


def import_pack(folder: Path) -> None:
    """Import a pack as ComfyUI does.

    Raises:
        Cannot: it does not import, with what ComfyUI logs of it.
    """
    import nodes

    logged, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        if not asyncio.run(nodes.load_custom_node(str(folder), module_parent="custom_nodes")):
            raise Cannot(f"{logged[-1] if logged else 'ComfyUI does not import it'}".replace(str(folder), folder.name))
    finally:
        logging.getLogger().removeHandler(handler)


def load(host: Host, side: str, name: str, storage: str = "default", compute: str = "default", **options):
    """The model of a file in ComfyUI's `diffusion_models`, through the loader of ``side``.

    Raises:
        Cannot: the side has no such option; what the loader raises passes through.
    """
    return LOADERS[side](host, name, storage, compute, **options)


def load_comfyui(host: Host, name: str, storage: str, compute: str):
    import nodes

    loader = nodes.UNETLoader()
    _offered(loader, weight_dtype=storage)
    return with_core_compute(loader.load_unet(name, storage)[0], compute)


def with_core_compute(model, compute: str):
    """The model of ComfyUI's own ModelComputeDtype node."""
    from comfy_extras.nodes_model_advanced import ModelComputeDtype

    return model if compute == "default" else ModelComputeDtype().patch(model, compute)[0]


def load_halfsafe(host: Host, name: str, storage: str, compute: str):
    storage, compute = OWN_STORAGE.get(storage, storage), OWN_COMPUTE.get(compute, compute)
    return host.own("HalfsafeLoadDiffusionModel", model_name=name, storage=storage, compute=compute)


def load_kjnodes(host: Host, name: str, storage: str, compute: str, **options):
    loader = host.node("KJNodes", "DiffusionModelLoaderKJ")
    _offered(loader, weight_dtype=storage, compute_dtype=compute)
    return loader.patch_and_load(name, storage, compute, **{**KJ_DEFAULTS, **options})[0]


def load_gguf(host: Host, name: str, storage: str, compute: str):
    """``storage`` is what the file holds; the pack offers no compute dtype, so ComfyUI's node sets it."""
    return with_core_compute(host.node("GGUF", "UnetLoaderGGUF").load_unet(name)[0], compute)


def load_wrapper(host: Host, name: str, storage: str, compute: str):
    """``storage`` is the pack's `quantization`, ``compute`` its `base_precision`."""
    loader = host.node("WanVideoWrapper", "WanVideoModelLoader")
    quantization = {"default": "disabled"}.get(storage, storage)
    precision = {"default": "bf16"}.get(compute, compute)
    _offered(loader, quantization=quantization, base_precision=precision)
    return loader.loadmodel(name, precision, "main_device", quantization)[0]


LOADERS = {
    "ComfyUI": load_comfyui,
    "Halfsafe": load_halfsafe,
    "KJNodes": load_kjnodes,
    "GGUF": load_gguf,
    "WanVideoWrapper": load_wrapper,
}


def _offered(node, **wanted: str) -> None:
    inputs = node.INPUT_TYPES()["required"]
    for name, value in wanted.items():
        if value not in inputs[name][0]:
            raise Cannot(f"{type(node).__name__} has no {name} {value}")


def wrapper_call(host: Host, model, latent, sigma: float, context):
    """WanVideoWrapper's own model called as its sampler calls it, on the CPU: what it makes of the noisy latent."""
    import torch

    network = model.model.diffusion_model
    width = network.dim // network.num_heads
    sixth = width // 6
    rope = sys.modules[type(host.node("WanVideoWrapper", "WanVideoModelLoader")).__module__].rope_params
    freqs = torch.cat([rope(1024, width - 4 * sixth), rope(1024, 2 * sixth), rope(1024, 2 * sixth)], dim=1)
    tokens = latent.shape[2] * latent.shape[3] * latent.shape[4] // 4
    where = {"device": torch.device("cpu"), "freqs": freqs, "seq_len": tokens}
    with torch.inference_mode(), torch.autocast("cpu", dtype=model.model["dtype"]):
        flow = network([latent[0]], t=torch.tensor([sigma * 1000]), context=[context[0]], **where)[0]
    return latent - sigma * flow[None]


def as_comfyui_model(model):
    """The stored weights of WanVideoWrapper's model in ComfyUI's Wan, widened to bf16, which holds e4m3 and bf16 exactly."""
    import comfy.sd
    import torch

    weights = model.model.diffusion_model.state_dict()
    return comfy.sd.load_diffusion_model_state_dict({name: weight.to(torch.bfloat16) for name, weight in weights.items()})


def write_gguf(source: Path, target: Path) -> None:
    """A bf16 Wan file as Q8_0, in the types that ComfyUI-GGUF's converter and its patch of llama.cpp give each tensor."""
    import gguf
    from safetensors import safe_open

    writer = gguf.GGUFWriter(str(target), arch="wan")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    with safe_open(str(source), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  safe_open is no mapping
            tensor = file.get_tensor(name).float().numpy()
            kind = gguf.GGMLQuantizationType[gguf_type(name, tensor.shape)]
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_type(name: str, shape: tuple[int, ...]) -> str:
    """The type of a tensor in a Q8_0 file of Wan: vectors and small ones in F32, the embeddings and the head as they were."""
    if len(shape) != 2 or math.prod(shape) <= 1024 or "modulation" in name:
        return "F32"
    return "BF16" if name.startswith(("text_embedding.", "time_projection.", "time_embedding.", "head.")) else "Q8_0"
