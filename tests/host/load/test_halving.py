"""*Halve the memory*: what the server says of files and devices, what loaders say of the bytes they hold, and the error beside ComfyUI's own cast."""

import json

import pytest
import safetensors.torch
import torch
from halfsafe.nodes.host.comfyui.model_facts import held_bytes
from halfsafe.nodes.host.load import halving as host
from halfsafe.nodes.host.load.halving import halving
from halfsafe.precision.base.text import size_text
from support import control_files, dialects, families, int8_models, tiny_models
from support.measures import relative_error
from support.model_files import WAN_LINEARS, changed, in_dialect


@pytest.fixture(scope="module")
def files(models_dir):
    tiny_models.wan(models_dir / "diffusion_models" / "halved_wan.safetensors")
    tiny_models.clip_l(models_dir / "text_encoders" / "halved_clip.safetensors")
    (models_dir / "diffusion_models" / "halved.ckpt").write_bytes(b"\x80\x02")
    (models_dir / "diffusion_models" / "halved_html.safetensors").write_bytes(b"<!doctype html><title>Sign in</title>")
    return models_dir


def result_of(output):
    return json.loads(output.ui["halfsafe_result"][0])


def values_of(result):
    """What the sentences of a result were filled in with."""
    sent = result["messages"]
    whole = sent[result["sentence"]]
    told = [sent[text]["values"] for text in whole.get("sentences", [result["sentence"]]) if text in sent]
    return {name: value for values in told for name, value in values.items()}


def load(comfy, storage, name="halved_wan.safetensors"):
    return comfy.nodes["HalfsafeLoadDiffusionModel"].execute(model_name=name, storage=storage, compute="auto")


def bytes_in_memory(module):
    """Of each tensor that a module holds, quantized ones taken apart."""
    return sum(tensor.nbytes for name, tensor in module.state_dict().items() if not name.endswith(".comfy_quant"))


def said_of(size):
    return f"{size / 2**20:.2f} MiB"


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_a_loader_says_the_bytes_that_its_tensors_take(comfy, files, storage):
    output = load(comfy, storage)
    model, result = output.args[0].model.diffusion_model, result_of(output)
    in_16_bit = sum(2 * parameter.numel() for parameter in model.parameters())
    plain = sum(
        p.nbytes
        for p in model.parameters()
        if "Quantized" not in type(p.data).__name__ and "Quantized" not in type(p).__name__
    )
    told = values_of(result)
    assert (told["before"], told["after"], told["kept"]) == tuple(
        map(said_of, (in_16_bit, bytes_in_memory(model), plain))
    )
    assert told["file"] == "halved_wan.safetensors" and "text and caption projection: 2.12 MiB" in told["reasons"]
    assert result["toast"] and result["tone"] == "good" and "halfsafe_badge" in output.ui


def test_a_text_encoder_says_what_it_keeps_and_why(comfy, files):
    output = comfy.nodes["HalfsafeLoadCLIP"].execute(
        clip_name1="halved_clip.safetensors", type="sd3", storage="fp8_e4m3fn", compute="auto"
    )
    told = values_of(result_of(output))
    assert told["after"] == said_of(bytes_in_memory(output.args[0].cond_stage_model)) and told["reasons"].startswith(
        "embedding: "
    )
    assert "halfsafe_result" not in load(comfy, "auto").ui, "nothing was asked to be smaller"


def test_the_memory_goal_is_balanced(comfy, files):
    def output(goal):
        return comfy.nodes["HalfsafeAutoPrecision"].execute(model=load(comfy, "auto").args[0], goal=goal, guard="off")

    memory, balanced = output("memory"), output("balanced")
    assert (
        memory.args[3].replace("goal memory", "goal balanced") == balanced.args[3]
        and memory.ui.keys() == balanced.ui.keys()
    )


def test_a_control_net_says_it_and_one_that_is_loaded_as_it_is_too(comfy, files):
    control_files.flux(files / "controlnet" / "halved_flux.safetensors")
    shuffled = {"control_net_name": "halved_flux.safetensors", "storage": "int8", "compute": "auto"}
    output = comfy.nodes["HalfsafeLoadControlNet"].execute(**shuffled)
    assert values_of(result_of(output))["after"] == said_of(bytes_in_memory(output.args[0].control_model))
    lora = {"lora_controlnet": torch.zeros(()), "input_blocks.0.0.weight": torch.zeros(4, 4, 3, 3)}
    safetensors.torch.save_file(lora, files / "controlnet" / "halved_lora.safetensors")
    told = result_of(
        comfy.nodes["HalfsafeLoadControlNet"].execute(**shuffled | {"control_net_name": "halved_lora.safetensors"})
    )
    assert told["tone"] == "warn" and "ControlLora" in values_of(told)["reasons"]


def test_files_that_would_not_be_halved_are_told_with_the_reason(files):
    changed(
        files / "diffusion_models" / "halved_wan.safetensors",
        files / "diffusion_models" / "halved_8.safetensors",
        in_fp8,
    )
    names = (
        "halved_wan.safetensors",
        "absent.safetensors",
        "halved.ckpt",
        "halved_html.safetensors",
        "halved_8.safetensors",
    )
    found = judged(*names)
    reasons = [
        "",
        "",
        "Halfsafe's loaders read .safetensors files only",
        "halved_html.safetensors: a web page (HTML), not a model.",
        host.NOT_16_BIT,
    ]
    assert all(
        loader["reason"].startswith(reason) and bool(loader["reason"]) == bool(reason)
        for loader, reason in zip(found, reasons, strict=True)
    ), found
    assert [loader.get("missing", []) for loader in found] == [[], ["absent.safetensors"], [], [], []]
    advice = "Download it again. The site may ask you to log in or to accept a licence."
    assert [(loader["problem"], loader["advice"]) for loader in found if "problem" in loader] == [
        (reasons[3], advice)
    ], "the page names a damaged file by these, whatever its reason begins with"


def judged(*names, folder="diffusion_models", **more):
    """What the server says of loaders of one file each."""
    return halving([{"folder": folder, "names": [name], **more} for name in names])["loaders"]


def in_part(files, write, layers=WAN_LINEARS, **options):
    """The small Wan with some layers quantized, the others in bf16."""
    path = (
        files
        / "diffusion_models"
        / f"in_part_{write.__name__}_{'_'.join(map(str, options.values()))}_{len(layers)}.safetensors"
    )
    in_dialect(files / "diffusion_models" / "halved_wan.safetensors", path, write, layers=layers, **options)
    return path


FIRST = [layer for layer in WAN_LINEARS if layer.startswith("blocks.0.")]


IN_FP8 = {"dtype": torch.float8_e4m3fn}


@pytest.mark.parametrize(
    "write, options, storage",
    [(int8_models.int8, {}, "int8"), (dialects.comfy_quant, {}, "fp8_e4m3fn"), (dialects.plain, IN_FP8, "fp8_e4m3fn")],
)
def test_a_file_in_8_bits_in_part_counts_by_its_own_bytes(comfy, files, write, options, storage):
    """What is int8 stays int8 to the bit where the device's own choice is fp8, and the other way round."""
    path = in_part(files, write, FIRST, **options)
    (found,) = judged(path.name)
    assert (found["reason"], found["storage"], found["clip_storage"]) == ("", storage, "int8")
    output = load(comfy, found["storage"], path.name)
    held, told = output.args[0].model.diffusion_model.state_dict(), values_of(result_of(output))
    in_file = safetensors.torch.load_file(path)
    assert all(torch.equal(bits(held[f"{layer}.weight"]), bits(in_file[f"{layer}.weight"])) for layer in FIRST)
    own = sum(tensor.nbytes for name, tensor in in_file.items() if not name.endswith(".comfy_quant"))
    assert told["before"] == size_text(found["bytes"]) == said_of(own)
    assert float(told["after"].split()[0]) < 0.95 * float(told["before"].split()[0])


def bits(tensor):
    return getattr(tensor, "_qdata", tensor).contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    "write, name",
    [
        (int8_models.int8, ""),
        (dialects.comfy_quant, ""),
        (dialects.in_format, "nvfp4"),
        (dialects.in_format, "mxfp8"),
        (dialects.in_format, "int4"),
    ],
)
def test_a_file_with_quantized_blocks_is_left_and_no_saving_is_told(comfy, files, write, name):
    """Whatever the format: what is in 16 bit there is sensitive and stays."""
    path = in_part(files, write, **({"name": name} if name else {}))
    (found,) = judged(path.name)
    assert found["reason"] == host.NOT_16_BIT
    for storage in ("int8", "fp8_e4m3fn") if not name else ():
        result = result_of(load(comfy, storage, path.name))
        assert result["tone"] == "warn" and "no less than before" in result["text"], (
            "the same bytes, rounded again or not"
        )


def test_one_storage_leaves_all_files_of_a_loader_untouched(files):
    """A CLIP in 16 bit beside a T5 in fp8, as in Flux's templates; in two formats nothing is changed."""
    folder = files / "text_encoders"
    for name, write in (("in_fp8", in_fp8), ("in_e5m2", in_e5m2)):
        changed(folder / "halved_clip.safetensors", folder / f"halved_{name}.safetensors", write)
    names = ["halved_clip.safetensors", "halved_in_fp8.safetensors", "halved_in_e5m2.safetensors"]
    found = halving([{"folder": "text_encoders", "names": part} for part in (names[:1], names[:2], names[1:2], names)])[
        "loaders"
    ]
    assert [(loader["clip_storage"], loader["reason"]) for loader in found] == [
        ("int8", ""),
        ("fp8_e4m3fn", ""),
        ("fp8_e4m3fn", host.NOT_16_BIT),
        ("as_file", host.NOT_16_BIT),
    ]


def in_e5m2(tensors):
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.float8_e5m2) if tensor.dim() == 2 else tensor


def test_a_full_checkpoint_is_judged_by_its_model_and_its_encoder(files):
    path = tiny_models.narrow_sd15_checkpoint(files / "checkpoints" / "halved.safetensors")
    model_only, both = (
        changed(path, path.with_name(f"halved_{name}.safetensors"), change)
        for name, change in (("model", model_in_fp8), ("both", in_fp8))
    )
    found = judged(path.name, model_only.name, both.name, folder="checkpoints")
    assert [(loader["storage"], loader["clip_storage"], loader["reason"]) for loader in found] == [
        ("int8", "int8", ""), ("fp8_e4m3fn", "int8", ""), ("fp8_e4m3fn", "fp8_e4m3fn", host.NOT_16_BIT),
    ]  # fmt: skip


def model_in_fp8(tensors):
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.float8_e4m3fn) if tensor.dim() == 2 and name.startswith("model.") else tensor


def test_what_is_left_for_a_file_in_8_bits_is_offered_with_its_bytes(comfy, files, monkeypatch):
    path = in_part(files, dialects.comfy_quant)
    (found,) = judged(path.name)
    assert [(one["storage"], one["needs"]) for one in found["left"]] == [("w6a8", "0.38.0"), ("w4a8", "0.31.0")], (
        "0.30 runs neither"
    )
    sizes = [found["bytes"], *(one["bytes"] for one in found["left"])]
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < 0.85 * sizes[0]
    monkeypatch.setattr(host, "held_storages", lambda: host.FORMAT_OF_STORAGE)
    assert [one["needs"] for one in judged(path.name)[0]["left"]] == ["", ""]
    assert judged("halved_wan.safetensors")[0]["left"] == [], "8 bits are left"
    (cast,) = judged("halved_wan.safetensors", in_8_bits=True)
    assert cast["reason"] == host.NOT_16_BIT and [one["storage"] for one in cast["left"]] == ["w6a8", "w4a8"], (
        "ComfyUI casts it"
    )


@pytest.mark.parametrize("storage", ["w6a8", "w4a8"])
def test_the_bytes_of_fewer_bits_are_those_of_a_file_in_them(files, storage):
    """No ComfyUI here runs it: the file is written as ComfyUI's own tools write it."""
    smaller = in_part(files, dialects.in_format, name=storage)
    own = sum(
        tensor.nbytes
        for name, tensor in safetensors.torch.load_file(smaller).items()
        if not name.endswith(".comfy_quant")
    )
    left = judged(in_part(files, dialects.comfy_quant).name)[0]["left"]
    assert [size_text(one["bytes"]) for one in left if one["storage"] == storage] == [said_of(own)]


def test_activations_are_comfyuis_own_estimate_for_the_size(comfy, files):
    path = in_part(files, dialects.comfy_quant)
    size = {"width": 832, "height": 480, "length": 81, "batch_size": 1}
    smaller = [{**size, "length": 41}, {**size, "width": 592, "height": 336}]
    (found,), (unknown,) = judged(path.name, size=size, smaller=smaller), judged(path.name, size=None)
    model = load(comfy, "as_file", path.name).args[0].model
    shapes = ([1, 16, 21, 60, 104], [1, 16, 11, 60, 104], [1, 16, 21, 42, 74])
    assert found["activations"] == [int(model.memory_required(list(shape))) for shape in shapes]
    assert unknown["activations"] == []


def test_the_bytes_of_a_storage_are_those_that_a_loader_takes(comfy, files):
    """As asked before *Use this* changes a storage."""
    storages = ["auto", "as_file", "fp8_e4m3fn", "fp32"]
    sizes = judged("halved_wan.safetensors", storages=storages)[0]["sizes"]
    assert sizes["auto"] == sizes["as_file"]
    for storage in storages[1:]:
        model = load(comfy, storage, "halved_wan.safetensors").args[0].model.diffusion_model
        held = sum(held_bytes(one) for one in model.parameters())
        assert abs(sizes[storage] - held) < 0.02 * held, (storage, sizes[storage], held)


def test_what_reserve_vram_keeps_free_is_told_on_a_gpu(monkeypatch):
    answers = []
    for reserved, device in ((None, "cuda"), (4.0, "cuda"), (4.0, "cpu")):
        monkeypatch.setattr(host.args, "reserve_vram", reserved)
        monkeypatch.setattr(host, "compute_device", lambda device=device: torch.device(device))
        answers.append(halving([])["reserved"])
    assert answers == ["", "4.00 GiB", ""]


def in_fp8(tensors):
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.float8_e4m3fn) if tensor.dim() == 2 else tensor


@pytest.mark.parametrize(
    "profile, storage, clip_storage",
    [("sm_86", "int8", "int8"), ("sm_61", "fp8_e4m3fn", "int8"), ("mps_m1", "int8", "int8"), ("sm_90", "int8", "int8")],
)
def test_the_storage_is_what_the_device_is_fast_at(monkeypatch, profile, storage, clip_storage):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    answer = halving([])
    assert (answer["storage"], answer["clip_storage"]) == (storage, clip_storage) and answer["why"]


@pytest.mark.parametrize("profile", ["sm_86", "sm_90"])
@pytest.mark.parametrize("compute", ["auto", "bf16"])
def test_a_model_in_int8_is_told_the_times_of_others_where_int8_gains(comfy, files, monkeypatch, profile, compute):
    """Before the run by the answer of *Halve the memory*, after it by the loader, with the names of their cards."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    gains, asked = profile == "sm_86", halving([])["told"]
    assert ("A10G 1.84" in asked) == gains
    node, clip = comfy.nodes["HalfsafeLoadDiffusionModel"], comfy.nodes["HalfsafeLoadCLIP"]
    shown = result_of(node.execute(model_name="halved_wan.safetensors", storage="int8", compute=compute))["sentence"]
    assert ("(A10G 1.84" in shown) == (gains and compute == "auto"), "products in bf16 are no faster for it"
    encoder = clip.execute(
        clip_name1="halved_clip.safetensors", type="stable_diffusion", storage="int8", compute="auto"
    )
    assert "A10G" not in result_of(encoder)["sentence"]


def test_the_error_is_smaller_than_that_of_comfyuis_own_cast(comfy, files):
    path = files / "diffusion_models" / "halved_wan.safetensors"
    reference = families.load(comfy, path, "fp32")
    call = families.capture(reference, "wan")
    expected = families.replay(reference, call)
    cast = comfy.core["UNETLoader"]().load_unet(path.name, "fp8_e4m3fn")[0]
    assert cast.model.manual_cast_dtype == torch.float32, "the arithmetic is fp32 in all"
    of_core = relative_error(expected, families.replay(cast, call))
    ours = {
        storage: relative_error(expected, families.replay(families.load(comfy, path, storage), call))
        for storage in ("fp8_e4m3fn", "int8")
    }
    print(f"core {of_core:.4f}, ours {ours}")
    assert of_core > 1.8 * ours["fp8_e4m3fn"] and of_core > 5 * ours["int8"]
