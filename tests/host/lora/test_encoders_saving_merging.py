"""LoRAs of 8-bit weights in text encoders, in what ComfyUI's own node saves, and in its merges of models."""

import comfy.hooks as comfy_hooks
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.sd import load_bypass_lora_for_models, load_lora_for_models, save_checkpoint
from comfy_extras.nodes_hooks import SetClipHooks
from halfsafe.nodes.host.comfyui.layers import is_quantized
from halfsafe.nodes.host.comfyui.weights import dequantized
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from safetensors.torch import load_file
from support import families, model_files, tiny_models
from support.families import load
from support.guarding import core
from support.measures import relative_error

FFN = "blocks.0.ffn.0"
LAYERS = {FFN: (1024, 256), "blocks.1.ffn.2": (256, 1024)}


@pytest.fixture(scope="module")
def clip_file(models_dir):
    return tiny_models.narrow_clip_l(models_dir / "text_encoders" / "clip_l_low_rank.safetensors")


def encoder(comfy, path, storage, compute="auto"):
    inputs = {"clip_name1": path.name, "type": "stable_diffusion", "storage": storage, "compute": compute}
    return comfy.run("HalfsafeLoadCLIP", **inputs)[0]


def encode(clip):
    return clip.encode_from_tokens(clip.tokenize("a lighthouse"))


def encoder_lora():
    """A LoRA for the first layers of a CLIP-L, by the names that ComfyUI gives any text encoder's layers."""
    layers = {f"text_model.encoder.layers.{number}.mlp.fc1": (1024, 256) for number in range(4)}
    tensors = model_files.lora(layers, size=0.05)
    return {
        name.replace("diffusion_model.", "text_encoders.clip_l.transformer."): tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_a_text_encoder(comfy, clip_file, storage):
    def with_lora(clip, strength):
        return load_lora_for_models(None, clip, encoder_lora(), 0.0, strength)[1]

    exact, clip = encoder(comfy, clip_file, "fp32"), encoder(comfy, clip_file, storage)
    plain = encode(clip)
    floor = relative_error(encode(exact), plain)
    for strength in (0.02, 1.0, 0.3):
        expected, result = encode(with_lora(exact, strength)), encode(with_lora(clip, strength))
        assert relative_error(expected, result) < 1.1 * floor
    assert relative_error(encode(exact), encode(with_lora(exact, 1.0))) > floor, "the LoRA acts"
    two = with_lora(with_lora(clip, 0.3), -0.3)
    assert relative_error(plain, encode(two)) < 1e-4
    assert torch.equal(encode(clip), plain)
    assert not any("forward" in module.__dict__ for module in clip.cond_stage_model.modules())


def test_a_text_encoder_with_a_lora_of_comfyuis_bypass_node(comfy, clip_file):
    def with_both(clip):
        clip = load_lora_for_models(None, clip, encoder_lora(), 0.0, 0.3)[1]
        return load_bypass_lora_for_models(None, clip, encoder_lora(), 0.0, 0.4)[1]

    exact, clip = encoder(comfy, clip_file, "fp32"), encoder(comfy, clip_file, "int8")
    plain = encode(clip)
    floor = relative_error(encode(exact), plain)
    expected = encode(load_lora_for_models(None, exact, encoder_lora(), 0.0, 0.7)[1])
    assert relative_error(expected, encode(with_both(clip))) < 1.1 * floor
    assert torch.equal(encode(clip), plain)


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
@pytest.mark.parametrize("applied", [False, True], ids=["unloaded", "loaded"])
def test_comfyuis_own_node_saves_them_merged(comfy, wan, tmp_path, storage, applied):
    tensors = model_files.lora(LAYERS, size=0.1)
    model = load_lora_for_models(load(comfy, wan, storage, "bf16"), None, tensors, 1.0, 0.0)[0]
    call = families.capture(model, "wan") if applied else None
    before = families.replay(model, call) if applied else None
    save_checkpoint(str(tmp_path / "saved.safetensors"), model)
    plain = load_file(wan)[f"{FFN}.weight"].float()
    merged = plain + model_files.lora_delta(tensors, FFN)
    checkpoint = read_checkpoint(*read(tmp_path / "saved.safetensors"))
    weight = checkpoint.weights[f"model.diffusion_model.{FFN}.weight"].dequantize(torch.float32)
    cores = ModelPatcher(model.model, model.load_device, model.offload_device)
    cores.patches = model.patches
    of_core = dequantized(cores.patch_weight_to_device(f"diffusion_model.{FFN}.weight", return_weight=True))
    error, cores_error = relative_error(merged, weight), relative_error(merged, of_core.float())
    assert error <= 1.05 * cores_error < relative_error(plain, merged)
    if applied:
        assert torch.equal(families.replay(model, call), before)


def read(path):
    file = open_checkpoint(path)
    return dict(file.items()), file.metadata, str(path)


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_a_lora_of_comfyuis_bypass_node_beside_ours(comfy, wan, call, storage):
    one, other = model_files.lora(LAYERS, size=0.05), model_files.lora(LAYERS, size=0.05, seed=8)

    def both(model):
        model = load_lora_for_models(model, None, one, 1.0, 0.0)[0]
        return load_bypass_lora_for_models(model, None, other, 1.0, 0.0)[0]

    exact, model = load(comfy, wan, "fp32", "fp32"), load(comfy, wan, storage, "fp32")
    floor = relative_error(families.replay(exact, call), families.replay(model, call))
    assert relative_error(families.replay(both(exact), call), families.replay(both(model), call)) < 1.1 * floor


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_a_lora_of_a_hook_acts_on_a_layer_of_an_encoder_that_stays_in_16_bit(comfy, clip_file, storage):
    clip, name = encoder(comfy, clip_file, storage), "text_encoders.clip_l.transformer.text_projection"
    layer, tensors = clip.cond_stage_model.clip_l.transformer.text_projection, model_files.lora({"layer": (256, 256)})
    assert not is_quantized(layer)
    lora = {key.replace("diffusion_model.layer", name): tensor for key, tensor in tensors.items()}
    hooks = comfy_hooks.create_hook_lora(lora=lora, strength_model=0.0, strength_clip=1.0)
    hooks.set_keyframes_on_hooks(comfy_hooks.HookKeyframeGroup())
    before, ran_with = layer.weight.clone(), []
    watch = layer.register_forward_hook(lambda layer, *_: ran_with.append(layer.weight.clone()))
    for one in (SetClipHooks().apply_hooks(clip, True, False, hooks)[0], clip):
        one.encode_from_tokens_scheduled(one.tokenize("a lighthouse"))
    watch.remove()
    hooked, after = ran_with
    assert relative_error(before.float() + model_files.lora_delta(tensors, "layer"), hooked.float()) < 0.004
    assert torch.equal(after, before)


def test_a_text_encoder_is_freed_while_a_hook_changes_it(comfy, clip_file):
    """ComfyUI ejects and injects while its patcher holds only what is merged."""
    clip = load_lora_for_models(None, encoder(comfy, clip_file, "int8"), encoder_lora(), 0.0, 1.0)[1]
    key = next(name for name in clip.patcher.model.state_dict() if name.endswith("position_embedding.weight"))
    zeros = torch.zeros_like(clip.patcher.model.state_dict()[key], dtype=torch.float32)
    clip.patcher.add_patches({key: ("diff", (zeros,))}, 1.0)
    hooks = comfy_hooks.create_hook_lora(lora=encoder_lora(), strength_model=0.0, strength_clip=1.0)
    clip = clip.clone()
    clip.patcher.forced_hooks, clip.use_clip_schedule = hooks, False
    clip.patcher.register_all_hook_patches(hooks, comfy_hooks.create_target_dict(comfy_hooks.EnumWeightTarget.Clip))
    before = encode(clip)
    clip.patcher.partially_unload(torch.device("cpu"), 1 << 40)
    assert torch.equal(encode(clip), before)


@pytest.mark.parametrize("storages", [("int8", "int8"), ("fp8_e4m3fn", "fp8_e4m3fn"), ("int8", "fp16")])
def test_a_merge_is_that_of_the_models(comfy, wan, storages):
    other = families.write_scaled(wan, wan.with_name("merged_other.safetensors"), {r"ffn\.0\.weight": 1.5})
    merge = core("comfy_extras.nodes_model_merging").ModelMergeSimple().merge
    parts = zip((wan, other), storages, strict=True)
    result = families.sample(
        merge(*(load(comfy, path, storage, "bf16") for path, storage in parts), 0.6)[0], "wan", steps=1
    )
    expected = families.sample(
        merge(load(comfy, wan, "fp32", "fp32"), load(comfy, other, "fp32", "fp32"), 0.6)[0], "wan", steps=1
    )
    assert relative_error(expected, result) < 0.08
