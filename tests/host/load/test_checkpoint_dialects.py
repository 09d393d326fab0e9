"""Ways fp8 weights are stored, on a real Wan file: loaded to what the file means, also where core gets it wrong.

How each dialect is read: `tests/unit/formats/test_checkpoint.py`.
"""

import json

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError, NonFiniteWeight
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from safetensors.torch import load_file, save_file
from support import dialects, model_files, tiny_models
from support.families import denoise, stock
from support.measures import relative_error
from support.rows import all_of, rotated

E4M3, E5M2 = dialects.E4M3, dialects.E5M2
ONE_SCALE, MANY_SCALES = 1.02, 1.7

# name: (writer, its options, the floor it is held to, how far above the floor it may be, the dialect reported)
DIALECTS = {
    "comfy_quant": (dialects.comfy_quant, {}, E4M3, ONE_SCALE, "comfy_quant"),
    "header metadata": (dialects.quantization_metadata, {}, E4M3, ONE_SCALE, "_quantization_metadata"),
    "scaled_fp8": (dialects.scaled_fp8, {}, E4M3, ONE_SCALE, "scaled_fp8"),
    "scaled_fp8 e5m2": (dialects.scaled_fp8, {"dtype": E5M2}, E5M2, ONE_SCALE, "scaled_fp8"),
    "weight_scale, no marker": (dialects.modelopt, {}, E4M3, ONE_SCALE, "weight_scale"),
    "row scales bf16": (dialects.row_wise, {}, E4M3, MANY_SCALES, "weight_scale"),
    "block scales weight_scale_inv": (dialects.block_wise, {}, E4M3, MANY_SCALES, "weight_scale_inv"),
}


@pytest.fixture(scope="module")
def folder(models_dir):
    return models_dir / "diffusion_models"


@pytest.fixture(scope="module")
def reference(wan):
    return denoise(stock(wan, torch.float32))


@pytest.fixture(scope="module")
def floors(wan, reference, tmp_path_factory):
    """The error of each fp8 format with one scale per tensor, dequantized here, through stock ComfyUI."""
    return {
        dtype: relative_error(reference, denoise(stock(dequantized(wan, dtype, tmp_path_factory))))
        for dtype in (E4M3, E5M2)
    }


def dequantized(wan, dtype, tmp_path_factory):
    def change(tensors):
        for name in tensors:
            tensors[name] = tensors[name].float()
        for layer in model_files.WAN_LINEARS:
            data, scale = dialects.per_tensor(tensors[f"{layer}.weight"], dtype)
            tensors[f"{layer}.weight"] = data.float() * scale

    return model_files.changed(wan, tmp_path_factory.mktemp("floor") / "dequantized.safetensors", change)


def load(comfy, path, storage="as_file", compute="fp32"):
    return comfy.run("HalfsafeLoadDiffusionModel", model_name=path.name, storage=storage, compute=compute)[0]


def report(comfy, model):
    return json.loads(comfy.run("HalfsafeReport", model=model)[1])


@pytest.mark.parametrize("name", DIALECTS)
def test_dialect_is_read_as_it_is_meant(comfy, folder, wan, reference, floors, name):
    write, options, floor, factor, dialect = DIALECTS[name]
    path = model_files.in_dialect(wan, folder / "dialect.safetensors", write, **options)
    model = load(comfy, path)
    assert relative_error(reference, denoise(model)) < floors[floor] * factor
    assert model.attachments["halfsafe"].dialects == (dialect,)


@pytest.mark.parametrize("said", ["false", "", 1, None])
def test_a_rotation_is_there_where_comfyui_takes_it_to_be(folder, wan, said):
    """ComfyUI asks whether the value counts as true: the text "false" does."""
    settings = {"format": "int8_tensorwise", "convrot": said, "convrot_groupsize": 256}
    path = model_files.in_dialect(wan, folder / "said.safetensors", dialects.in_format, name="int8", settings=settings)
    file = open_checkpoint(path)
    ours = read_checkpoint(file, {}, path).weights["blocks.0.ffn.0.weight"].dequantize(torch.float32)
    assert relative_error(stock(path).model.diffusion_model.blocks[0].ffn[0].weight.dequantize().float(), ours) < 0.01


@pytest.mark.parametrize(("name", "profile", "compute", "storage"), rotated(
    ["row scales bf16", "block scales weight_scale_inv", "musubi"],
    [("sm_86", "auto", "int8"), ("sm_90", "bf16", "int8"), ("sm_70", "auto", "fp8_e4m3fn")], whole=["row scales bf16"],
))  # fmt: skip
def test_fp8_with_many_scales_is_int8_where_that_is_the_8_bits_of_the_device_else_its_cost_is_told(
    comfy, folder, wan, reference, monkeypatch, name, profile, compute, storage
):
    """At the same size: int8 is nearer to the file's own numbers than fp8 with a single scale."""
    write, options, *_ = (
        (dialects.block_wise, {"scale_name": "scale_weight", "rows": 1, "columns": 64})
        if name == "musubi"
        else DIALECTS[name]
    )
    path = model_files.in_dialect(wan, folder / "scales.safetensors", write, **options)
    if name == "musubi":
        model_files.changed(
            path,
            path,
            lambda tensors: tensors.update(
                {key: tensor[:, :, None] for key, tensor in tensors.items() if key.endswith("scale_weight")}
            ),
        )
    own = relative_error(reference, denoise(load(comfy, path, "fp32", "fp32")))
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    model = load(comfy, path, "as_file", compute)
    layers = {
        layer["name"]: layer for layer in report(comfy, model)["layers"] if layer["name"] in model_files.WAN_LINEARS
    }
    assert {layer["storage"] for layer in layers.values()} == {storage}
    notes = " ".join(model.attachments["halfsafe"].notes)
    if storage == "int8":
        assert all("int8 takes the same bytes" in layer["reason"] for layer in layers.values())
        assert relative_error(reference, denoise(model)) < 1.3 * own
    else:
        assert all(
            "a single scale in place of the file's many costs an error of" in layer["reason"]
            for layer in layers.values()
        )
        assert 1 <= notes.count("a single scale in place of the file's many costs an error of") <= 2, (
            "a note for each figure, not for each layer"
        )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_unscaled_fp8_keeps_its_bits(comfy, folder, wan, reference, dtype):
    path = model_files.in_dialect(wan, folder / "unscaled.safetensors", dialects.plain, dtype=dtype)
    ours, theirs = load(comfy, path), stock(path)
    weights = load_file(path)
    held = ours.model.diffusion_model.blocks[0].ffn[0].weight
    assert torch.equal(held._qdata.view(torch.uint8), weights["blocks.0.ffn.0.weight"].view(torch.uint8))
    assert relative_error(denoise(theirs), denoise(ours)) < 1e-3


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", "transformer."])
@pytest.mark.parametrize(
    "name", ["comfy_quant", "scaled_fp8", "weight_scale, no marker", "block scales weight_scale_inv"]
)
def test_prefixed_names(comfy, folder, wan, reference, floors, name, prefix):
    write, options, floor, factor, _ = DIALECTS[name]
    path = model_files.in_dialect(wan, folder / "prefixed.safetensors", write, prefix, **options)
    assert relative_error(reference, denoise(load(comfy, path))) < floors[floor] * factor


BY_NODE = all_of(["model.diffusion_model.", "net."], ["HalfsafeLoadDiffusionModel", "HalfsafeLoadCheckpoint"])


@pytest.mark.parametrize(
    ("format", "prefix", "node"),
    rotated(["float8_e4m3fn", "int8", "mxfp8", "nvfp4", "int4", "w4a8"], BY_NODE, whole=["float8_e4m3fn"]),
)
def test_a_header_that_names_layers_without_the_prefix_is_read_as_comfyui_reads_it(
    comfy, folder, wan, node, prefix, format
):
    """As the same file with ``comfy_quant`` tensors, bit for bit; ComfyUI's own loader of checkpoints takes whole names alone."""
    from halfsafe.nodes.host.comfyui.model_facts import held_storages

    if format != "float8_e4m3fn" and format not in held_storages():
        pytest.skip(f"this ComfyUI does not run {format}")
    write, options = (dialects.comfy_quant, {}) if format == "float8_e4m3fn" else (dialects.native, {"names": [format]})
    path = model_files.in_dialect(wan, folder / "named.safetensors", write, **options)
    expected, theirs = denoise(load(comfy, path)), denoise(stock(path))
    dialects.with_settings_in_header(path, prefix, "")
    if node == "HalfsafeLoadCheckpoint":
        path = path.rename(folder.parent / "checkpoints" / path.name)
        model = comfy.run(
            node, ckpt_name=path.name, storage="as_file", compute="fp32", clip_storage="auto", vae_dtype="auto"
        )[0]
    else:
        assert torch.equal(denoise(stock(path)), theirs)
        model = load(comfy, path)
    assert not [note for note in model.attachments["halfsafe"].notes if "dequantized in each call" not in note]
    assert torch.equal(denoise(model), expected)


def test_comfyuis_formats_are_handed_to_it_and_too_new_ones_are_unpacked_or_refused(comfy, folder, wan):
    from halfsafe.nodes.host.comfyui.model_facts import held_storages
    from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE

    held = held_storages() & dialects.NATIVE.keys()
    path = model_files.in_dialect(wan, folder / "native.safetensors", dialects.native, names=sorted(held))
    assert (
        {"nvfp4", "mxfp8", "int8", "int4"}
        <= held
        <= {layer["storage"] for layer in report(comfy, load(comfy, path))["layers"]}
    )
    for name in dialects.NATIVE.keys() - held:
        row, path = (
            FORMAT_OF_STORAGE[name],
            model_files.in_dialect(wan, folder / f"{name}.safetensors", dialects.native, names=[name]),
        )
        if row.unpacks:
            assert f"layers in {row.title}, which needs ComfyUI" in " ".join(
                load(comfy, path).attachments["halfsafe"].notes
            )
        else:
            with pytest.raises(
                CheckpointError,
                match=rf"{name}\.safetensors: tensor .*comfy-kitchen cannot unpack.*ComfyUI {row.since}",
            ):
                load(comfy, path)


def test_converting_while_loading(comfy, folder, wan, reference, floors):
    path = model_files.in_dialect(wan, folder / "e5m2.safetensors", dialects.scaled_fp8, dtype=E5M2)
    held = load(comfy, path, storage="bf16")
    assert {layer["storage"] for layer in report(comfy, held)["layers"] if layer["class"] == "Linear"} == {"bf16"}
    assert relative_error(reference, denoise(held)) < floors[E5M2] * 1.05


def diffusers_flux(source, target):
    """The Flux file under diffusers' names, by ComfyUI's own table read backwards."""
    import comfy.utils

    tensors = load_file(source)
    depths = {"depth": 1, "depth_single_blocks": 1, "hidden_size": 256}
    renamed = {}
    for name, place in comfy.utils.flux_to_diffusers(depths).items():
        key, cut, change = place if len(place) == 3 and not isinstance(place, str) else (place, None, None)
        key, cut = (key[0], key[1]) if isinstance(key, tuple) else (key, cut)
        if key in tensors:
            part = tensors[key] if cut is None else tensors[key].narrow(*cut)
            renamed[name] = (comfy.utils.swap_scale_shift(part) if change else part).clone()
    save_file(renamed, target)
    return target


@pytest.mark.parametrize("name", ["transformer_blocks.0.attn.to_k.weight", "transformer_blocks.0.norm1.linear.weight"])
def test_diffusers_names_and_parts_are_those_of_the_errors(comfy, folder, name):
    """ComfyUI fuses the first with two others under a name that is in no file."""
    whole = diffusers_flux(tiny_models.flux(folder / "flux-nan.safetensors"), folder / "flux-diffusers-nan.safetensors")
    model_files.changed(whole, whole, lambda tensors: tensors[name].view(-1)[:1].fill_(float("nan")))
    first, second = model_files.in_parts(whole, folder, f"flux-{len(name)}")
    with pytest.raises(NonFiniteWeight, match=f"{second.name}: .*{name if 'to_k' in name else ''}"):
        load(comfy, first, "bf16")


def test_diffusers_names(comfy, folder):
    source = tiny_models.flux(folder / "flux.safetensors")
    path = diffusers_flux(source, folder / "flux-diffusers.safetensors")
    ours = load(comfy, path, "bf16").model.diffusion_model.state_dict()
    original = stock(source).model.diffusion_model.state_dict()
    assert ours.keys() == original.keys()
    assert all(torch.equal(ours[name].float(), tensor.float()) for name, tensor in original.items())


def said_by_the_table_alone(tensors):
    """The marks say all, and the table of the header the format alone."""
    layers = [name.removesuffix(".comfy_quant") for name in tensors if name.endswith("comfy_quant")]
    return {"_quantization_metadata": json.dumps({"layers": {name: {"format": "int8_tensorwise"} for name in layers}})}


@pytest.mark.parametrize("kind", ["table", "shards", "convolution"])
def test_int8_that_other_tools_mark_otherwise_is_right(comfy, folder, wan, reference, kind):
    path = model_files.in_dialect(wan, folder / "otherwise.safetensors", dialects.in_format, name="int8")
    right = relative_error(reference, denoise(load(comfy, path)))
    tensors, metadata = load_file(path), None
    if kind == "table":
        metadata = said_by_the_table_alone(tensors)
    elif kind == "convolution":
        weight = tensors["patch_embedding.weight"].float()
        scale = weight.abs().amax((1, 2, 3, 4), keepdim=True) / 127
        tensors |= {
            "patch_embedding.weight": (weight / scale).round().to(torch.int8),
            "patch_embedding.weight_scale": scale,
            "patch_embedding.comfy_quant": dialects.comfy_quant_bytes({"format": "int8_tensorwise"}),
        }
    if kind != "shards":
        save_file(tensors, path, metadata)
    else:
        for path, of in ((folder / f"of-0000{n}-of-00002.safetensors", n == 1) for n in (1, 2)):
            part = {name: tensor for name, tensor in tensors.items() if name.startswith("blocks.0.") is of}
            marks = {name: part.pop(name) for name in [*part] if name.endswith("comfy_quant")}
            layers = {name.removesuffix(".comfy_quant"): json.loads(bytes(it.tolist())) for name, it in marks.items()}
            save_file(part, path, {"_quantization_metadata": json.dumps({"layers": layers})})
    model = load(comfy, path)
    assert relative_error(reference, denoise(model)) < 1.5 * right
    held = {layer["name"]: layer["storage"] for layer in report(comfy, model)["layers"]}
    assert {held[layer] for layer in model_files.WAN_LINEARS} == {"int8"} and held["patch_embedding"] == "fp32"
