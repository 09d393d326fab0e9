"""ComfyUI's names of diffusion models with diffusers' names: which tensors, in which order, make
which.

The models are those that ComfyUI converts as it loads them (``convert_diffusers_mmdit`` and
``model_config_from_diffusers_unet`` in comfy/model_detection.py);
``tests/host/load/test_detection_diffusers.py`` holds the names against its own tables."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch

from ..base.errors import CheckpointError
from ..base.message import Message
from .joined import RowsOf

Shapes = Mapping[str, tuple[int, ...]]
Table = Mapping[str, str]
"""ComfyUI's layer -> the layers that it is joined of, with + between them; # stands for a number, ~
before a layer for swapped halves."""


def _inside(own: str, theirs: str, layers: Table) -> dict[str, str]:
    """Put the layers of a block below its names."""
    return {
        f"{own}.{layer}": "+".join(f"{theirs}.{part}" for part in parts.split("+")) for layer, parts in layers.items()
    }


_TIME = {
    "in_layer": "timestep_embedder.linear_1",
    "out_layer": "timestep_embedder.linear_2",
}
_FLUX = {
    **_inside(
        "double_blocks.#",
        "transformer_blocks.#",
        {
            "img_attn.qkv": "attn.to_q+attn.to_k+attn.to_v",
            "txt_attn.qkv": "attn.add_q_proj+attn.add_k_proj+attn.add_v_proj",
            "img_attn.proj": "attn.to_out.0",
            "txt_attn.proj": "attn.to_add_out",
            "img_attn.norm.query_norm": "attn.norm_q",
            "img_attn.norm.key_norm": "attn.norm_k",
            "txt_attn.norm.query_norm": "attn.norm_added_q",
            "txt_attn.norm.key_norm": "attn.norm_added_k",
            "img_mod.lin": "norm1.linear",
            "txt_mod.lin": "norm1_context.linear",
            "img_mlp.0": "ff.net.0.proj",
            "img_mlp.2": "ff.net.2",
            "txt_mlp.0": "ff_context.net.0.proj",
            "txt_mlp.2": "ff_context.net.2",
        },
    ),
    **_inside(
        "single_blocks.#",
        "single_transformer_blocks.#",
        {
            "linear1": "attn.to_q+attn.to_k+attn.to_v+proj_mlp",
            "linear2": "proj_out",
            "modulation.lin": "norm.linear",
            "norm.query_norm": "attn.norm_q",
            "norm.key_norm": "attn.norm_k",
        },
    ),
    **_inside("time_in", "time_text_embed", _TIME),
    **_inside("vector_in", "time_text_embed", {key: it.replace("timestep", "text") for key, it in _TIME.items()}),
    **_inside("guidance_in", "time_text_embed", {key: it.replace("timestep", "guidance") for key, it in _TIME.items()}),
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "~norm_out.linear",
}
_SD3_STREAM = {
    "adaLN_modulation.1": "norm1.linear",
    "attn.qkv": "attn.to_q+attn.to_k+attn.to_v",
    "attn.proj": "attn.to_out.0",
    "attn.ln_q": "attn.norm_q",
    "attn.ln_k": "attn.norm_k",
    "attn2.qkv": "attn2.to_q+attn2.to_k+attn2.to_v",
    "attn2.proj": "attn2.to_out.0",
    "attn2.ln_q": "attn2.norm_q",
    "attn2.ln_k": "attn2.norm_k",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
}
_SD3_CONTEXT = {
    "adaLN_modulation.1": "norm1_context.linear",
    "attn.qkv": "attn.add_q_proj+attn.add_k_proj+attn.add_v_proj",
    "attn.proj": "attn.to_add_out",
    "attn.ln_q": "attn.norm_added_q",
    "attn.ln_k": "attn.norm_added_k",
    "mlp.fc1": "ff_context.net.0.proj",
    "mlp.fc2": "ff_context.net.2",
}
_MLP = {"mlp.0": "linear_1", "mlp.2": "linear_2"}
_SD3 = {
    **_inside("joint_blocks.#.x_block", "transformer_blocks.#", _SD3_STREAM),
    **_inside("joint_blocks.#.context_block", "transformer_blocks.#", _SD3_CONTEXT),
    **_inside("t_embedder", "time_text_embed.timestep_embedder", _MLP),
    **_inside("y_embedder", "time_text_embed.text_embedder", _MLP),
    "context_embedder": "context_embedder",
    "x_embedder.proj": "pos_embed.proj",
    "pos_embed": "pos_embed.pos_embed",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "~norm_out.linear",
}
_AURAFLOW = {
    **_inside(
        "double_layers.#",
        "joint_transformer_blocks.#",
        {
            **{f"attn.w2{leaf}": f"attn.to_{leaf}" for leaf in "qkv"},
            **{f"attn.w1{leaf}": f"attn.add_{leaf}_proj" for leaf in "qkv"},
            "attn.w2o": "attn.to_out.0",
            "attn.w1o": "attn.to_add_out",
            "modX.1": "norm1.linear",
            "modC.1": "norm1_context.linear",
            "mlpX.c_fc1": "ff.linear_1",
            "mlpX.c_fc2": "ff.linear_2",
            "mlpX.c_proj": "ff.out_projection",
            "mlpC.c_fc1": "ff_context.linear_1",
            "mlpC.c_fc2": "ff_context.linear_2",
            "mlpC.c_proj": "ff_context.out_projection",
        },
    ),
    **_inside(
        "single_layers.#",
        "single_transformer_blocks.#",
        {
            **{f"attn.w1{leaf}": f"attn.to_{leaf}" for leaf in "qkv"},
            "attn.w1o": "attn.to_out.0",
            "modCX.1": "norm1.linear",
            "mlp.c_fc1": "ff.linear_1",
            "mlp.c_fc2": "ff.linear_2",
            "mlp.c_proj": "ff.out_projection",
        },
    ),
    **_inside("t_embedder", "time_step_proj", _MLP),
    "positional_encoding": "pos_embed.pos_embed",
    "register_tokens": "register_tokens",
    "cond_seq_linear": "context_embedder",
    "init_x_linear": "pos_embed.proj",
    "final_linear": "proj_out",
    "modF.1": "~norm_out.linear",
}
_PIXART = {
    **_inside(
        "blocks.#",
        "transformer_blocks.#",
        {
            "attn.qkv": "attn1.to_q+attn1.to_k+attn1.to_v",
            "attn.proj": "attn1.to_out.0",
            "cross_attn.q_linear": "attn2.to_q",
            "cross_attn.kv_linear": "attn2.to_k+attn2.to_v",
            "cross_attn.proj": "attn2.to_out.0",
            "mlp.fc1": "ff.net.0.proj",
            "mlp.fc2": "ff.net.2",
            "scale_shift_table": "scale_shift_table",
        },
    ),
    **_inside("csize_embedder", "adaln_single.emb.resolution_embedder", _MLP),
    **_inside("ar_embedder", "adaln_single.emb.aspect_ratio_embedder", _MLP),
    **_inside("t_embedder", "adaln_single.emb.timestep_embedder", _MLP),
    "x_embedder.proj": "pos_embed.proj",
    "y_embedder.y_embedding": "caption_projection.y_embedding",
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "t_block.1": "adaln_single.linear",
    "final_layer.linear": "proj_out",
    "final_layer.scale_shift_table": "scale_shift_table",
}
_Z_IMAGE_BLOCK = {
    "attention.qkv": "attention.to_q+attention.to_k+attention.to_v",
    "attention.out": "attention.to_out.0",
    "attention.q_norm": "attention.norm_q",
    "attention.k_norm": "attention.norm_k",
}
_Z_IMAGE = {
    **_inside("layers.#", "layers.#", _Z_IMAGE_BLOCK),
    **_inside("context_refiner.#", "context_refiner.#", _Z_IMAGE_BLOCK),
    **_inside("noise_refiner.#", "noise_refiner.#", _Z_IMAGE_BLOCK),
    "final_layer.linear": "all_final_layer.2-1.linear",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    "x_embedder": "all_x_embedder.2-1",
}
# In the order in which ComfyUI looks for them.
_TABLES: tuple[tuple[tuple[str, ...], Table], ...] = (
    (("joint_transformer_blocks.0.attn.add_k_proj.weight",), _AURAFLOW),
    (("adaln_single.emb.timestep_embedder.linear_1.bias", "pos_embed.proj.bias"), _PIXART),
    (("noise_refiner.0.attention.norm_k.weight",), _Z_IMAGE),
    (("x_embedder.weight", "time_text_embed.text_embedder.linear_1.weight"), _FLUX),
    (("transformer_blocks.0.attn.add_q_proj.weight", "pos_embed.proj.weight"), _SD3),
)
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET = {
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
}
_UNET_OF_CLASSES = {"label_emb.0.0": "class_embedding.linear_1", "label_emb.0.2": "class_embedding.linear_2"}
_UNET_PART = re.compile(r"(down|mid|up)_blocks?\.(?:(\d+)\.)?(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.*)")


def origins_of(shapes: Shapes, path) -> dict[str, RowsOf]:
    """Map ComfyUI's names of a model with diffusers' names to where their rows come from; empty for
    any other file.

    Tensors without a name in ComfyUI keep theirs.

    Raises:
        CheckpointError: a part of a fused tensor is missing.
    """
    if "controlnet_blocks.0.weight" in shapes or "controlnet_cond_embedding.conv_in.weight" in shapes:
        return {}
    table = next((table for names, table in _TABLES if shapes.keys() >= {*names}), None)
    named: Iterable[tuple[str, list[str]]]
    if table is not None:
        named = _named_by(table, shapes)
    elif "down_blocks.0.resnets.0.conv1.weight" in shapes:
        named = [*_named_by(_UNET, shapes), *_named_by(_UNET_OF_CLASSES, shapes), *_unet_blocks(shapes)]
    else:
        return {}
    found = {}
    for name, parts in named:
        sources = [part.removeprefix("~") for part in parts]
        if absent := [source for source in sources if source not in shapes]:
            problem = Message("lacks a part of {0}, which ComfyUI fuses of several tensors", name)
            raise CheckpointError(path, problem, absent[0], "Download the model again.")
        swapped = parts[0].startswith("~") or (table is _SD3 and _is_last_context(name, shapes))
        rows = shapes[sources[0]][0] if shapes[sources[0]] else 1
        found[name] = RowsOf(sources, torch.arange(rows).roll(rows // 2) if swapped else None)
    taken = {source for origin in found.values() for source in origin.names}
    return found | {name: RowsOf([name]) for name in shapes if name not in taken}


def _named_by(table: Table, names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    for own, theirs in table.items():
        parts = theirs.split("+")
        pattern = re.escape(parts[0].removeprefix("~")).replace(r"\#", r"(?P<number>\d+)")
        first = re.compile(rf"{pattern}(?P<leaf>(\.weight|\.bias)?)")
        for found in filter(None, map(first.fullmatch, names)):
            number = found.groupdict().get("number", "")
            yield (
                own.replace("#", number) + found["leaf"],
                [part.replace("#", number) + found["leaf"] for part in parts],
            )


def _is_last_context(name: str, shapes: Shapes) -> bool:
    """True for the modulation of SD3's last context block, whose halves are those of an output
    layer."""
    last = shapes["pos_embed.proj.weight"][0] // 64 - 1
    return name.startswith(f"joint_blocks.{last}.context_block.adaLN_modulation.1.")


def _unet_blocks(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    parts = {name: found for name in names if (found := _UNET_PART.fullmatch(name))}
    counts = Counter({(found[1], int(found[2] or 0), found[3], int(found[4])) for found in parts.values()})
    resnets = Counter((side, block) for side, block, kind, _ in counts if kind == "resnets")
    for name, (side, block, kind, number, rest) in ((name, found.groups()) for name, found in parts.items()):
        at = int(block or 0)
        inside = rest if kind != "resnets" else _RESNET[rest.rpartition(".")[0]] + "." + rest.rpartition(".")[2]
        if side == "mid":
            yield f"middle_block.{1 if kind == 'attentions' else 2 * int(number)}.{inside}", [name]
            continue
        place = int(number) if kind in ("resnets", "attentions") else resnets[side, at] - (side == "up")
        index = place + sum(resnets[side, each] + (side == "down") for each in range(at)) + (side == "down")
        within = {"resnets": 0, "attentions": 1, "downsamplers": 0}.get(kind)
        if within is None:  # an upsampler comes last in its block
            within = 2 if (side, at, "attentions", place) in counts else 1
        inside = inside.replace("conv.", "op.", 1) if kind == "downsamplers" else inside
        yield f"{'input' if side == 'down' else 'output'}_blocks.{index}.{within}.{inside}", [name]
