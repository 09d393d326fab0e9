"""GGUF files through the loader of diffusion models in a real ComfyUI: what is held, computed, listed and refused."""

import sys

import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from halfsafe.precision.errors import CheckpointError, MemoryShortage, NonFiniteWeight
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file, save_file
from support import families, gguf_files, tiny_models
from support.denoise import denoise
from support.measures import relative_error

KINDS = ("Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "Q5_1")
NO_RULES = rules_from("", "none")
BUILT_IN = "halfsafe_example.safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(scope="module")
def folder(models_dir):
    return models_dir / "diffusion_models"


@pytest.fixture(scope="module")
def wan_gguf(wan, folder):
    """The small Wan in many types; what they unpack to in fp32 and, rounded, in bf16 is in the files beside it."""
    path = gguf_files.of_model(wan, folder / "in_gguf.gguf", KINDS, folder / "in_gguf_fp32.safetensors")
    values = load_file(folder / "in_gguf_fp32.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in values.items()}, folder / "in_gguf_bf16.safetensors")
    return path


@pytest.fixture(scope="module")
def values(wan_gguf):
    return load_file(wan_gguf.with_name("in_gguf_fp32.safetensors"))


@pytest.fixture(scope="module")
def of_bf16_file(wan_gguf):
    return wan_gguf.with_name("in_gguf_bf16.safetensors")


def weights_of(model):
    return dict(model.model.diffusion_model.named_parameters())


def packed_in(path):
    from halfsafe.precision.files.gguf_file import open_gguf

    return open_gguf(path).packed


@pytest.mark.parametrize(
    ("storage", "compute", "held"),
    [("as_file", "bf16", "bf16"), ("as_file", "fp16", "fp16"), ("as_file", "fp32", "bf16"), ("fp32", "fp32", "fp32"), ("fp16", "bf16", "fp16")],
)
def test_weights_are_held_as_the_librarys_values_rounded_once(comfy, wan_gguf, values, storage, compute, held):
    model = families.load(comfy, wan_gguf, storage, compute, NO_RULES)
    weights, packed = weights_of(model), packed_in(wan_gguf)
    assert len(packed) > 10
    for name in packed:
        assert weights[name].dtype == DTYPES[held] and torch.equal(weights[name], values[name].to(DTYPES[held])), name


@pytest.mark.parametrize("storage", ["as_file", "auto", "int8", "fp8_e4m3fn", "bf16"])
def test_the_picture_is_that_of_the_bf16_file_of_the_same_values(comfy, wan_gguf, of_bf16_file, storage):
    picture, reference = (families.sample(families.load(comfy, path, storage, "fp32"), "wan") for path in (wan_gguf, of_bf16_file))
    bound = {"as_file": 0.0, "auto": 0.0, "bf16": 0.0}.get(storage, 0.02)
    assert relative_error(reference, picture) <= bound


def test_the_types_errors_are_the_files_own(comfy, wan, folder):
    """Q8_0 is close to the weights that it was made of."""
    path = gguf_files.of_model(wan, folder / "q8.gguf", ("Q8_0",))
    reference = denoise(families.load(comfy, wan, "as_file", "fp32"))
    assert 1e-4 < relative_error(reference, denoise(families.load(comfy, path, "as_file", "fp32"))) < 0.02


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_8_bit_storage_is_quantized_anew(comfy, wan_gguf, values, storage):
    weights = weights_of(families.load(comfy, wan_gguf, storage, "fp32"))
    quantized = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedTensor)}
    assert len(quantized) > 10
    for name, weight in quantized.items():
        bound = 0.012 if storage == "int8" else 0.03
        assert 0 < relative_error(values[name], weight.to(dtype=torch.float32).dequantize()) < bound


def test_the_report_says_what_is_held_and_what_it_was_made_of(comfy, wan_gguf, of_bf16_file):
    model = families.load(comfy, wan_gguf, "as_file", "bf16")
    text, found = comfy.run("HalfsafeReport", model=model)[0], families.report(comfy, model)
    packed = {name.removesuffix(".weight"): f"{weight.type} in the file" for name, weight in packed_in(wan_gguf).items()}
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert {name: layers[name]["reason"].split(";")[0] for name in packed} == packed
    assert {layers[name]["storage"] for name in packed} == {"bf16"}
    assert found["model"] == families.report(comfy, families.load(comfy, of_bf16_file, "as_file", "bf16"))["model"]
    assert "GGUF + " + " + ".join(KINDS) in text
    assert all(f"in {kind} were unpacked to bf16" in text for kind in KINDS)


def test_the_report_says_that_8_bits_gain_nothing_over_the_file(comfy, wan_gguf):
    text = comfy.run("HalfsafeReport", model=families.load(comfy, wan_gguf, "int8", "bf16"))[0]
    assert "in Q4_K were quantized anew to int8, whose error is added to that of the file" in " ".join(text.split())


def test_the_memory_is_checked_for_what_is_made(comfy, wan_gguf, of_bf16_file, monkeypatch):
    from halfsafe.nodes.host.load import tensors

    asked = []
    monkeypatch.setattr(tensors, "require_memory", lambda size, *rest: asked.append(size))
    for path in (wan_gguf, of_bf16_file):
        families.load(comfy, path, "as_file", "bf16")
    assert asked[0] == asked[1] > wan_gguf.stat().st_size
    monkeypatch.undo()
    monkeypatch.setattr(tensors, "free_host_memory", lambda: asked[0] - 1)
    with pytest.raises(MemoryShortage, match=r"in_gguf\.gguf"):
        families.load(comfy, wan_gguf, "as_file", "bf16")


def test_unpacked_weights_are_freed_once_the_model_has_them(comfy, wan_gguf, monkeypatch):
    """ComfyUI copies them into its modules: the model would be in memory twice."""
    from halfsafe.nodes.host.load import models

    made, own = [], torch.nn.Module._load_from_state_dict
    original = models.load_tensors
    monkeypatch.setattr(models, "load_tensors", lambda *given, **how: made.append(original(*given, **how)) or made[-1])
    model = families.load(comfy, wan_gguf, "as_file", "bf16")
    sizes = {name: made[0].tensors[name].untyped_storage().nbytes() for name in packed_in(wan_gguf)}
    assert set(sizes.values()) == {0} and weights_of(model).keys() == made[0].tensors.keys()
    assert torch.nn.Module._load_from_state_dict is own


def test_what_a_model_gets_twice_or_takes_over_is_not_freed(comfy):
    from halfsafe.nodes.host.load.copies import freed_once_copied

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Parameter(torch.zeros(4)) for _ in range(3))

    shared, single = torch.ones(4), torch.full((4,), 2.0)
    with freed_once_copied([shared, single]):
        copied, taken = Two(), Two()
        taken.load_state_dict({"a": single, "b": shared, "c": shared}, assign=True)
        assert single.untyped_storage().nbytes() == shared.untyped_storage().nbytes() == 16
        copied.load_state_dict({"a": single, "b": shared, "c": shared})
    assert (single.untyped_storage().nbytes(), shared.untyped_storage().nbytes()) == (0, 16)
    assert [parameter[0].item() for parameter in copied.parameters()] == [2.0, 1.0, 1.0]


def test_an_error_leaves_torch_as_it_was(comfy):
    from halfsafe.nodes.host.load.copies import _made, freed_once_copied

    own = torch.nn.Module._load_from_state_dict
    with pytest.raises(RuntimeError), freed_once_copied([torch.ones(4)]):
        assert torch.nn.Module._load_from_state_dict is not own and _made
        raise RuntimeError
    assert torch.nn.Module._load_from_state_dict is own and not _made


def test_a_prefix_of_the_names_is_taken_off(comfy, wan, folder, wan_gguf):
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in load_file(wan).items()}
    save_file(prefixed, folder / "prefixed.safetensors")
    path = gguf_files.of_model(folder / "prefixed.safetensors", folder / "prefixed.gguf", KINDS)
    found, plain = weights_of(families.load(comfy, path)), weights_of(families.load(comfy, wan_gguf))
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name, packed in packed_in(wan_gguf).items() if packed.type in ("Q8_0", "Q5_1"))


@pytest.mark.parametrize("family", [*tiny_models.FAMILIES])
def test_every_family_is_detected_as_in_its_16_bit_file(comfy, folder, family):
    source = tiny_models.FAMILIES[family](folder / f"gguf_{family}.safetensors")
    path = gguf_files.of_model(source, folder / f"gguf_{family}.gguf", ("Q8_0", "Q4_0"), reshape=family in ("sd15_unet", "sdxl"), arch=family)
    model, reference = families.load(comfy, path), families.load(comfy, source)
    assert type(model.model) is type(reference.model)
    found, expected = ({**found.model.model_config.unet_config, "dtype": None} for found in (model, reference))
    assert found == expected
    shapes = {name: weight.shape for name, weight in weights_of(reference).items()}
    assert {name: weight.shape for name, weight in weights_of(model).items()} == shapes
    for name, weight in weights_of(model).items():
        assert relative_error(weights_of(reference)[name].float(), weight.float()) < 0.15, name


@pytest.fixture
def listed(comfy):
    def names(node="HalfsafeLoadDiffusionModel", name="model_name"):
        inputs = comfy.nodes[node].define_schema().inputs
        return next(entry for entry in inputs if entry.id == name).options

    return names


def test_gguf_files_are_listed_once_among_the_diffusion_models_only(wan_gguf, folder, listed, monkeypatch):
    import folder_paths

    (folder / "below").mkdir(exist_ok=True)
    (folder / "below" / "another.GGUF").write_bytes(wan_gguf.read_bytes())
    names = listed()
    assert {"in_gguf.gguf", "below/another.GGUF", "wan_clean.safetensors"} <= set(names)
    assert names == [*sorted(set(names) - {BUILT_IN}), BUILT_IN]
    assert not any("gguf" in name.lower() for name in listed("HalfsafeLoadCheckpoint", "ckpt_name"))
    roots, extensions = folder_paths.folder_names_and_paths["diffusion_models"]
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "unet_gguf", (roots, {".gguf"}))  # as ComfyUI-GGUF does
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", (roots, {*extensions, ".gguf"}))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    assert listed() == names and "in_gguf.gguf" in folder_paths.get_filename_list("unet_gguf")


def test_a_file_in_a_folder_below_is_loaded(comfy, wan_gguf, folder):
    (folder / "below").mkdir(exist_ok=True)
    (folder / "below" / "lower.gguf").write_bytes(wan_gguf.read_bytes())
    (model,) = comfy.run("HalfsafeLoadDiffusionModel", model_name="below/lower.gguf", storage="auto", compute="auto")
    assert weights_of(model)


def test_a_replaced_file_is_loaded_anew(comfy, wan, folder):
    node, path = comfy.nodes["HalfsafeLoadDiffusionModel"], folder / "replaced.gguf"
    gguf_files.of_model(wan, path, ("Q8_0",))
    before = node.fingerprint_inputs(model_name=path.name)
    assert node.fingerprint_inputs(model_name=path.name) == before
    gguf_files.of_model(wan, path, ("Q4_0",))
    assert node.fingerprint_inputs(model_name=path.name) != before


def test_without_the_library_the_node_says_how_to_install_it(comfy, wan_gguf, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"in_gguf\.gguf.*-m pip install gguf"):
        families.load(comfy, wan_gguf)


def test_a_scale_that_is_nan_is_refused_with_its_tensor(comfy, wan_gguf, folder):
    from halfsafe.precision.files.gguf_file import open_gguf

    file = open_gguf(wan_gguf)
    name = next(name for name, packed in file.packed.items() if packed.type == "Q8_0")
    content = bytearray(wan_gguf.read_bytes())
    at = file.entries[name].start + 34 * 5
    content[at : at + 2] = b"\x00\x7e"
    (folder / "nan.gguf").write_bytes(content)
    for storage in ("as_file", "int8"):
        with pytest.raises(NonFiniteWeight, match=rf"nan\.gguf: tensor '{name}'"):
            families.load(comfy, folder / "nan.gguf", storage)


def test_a_model_comfyui_does_not_know_is_refused_without_unpacking_it(comfy, folder, monkeypatch):
    from halfsafe.precision.formats import gguf_weight

    path = gguf_files.write(folder / "unknown.gguf", {"a.weight": ("Q8_0", gguf_files.blocks("Q8_0", (8, 64)))}, arch="new")
    monkeypatch.setattr(gguf_weight.GgufWeight, "rows", lambda self, part: pytest.fail("unpacked"))
    with pytest.raises(CheckpointError, match=r"unknown\.gguf.*does not know this architecture"):
        families.load(comfy, path)


def test_a_saved_model_is_that_of_the_file(comfy, wan_gguf, values):
    from halfsafe.nodes.host.load.save import save_model
    from halfsafe.precision.files.safetensors_file import open_checkpoint

    name, _ = save_model(families.load(comfy, wan_gguf), "diffusion_models/of_gguf", "as_file", rules_from(), None, None)
    import folder_paths

    saved = load_file(f"{folder_paths.get_output_directory()}/{name}")
    assert all(torch.equal(saved[name], values[name].bfloat16()) for name in packed_in(wan_gguf))
    assert "in_gguf.gguf" in open_checkpoint(f"{folder_paths.get_output_directory()}/{name}").metadata["halfsafe"]
