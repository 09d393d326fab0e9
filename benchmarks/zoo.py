"""`apply` and `restore` on model classes of transformers, diffusers and torchvision, small and random, in fp32.

`python -m benchmarks zoo [NAMES ...] [--json] [--save]`. Each class runs under each setting, beside itself without one. Held
to: results are finite and their error is below the setting's limit; a state dict taken while something is applied has the
names, shapes and dtypes of before, and a plain model that it is loaded into gives the results of the stored weights; a deep
copy gives equal results; `restore` gives back every bit and every class. What is not installed is skipped, and said.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from setup import machine
from setup.environment import ROOT, Environment
from torch.utils._pytree import tree_leaves

from . import reporting

SETTINGS = {
    **{f"storage {name}": ({"storage": name}, limit) for name, limit in (("fp8_e4m3fn", 0.25), ("fp8_e5m2", 0.5), ("bf16", 0.03), ("fp16", 0.01))},
    **{f"compute {name}": ({"compute": name}, limit) for name, limit in (("bf16", 0.06), ("fp16", 0.03), ("fp16_safe", 0.01), ("fp32", 1e-5))},
    "fp8_e4m3fn, fp16_safe": ({"storage": "fp8_e4m3fn", "compute": "fp16_safe"}, 0.25),
}
"""Setting -> its arguments, and the relative error that a random model may have."""

OVERFLOWS = {("swin_v2_t", "compute fp16")}
"""What is not run: random weights overflow in fp16 by the module's own ``half()`` too."""

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size", "output_dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "n_inner", "moe_intermediate_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    **{"num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "vocab_size": 128, "image_size": 64, "patch_size": 8, "max_position_embeddings": 128},
    **{"n_positions": 128, "max_source_positions": 50, "projection_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""What a transformers configuration is made small by, where it has such a number."""



def _names(text: str) -> list[str]:
    return text.split()


TRANSFORMERS = _names("""
albert bart beit bert blenderbot bloom clip clip_text_model clip_vision_model convnextv2 data2vec-text deberta-v2 deit dinov2 distilbert
electra falcon gemma gemma2 gemma3_text gpt2 gpt_neox hubert llama mamba mistral mixtral mobilenet_v2 modernbert mpnet mt5 olmo2 opt
pegasus phi phi3 qwen2 qwen2_moe qwen3 resnet roberta segformer siglip_vision_model t5 umt5 vit wav2vec2 whisper xglm
""")

TORCHVISION = _names("""
convnext_tiny densenet121 efficientnet_b0 mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18 resnext50_32x4d
shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t
""")

BLOCKS = {"block_out_channels": (32, 64), "norm_num_groups": 8}
DOWN, UP = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
CROSS = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32, "attention_head_dim": 8}
HEADS = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
CODES = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4}
FLUX = {"in_channels": 16, "num_single_layers": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
IMAGE, LATENT, TEXT, ROWS = (1, 3, 32, 32), (1, 4, 16, 16), (1, 7, 32), (1, 16, 16)

DIFFUSERS: dict[str, tuple[dict, dict]] = {
    "AutoencoderKL": ({**BLOCKS, **CODES}, {"sample": IMAGE}),
    "AutoencoderKLWan": ({"base_dim": 8, "z_dim": 4, "num_res_blocks": 1}, {"sample": (1, 3, 5, 16, 16)}),
    "AutoencoderTiny": ({}, {"sample": IMAGE}),
    "CogVideoXTransformer3DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16,
            "max_text_seq_length": 7, "sample_width": 16, "sample_height": 16, "sample_frames": 5},
        {"hidden_states": (1, 2, 4, 16, 16), "encoder_hidden_states": TEXT, "timestep": 500},
    ),
    "ControlNetModel": (
        {**BLOCKS, **CROSS, "conditioning_embedding_out_channels": (8, 16)},
        {"sample": LATENT, "timestep": 500, "encoder_hidden_states": TEXT, "controlnet_cond": (1, 3, 32, 32)},
    ),
    "DiTTransformer2DModel": ({**HEADS, "sample_size": 16, "norm_num_groups": 8}, {"hidden_states": LATENT, "timestep": 500, "class_labels": 3}),
    "FluxTransformer2DModel": (
        {**HEADS, **FLUX},
        {"hidden_states": ROWS, "encoder_hidden_states": TEXT, "pooled_projections": (1, 32), "timestep": 0.5, "img_ids": (16, 3), "txt_ids": (7, 3)},
    ),
    "LTXVideoTransformer3DModel": (
        {**HEADS, "in_channels": 16, "out_channels": 16, "cross_attention_dim": 64, "caption_channels": 32},
        {"hidden_states": ROWS, "encoder_hidden_states": TEXT, "timestep": 500, "encoder_attention_mask": (1, 7),
            "num_frames": [1], "height": [4], "width": [4]},
    ),
    "PixArtTransformer2DModel": (
        {**HEADS, "sample_size": 16, "norm_num_groups": 8, "caption_channels": 32, "cross_attention_dim": 64, "use_additional_conditions": False},
        {"hidden_states": LATENT, "encoder_hidden_states": TEXT, "timestep": 500, "added_cond_kwargs": [{"resolution": None, "aspect_ratio": None}]},
    ),
    "PriorTransformer": (
        {**HEADS, "embedding_dim": 32, "num_embeddings": 7},
        {"hidden_states": (1, 32), "timestep": 500, "proj_embedding": (1, 32), "encoder_hidden_states": TEXT},
    ),
    "SanaTransformer2DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 16, "cross_attention_dim": 64, "caption_channels": 32, "sample_size": 16},
        {"hidden_states": LATENT, "encoder_hidden_states": TEXT, "timestep": 500},
    ),
    "SD3Transformer2DModel": (
        {**HEADS, "sample_size": 16, "in_channels": 4, "joint_attention_dim": 32, "caption_projection_dim": 64, "pooled_projection_dim": 32, "out_channels": 4},
        {"hidden_states": LATENT, "encoder_hidden_states": TEXT, "pooled_projections": (1, 32), "timestep": 500},
    ),
    "UNet2DModel": ({**BLOCKS, "down_block_types": DOWN, "up_block_types": UP}, {"sample": IMAGE, "timestep": 500}),
    "UNet2DConditionModel": (
        {**BLOCKS, **CROSS, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        {"sample": LATENT, "timestep": 500, "encoder_hidden_states": TEXT},
    ),
    "VQModel": ({**BLOCKS, **{**CODES, "latent_channels": 3}, "num_vq_embeddings": 32}, {"sample": IMAGE}),
    "WanTransformer3DModel": (
        {**HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 16, "ffn_dim": 128},
        {"hidden_states": (1, 4, 2, 8, 8), "encoder_hidden_states": TEXT, "timestep": 500},
    ),
}
"""Class -> its sizes, and its inputs: the shape of random numbers, one number for a tensor of it, or a list of what is not random."""


def of_transformers(name: str) -> tuple[torch.nn.Module, Callable]:
    """Make the base model of a transformers model type, with the inputs that its class names."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(name)
    for part in (config, *(getattr(config, key) for key in config.sub_configs)):
        for key, value in SMALL.items():
            if type(getattr(part, key, None)) in (int, type(None)) and key in vars(part):
                setattr(part, key, value)
    model = AutoModel.from_config(config)
    given = {"input_ids": torch.arange(3, 27).view(2, 12), "pixel_values": torch.randn(2, 3, 64, 64), "input_values": torch.randn(1, 4000)}
    given["input_features"] = torch.randn(1, 80, 100)
    inputs = {model.main_input_name: given[model.main_input_name]}
    if name in ("clip", "siglip"):
        inputs |= {"input_ids": given["input_ids"], "pixel_values": given["pixel_values"]}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = given["input_ids"]
    return model, lambda model: model(**inputs)


def of_torchvision(name: str) -> tuple[torch.nn.Module, Callable]:
    """Make a classifier of torchvision."""
    import torchvision

    model, picture = torchvision.models.get_model(name, weights=None), torch.randn(2, 3, 64, 64)
    return model, lambda model: model(picture)


def of_diffusers(name: str) -> tuple[torch.nn.Module, Callable]:
    """Make a model of diffusers."""
    import diffusers

    sizes, wanted = DIFFUSERS[name]
    model, inputs = getattr(diffusers, name)(**sizes), {key: _input(value) for key, value in wanted.items()}
    return model, lambda model: model(**inputs)


def _input(value: Any) -> Any:
    if isinstance(value, list):
        return value[0]
    return torch.randn(value) if isinstance(value, tuple) else torch.tensor([value])


PACKAGES: dict[str, tuple[Callable, list[str]]] = {
    "transformers": (of_transformers, TRANSFORMERS),
    "diffusers": (of_diffusers, list(DIFFUSERS)),
    "torchvision": (of_torchvision, TORCHVISION),
}


def results(model: torch.nn.Module, call: Callable) -> list[torch.Tensor]:
    """Call a model, and return its floating results in fp64."""
    torch.manual_seed(0)
    with torch.no_grad():
        found = call(model)
    leaves = tree_leaves(found.to_tuple() if hasattr(found, "to_tuple") else found)
    return [leaf.double() for leaf in leaves if torch.is_tensor(leaf) and leaf.is_floating_point()]


def error(exact: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The relative error of all results together; inf where one is not finite."""
    one, other = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (exact, found))
    return ((other - one).norm() / one.norm().clamp_min(1e-30)).item() if other.isfinite().all() else float("inf")


def judge(plain: torch.nn.Module, call: Callable, arguments: dict, limit: float) -> tuple[float, list[str]]:
    """Apply one setting to a copy of a model; return its error, and what is not as it should be."""
    from halfsafe.precision import apply, restore

    exact, model = results(plain, call), copy.deepcopy(plain)
    rules = f"* storage={arguments['storage']}" if "storage" in arguments else ""
    apply(model, **arguments, rules=rules, keep=True)
    found = results(model, call)
    problems = list(_while_applied(model, plain, call, found, arguments))
    restore(model)
    before, after = plain.state_dict(), model.state_dict()
    if list(after) != list(before) or not all(torch.equal(after[name], before[name]) for name in before):
        problems.append("not restored")
    if [type(inner) for inner in model.modules()] != [type(inner) for inner in plain.modules()] or error(exact, results(model, call)):
        problems.append("another model after restore")
    measured = error(exact, found)
    return measured, problems if measured <= limit else [f"error {measured:.2g}", *problems]


def _while_applied(model: torch.nn.Module, plain: torch.nn.Module, call: Callable, found: list[torch.Tensor], arguments: dict) -> Iterator[str]:
    if error(found, results(copy.deepcopy(model), call)):
        yield "a deep copy differs"
    state = model.state_dict()
    if _kinds(state) != _kinds(plain.state_dict()):
        yield "another state dict"
        return
    loaded = copy.deepcopy(plain)
    loaded.load_state_dict(state)
    if "compute" not in arguments and error(found, results(loaded, call)) > 1e-5:
        yield "the state dict holds other weights"


def _kinds(state: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


def judge_all(make: Callable, name: str) -> tuple[dict[str, float], list[str]]:
    """Make a model and judge it under every setting; return its errors, and what is not as it should be."""
    errors, problems = {}, []
    torch.manual_seed(0)
    try:
        model, call = make(name)
        _settle(model, call)
    except Exception as failed:
        return {}, [f"not made: {_told(failed)}"]
    for setting, (arguments, limit) in SETTINGS.items():
        if (name, setting) in OVERFLOWS:
            continue
        try:
            measured, wrong = judge(model, call, arguments, limit)
            errors[setting] = float(f"{measured:.2g}")
        except Exception as failed:
            wrong = [_told(failed)]
        problems += [f"{setting}: {problem}" for problem in wrong]
    return errors, problems


def _settle(model: torch.nn.Module, call: Callable) -> None:
    """Give a random model what training gives it: numbers where all are zero, and batch norms that know their inputs."""
    for weight in model.parameters():
        if weight.dim() > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.02)
    norms = [inner for inner in model.modules() if isinstance(inner, torch.nn.BatchNorm2d)]
    model.eval()
    for norm in norms:
        norm.momentum = 0.5
        norm.train()
    results(model, call)
    model.eval()


def _told(failed: Exception) -> str:
    return f"{type(failed).__name__}: {failed}".splitlines()[0]


def run(names: list[str]) -> dict:
    """Judge every class that is installed under every setting, or those named."""
    errors, problems, skipped, versions = {}, [], {}, {}
    for package, (make, classes) in PACKAGES.items():
        try:
            versions[package] = importlib.import_module(package).__version__
        except ImportError as missing:
            skipped[package] = str(missing)
            continue
        for name in classes:
            if names and name not in names:
                continue
            errors[f"{package} {name}"], wrong = judge_all(make, name)
            problems += [f"{package} {name}, {problem}" for problem in wrong]
            print(f"{package} {name}", *wrong, sep="\n  ", file=sys.stderr, flush=True)
    return {"versions": versions, "skipped": skipped, "problems": problems, "errors": errors}


def table(result: dict) -> str:
    """The table of `benchmarks/README.md`: for each setting the median and the largest error, and whose that is."""
    lines = ["| setting | median error | largest error |", "|---|---|---|"]
    for setting in SETTINGS:
        errors = {name: row[setting] for name, row in result["errors"].items() if setting in row}
        if errors:
            worst = max(errors, key=lambda name: errors[name])
            lines.append(f"| {setting} | {statistics.median(errors.values()):.1e} | {errors[worst]:.1e}, {worst} |")
    skipped = [f"{package} is not here: {why}" for package, why in result["skipped"].items()]
    return "\n".join([*lines, f"{len(result['errors'])} classes", *skipped, *result["problems"]])


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("names", nargs="*", help="classes to run (default: all)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    import conftest  # noqa: F401  it makes the pack importable as `halfsafe`

    warnings.simplefilter("ignore")
    conditions = machine.conditions(Environment(Path(sys.executable), options.comfyui))
    found = run(options.names)
    result = {**conditions, "benchmark": "zoo", **found, "targets": {"problems": reporting.target(len(found["problems"]), 0)}}
    return reporting.told(result, options, table)


if __name__ == "__main__":
    sys.exit(main())
