"""Loading under dynamic VRAM, by what is read and what is made: what stays as in the file stays in the file, unread."""

import contextlib
import re

import pytest
from halfsafe.nodes.host.load import models, tensors
from halfsafe.precision.base.errors import MemoryShortage
from support import dialects, families, model_files, saved_models
from support.int8_models import int8
from support.mapped_loading import Reads, mapped_loading, own_bytes, tensors_of

WEIGHT = "blocks.0.ffn.0.weight"
CLOSE = 0.03


@pytest.fixture
def in_file(wan, models_dir):
    """A file of the model, and all its parts, that nothing else maps."""

    def write(kind: str):
        folder = models_dir / "diffusion_models"
        if kind == "parts":
            parts = model_files.in_parts(wan, folder, "mapped_parts")
            return parts[0], parts
        if kind == "plain":
            path = folder / "mapped_plain.safetensors"
            path.write_bytes(wan.read_bytes())
        else:
            path = model_files.in_dialect(
                wan, folder / f"mapped_{kind}.safetensors", {"fp8": dialects.comfy_quant, "int8": int8}[kind]
            )
        return path, [path]

    return write


READ = [(kind, compute) for kind in ("plain", "parts") for compute in ("auto", "bf16", "fp32", "fp16_safe")]
READ += [
    (kind, compute) for kind in ("fp8", "int8") for compute in ("auto", "fp32")
]  # in fp16_safe the rest becomes fp16


@pytest.mark.parametrize(("kind", "compute"), READ)
def test_what_stays_as_in_the_file_is_not_read(comfy, in_file, kind, compute):
    path, parts = in_file(kind)
    size = sum(part.stat().st_size for part in parts)
    with mapped_loading(), Reads() as reads:
        model = families.load(comfy, path, "as_file", compute).model.diffusion_model
    assert reads.bytes < size // 50  # scales, and the norms that fp16_safe holds in fp32
    slices = [one for one in tensors_of(model) if hasattr(one.untyped_storage(), "_comfy_tensor_file_slice")]
    assert sum(one.nbytes for one in slices) > 0.9 * sum(one.nbytes for one in tensors_of(model))
    assert own_bytes(model, *parts) < size // 50


@pytest.mark.parametrize("compute", ["bf16", "fp16_safe"])
@pytest.mark.parametrize("storage", ["as_file", "fp8_e4m3fn", "int8"])
@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_the_check_of_memory_counts_what_is_made(comfy, in_file, monkeypatch, kind, storage, compute):
    (path, parts), asked = in_file(kind), []
    monkeypatch.setattr(tensors, "require_memory", lambda needed, what, free: asked.append(needed))
    with mapped_loading():
        model = families.load(comfy, path, storage, compute).model.diffusion_model
    assert asked == [pytest.approx(own_bytes(model, *parts), rel=CLOSE, abs=path.stat().st_size // 100)]


def test_a_file_larger_than_the_memory_loads_as_it_is(comfy, in_file, monkeypatch):
    path, _ = in_file("plain")
    monkeypatch.setattr(tensors, "free_host_memory", lambda: path.stat().st_size // 8)
    with mapped_loading():
        assert families.load(comfy, path, "as_file", "bf16").model is not None
        with pytest.raises(MemoryShortage):
            families.load(comfy, path, "fp8_e4m3fn", "bf16")


@pytest.mark.parametrize("mapped", [False, True])
def test_a_load_says_what_a_saved_file_would_save(comfy, in_file, saved_folder, monkeypatch, mapped):
    path, _ = in_file("plain")
    monkeypatch.setattr(tensors, "WORTH_TELLING", 1)
    with mapped_loading() if mapped else contextlib.nullcontext():
        model = families.load(comfy, path, "fp8_e4m3fn", "bf16")
    (said,) = (note for note in families.report(comfy, model)["notes"] if "Save Model" in note)
    assert re.match(r"[0-9.]+ MiB of weights were converted while loading\.", said)
    written = saved_models.save(comfy, model, saved_folder, prefix=f"diffusion_models/mapped_{mapped}")
    with mapped_loading():
        again = families.load(comfy, written, "as_file", "bf16")
    assert not any("Save Model" in note for note in families.report(comfy, again)["notes"])


GIB = 1024**3


@pytest.mark.parametrize(
    ("host", "quantized", "said"),
    [(64 * GIB, False, "streams the remaining"), (1_000_000, True, "read from disk at each step")],
)
def test_auto_says_what_is_streamed(comfy, in_file, monkeypatch, host, quantized, said):
    from dataclasses import replace

    from comfy.quant_ops import QuantizedTensor
    from halfsafe.precision.devices.detect import detect

    path, _ = in_file("plain")
    monkeypatch.setattr(models, "current_device", lambda: replace(detect(profile="sm_86"), simulated=False))
    monkeypatch.setattr(models, "free_device_memory", lambda: 2 * GIB)
    monkeypatch.setattr(models, "free_host_memory", lambda: host)
    with mapped_loading():
        model = families.load(comfy, path, "auto", "auto")
    assert any(isinstance(one, QuantizedTensor) for one in model.model.diffusion_model.parameters()) is quantized
    assert said in families.report(comfy, model)["decisions"]["storage"]
