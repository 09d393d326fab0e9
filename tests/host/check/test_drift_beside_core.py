"""The check beside every node of ComfyUI's that keeps something between calls, or patches a model's calls: same bits, or left out."""

import functools
import importlib.util
import sys

import pytest
import torch
from support import families
from support.guarding import core, guarded, loaded_once, report_of

SIZES = {"wan": {"frames": 5}}
WINDOWS = (9, 4, "standard_static", 1, False, "pyramid", True)
NODES = {
    "EasyCache": ("wan", "nodes_easycache", "EasyCacheNode", (3.0, 0.0, 1.0, False)),
    "LazyCache": ("wan", "nodes_easycache", "LazyCacheNode", (3.0, 0.0, 1.0, False)),
    "Context Windows": ("wan", "nodes_context_windows", "WanContextWindowsManualNode", WINDOWS),
    "Skip Layer Guidance": ("wan", "nodes_slg", "SkipLayerGuidanceDiT", (3.0, 0.0, 1.0, "0", "0", 0.0)),
    "NAG": ("flux", "nodes_nag", "NAGuidance", (5.0, 0.5, 1.5)),
    "SAG": ("sdxl", "nodes_sag", "SelfAttentionGuidance", (0.8, 2.0)),
    "PAG": ("sdxl", "nodes_pag", "PerturbedAttentionGuidance", (2.0,)),
    "APG": ("sdxl", "nodes_apg", "APG", (1.0, 5.0, 0.5)),
    "TCFG": ("sdxl", "nodes_tcfg", "TCFG", ()),
    "Mahiro": ("sdxl", "nodes_mahiro", "Mahiro", ()),
    "FreSca": ("sdxl", "nodes_fresca", "FreSca", (1.0, 1.25, 20)),
    "CFG-Zero*": ("sdxl", "nodes_cfg", "CFGZeroStar", ()),
    "Rescale CFG": ("sdxl", "nodes_model_advanced", "RescaleCFG", (0.7,)),
    "FreeU": ("sdxl", "nodes_freelunch", "FreeU_V2", (1.3, 1.4, 0.9, 0.2)),
    "HyperTile": ("sdxl", "nodes_hypertile", "HyperTile", (256, 2, 0, False)),
    "ToMe": ("sdxl", "nodes_tomesd", "TomePatchModel", (0.3,)),
    "Deep Shrink": ("sdxl", "nodes_model_downscale", "PatchModelAddDownscale", (3, 2.0, 0.0, 0.35, True, "bicubic", "bicubic")),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(comfy, models_dir):
    return loaded_once(comfy, families.files_in(models_dir / "diffusion_models", "beside_core"))


@functools.cache
def as_the_server_loads_it(module):
    """A file of nodes under the name that ``load_custom_node`` of ComfyUI's nodes.py gives it: that of its path."""
    path = core(f"comfy_extras.{module}").__file__
    spec = importlib.util.spec_from_file_location(path.replace(".", "_x_"), path)
    loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    if module == "nodes_sag":  # its mask is of bits, and seldom shows in a toy's picture whose attention it is of
        blur = loaded.create_blur_map
        loaded.create_blur_map = lambda x, attention, *settings: blur(x, attention, *settings) + attention.float().std()
    return loaded


def patched(name, model):
    _, module, node, settings = NODES[name]
    node = getattr(as_the_server_loads_it(module), node)
    if hasattr(node, "execute"):
        return node.execute(model, *settings)[0]
    return getattr(node(), node.FUNCTION)(model, *settings)[0]


def sampled(family, model, lengths):
    conds = [
        families.conditioning(family, seed=seed, **({"length": length} if length else {}))
        for seed, length in zip((1, 2), lengths, strict=True)
    ]
    start = families.noise(model, **SIZES.get(family, {}))
    torch.manual_seed(5)
    return core("comfy.sample").sample(model, start, 6, 3.0, "euler", "simple", *conds, torch.zeros_like(start), seed=1)


OF_THE_SAMPLER = ("TCFG", "Mahiro", "FreSca", "CFG-Zero*", "Rescale CFG")
"""Nodes that change the results of calls as APG does, which runs each time."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.release) if name in OF_THE_SAMPLER else name for name in NODES]
)
def test_no_check_shows_in_a_picture_made_beside_a_node_of_comfyui(comfy, models, name):
    family, *_ = NODES[name]
    plain = models(family, None, "bf16")
    expected = sampled(family, patched(name, plain), (None, None))
    for order in ("before", "behind"):
        # "every 5th step" checks the first one too
        found = outcome(comfy, plain, name, family, order, "every 5th step", expected)
        assert found.startswith(("same bits", "left out")), f"guard {order}: {found}"


def outcome(comfy, plain, name, family, order, check, expected):
    if order == "before":
        model = patched(name, guarded(comfy, plain, check=check))
    else:
        model = guarded(comfy, patched(name, plain), check=check)
    found = sampled(family, model, (None, None))
    checks = report_of(model).checks
    left_out = {each.left_out for each in checks}
    if not checks or not torch.equal(expected, found):
        return f"differs by {(found - expected).abs().max().item():.1e}, {len(checks)} checks"
    return f"left out: {left_out}" if left_out != {""} else f"same bits, {len(checks)} checks"
