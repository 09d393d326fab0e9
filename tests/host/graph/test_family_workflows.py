"""The workflows of other models than Wan 2.1 run on a small model of their family: the fields, the links and the pack's nodes.

Text encoders of these families are too large to make small: their conditioning is random, of the family's shape. Pictures are decoded by the
small Wan VAE, whose latent most of them share. Qwen-Image 2.1 is newer than this ComfyUI: a small Qwen-Image goes through its workflow.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from setup.workflow import shrink, to_prompt
from support import families, model_files, rare_families, tiny_models

WORKFLOWS = Path(__file__).absolute().parents[3] / "workflows"
GUARDS = ("HalfsafeAutoPrecision", "HalfsafeNaNGuard")
OLD_CARDS = {
    "Halfsafe 6 - MiniMax H3 on an RTX 20 or V100": "sm_70",
    "Halfsafe 7 - Qwen-Image 2.1 without bf16": "sm_75",
}
"""Title -> a card that it is for."""
EXTRAS = ("model_advanced", "sd3", "hunyuan", "custom_sampler", "minimax_h3", "video", "audio", "flux")
SMALL = {"width": 64, "height": 64, "length": 5, "start_at_step": 1}


def _minimax(path: Path) -> Path:
    return rare_families.write("minimax_h3", path)


WRITERS = {
    "Halfsafe 6 - MiniMax H3 on an RTX 20 or V100": ("minimax_h3", _minimax),
    "Halfsafe 7 - Qwen-Image 2.1 without bf16": ("qwen_image", tiny_models.narrow_qwen_image),
    "Halfsafe 9 - Z-Image in int8 with a LoRA": ("z_image", tiny_models.narrow_z_image),
    "Halfsafe with Flux 1 dev": ("flux", tiny_models.flux),
    "Halfsafe with Krea 2 Turbo": ("krea2", tiny_models.krea2),
    "Halfsafe with MiniMax H3": ("minimax_h3", _minimax),
    "Halfsafe with Qwen-Image": ("qwen_image", tiny_models.narrow_qwen_image),
    "Halfsafe with Wan 2.2": ("wan", tiny_models.wan),
    "Halfsafe with Z-Image Turbo": ("z_image", tiny_models.narrow_z_image),
}
CLASSES = {
    "flux": "Flux",
    "krea2": "Krea2",
    "minimax_h3": "MiniMaxH3",
    "qwen_image": "QwenImage",
    "wan": "WAN21",
    "z_image": "Lumina2",
}


@pytest.fixture(scope="module")
def core(comfy) -> dict:
    """ComfyUI's nodes by id, with those of its extras that the workflows use."""
    import nodes
    from support.custom_nodes import qwen_image_21

    folder = Path(nodes.__file__).parent / "comfy_extras"
    for name in EXTRAS:
        assert asyncio.run(nodes.load_custom_node(str(folder / f"nodes_{name}.py"), module_parent="comfy_extras"))
    newer = (qwen_image_21.TextEncodeQwenImage21, qwen_image_21.QwenImage21Cache)
    return {**{node.__name__: node for node in newer}, **nodes.NODE_CLASS_MAPPINGS, **comfy.nodes}


@pytest.fixture(scope="module")
def parts(comfy, models_dir) -> dict:
    """A text encoder and a VAE for the node to guard."""
    tiny_models.clip_l(models_dir / "text_encoders" / "clip_l.safetensors")
    tiny_models.wan_vae(models_dir / "vae" / "wan_vae.safetensors")
    clip = comfy.core["CLIPLoader"]().load_clip("clip_l.safetensors", "sd3")[0]
    return {"clip": clip, "vae": comfy.core["VAELoader"]().load_vae("wan_vae.safetensors")[0]}


def info(core: dict) -> dict:
    """What the server tells of the nodes, as far as a workflow is read by it."""
    return {name: _described(node) for name, node in core.items()}


def _described(node: type) -> dict:
    if hasattr(node, "GET_NODE_INFO_V1"):
        return node.GET_NODE_INFO_V1()
    declared = node.INPUT_TYPES()
    return {
        "input": {
            group: {n: list(kind) for n, kind in fields.items()}
            for group, fields in declared.items()
            if group != "hidden"
        }
    }


class Run:
    """One prompt, executed node by node, with stand-ins for what is too large to make small."""

    def __init__(self, core: dict, prompt: dict, stand_ins: dict) -> None:
        self.core, self.prompt, self.stand_ins = core, prompt, stand_ins
        self.results: dict[str, tuple] = {}

    def output(self, node_id: str) -> tuple:
        if node_id not in self.results:
            node = self.prompt[node_id]
            inputs = {
                name: self.output(value[0])[value[1]] if isinstance(value, list) else value
                for name, value in node["inputs"].items()
            }
            stand_in = self.stand_ins.get(node["class_type"])
            self.results[node_id] = (
                stand_in(inputs) if stand_in else self._execute(self.core[node["class_type"]], inputs)
            )
        return self.results[node_id]

    @staticmethod
    def _execute(node: type, inputs: dict) -> tuple:
        result = node.execute(**inputs) if hasattr(node, "execute") else getattr(node(), node.FUNCTION)(**inputs)
        return tuple(result.args) if hasattr(result, "args") else result


def stand_ins(family: str, model, parts: dict, seen: list) -> dict:
    random = rare_families if family in ("minimax_h3", "krea2") else families
    positive = random.conditioning(family)

    def decoded(inputs: dict) -> tuple:
        latent = inputs["samples"]["samples"]
        seen.append(latent)
        if latent.is_nested:
            return (torch.zeros(1, 64, 64, 3),)
        picture = inputs["vae"].decode(latent.unsqueeze(2) if latent.ndim == 4 else latent)
        seen.append(picture)
        return (picture,)

    def asked(inputs: dict) -> tuple:
        assert inputs["clip"] is not parts["clip"], "the prompt's text encoder is not the guarded one"
        return positive, positive

    text = dict.fromkeys(("CLIPLoader", "DualCLIPLoader"), lambda inputs: (parts["clip"],))
    ends = dict.fromkeys(("SaveImage", "SaveVideo", "CreateVideo", "VAEDecodeAudio"), lambda inputs: (inputs,))
    made = {
        "UNETLoader": lambda inputs: (model.clone(),),
        "VAELoader": lambda inputs: (parts["vae"],),
        "VAEDecode": decoded,
    }
    latent = {"samples": rare_families.latent(family, model) * 0.0}
    of_21 = {"TextEncodeQwenImage21": asked, "QwenImage21Cache": lambda inputs: (inputs["model"],)}
    return made | {
        "CLIPTextEncode": asked,
        "MiniMaxH3ImageToVideo": lambda inputs: (positive, latent),
        **of_21,
        **text,
        **ends,
    }


def read(title: str, core: dict, **files: str) -> dict:
    """The prompt of a workflow, small, with other ``files`` by input name."""
    workflow = json.loads((WORKFLOWS / f"{title}.json").read_text(encoding="utf-8"))
    prompt = shrink(to_prompt(workflow, info(core)), **SMALL)
    return {
        node: {**step, "inputs": {name: files.get(name, value) for name, value in step["inputs"].items()}}
        for node, step in prompt.items()
    }


def nodes_of(prompt: dict, *kinds: str) -> list[str]:
    return [node for node, step in prompt.items() if step["class_type"] in kinds]


def reports(comfy, run: Run) -> list[dict]:
    """Run a whole prompt and return what each node that guards a model reports of it."""
    for node in run.prompt:
        run.output(node)
    guarded = [run.results[node][0] for node in nodes_of(run.prompt, *GUARDS)]
    return [json.loads(comfy.run("HalfsafeReport", model=one)[1]) for one in guarded]


def test_every_workflow_of_another_model_is_run() -> None:
    numbered_of_wan_and_the_pack = {path.stem for path in WORKFLOWS.glob("Halfsafe [1-58] - *.json")}
    assert set(WRITERS) == {path.stem for path in WORKFLOWS.glob("*.json")} - numbered_of_wan_and_the_pack


@pytest.mark.parametrize("title", WRITERS)
def test_it_runs_and_the_node_reports_the_family(title, comfy, core, parts, models_dir, monkeypatch):
    family, write = WRITERS[title]
    path = write(models_dir / "diffusion_models" / f"template_{family}.safetensors")
    lora = {f"layers.{layer}.attention.qkv": (768, 256) for layer in range(2)}
    save_file(model_files.lora(lora), str(models_dir / "loras" / "template.safetensors"))
    model, seen = families.stock(path), []
    prompt = read(title, core, model_name=path.name, lora_name="template.safetensors")
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", OLD_CARDS.get(title, ""))
    found = reports(comfy, Run(core, prompt, stand_ins(family, model, parts, seen)))
    assert seen and all(part.isfinite().all() for result in seen for part in result.unbind())
    for report in found:
        if title in OLD_CARDS:
            assert {layer["stream"] for layer in report["layers"]} == {"fp32"} and "fp16_wide" in {
                layer["mode"] for layer in report["layers"]
            }
        if "LoRA" in title:
            (layer,) = [layer for layer in report["layers"] if layer["name"] == "layers.0.attention.qkv"]
            assert layer["mode"] == "int8" and "LoRA" in layer["reason"], layer
        assert report["model"]["class"] == CLASSES[family] and report["guard"]["verdict"] == "clean"
        assert report["guard"]["calls"] > 0, "the node is not between the loader and the sampler"
