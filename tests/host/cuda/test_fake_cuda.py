"""Whole toy models on fake CUDA tensors: what a call reads back, what it launches, and whether it is one graph."""

import pytest
import torch
from halfsafe.precision.devices import probes
from support import families
from support.compiling import compiled
from support.fake_cuda import FakeCuda, Kernels
from support.families import load
from torch._dynamo.utils import counters

FAMILIES = ("wan", "flux", "sd3", "hunyuan_video", "sdxl")
GUARD = "HalfsafeNaNGuard"


@pytest.fixture(scope="module")
def files(models_dir):
    return families.files_in(models_dir / "diffusion_models", "fake_cuda")


@pytest.fixture(scope="module")
def calls(comfy, files):
    """family -> the first call ComfyUI's sampler makes of it, sampled once."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = families.capture(load(comfy, files(family)), family)
        return made[family]

    return get


@pytest.fixture(autouse=True)
def ada(monkeypatch):
    """A simulated card with fp8 units, on which no test product is executed."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(probes, "canary", lambda device, dtype: (True, ""))


def settled(model, call):
    """A second call, which measures nothing: its reads and its kernels."""
    with FakeCuda(model) as fake:
        fake.call(call)
        with Kernels() as kernels:
            fake.call(call)
    return fake.reads, kernels.seen


def guarded(comfy, model):
    return comfy.run(GUARD, model=model, on_nan="retry_higher", max_retries=2)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clean_call_reads_once_and_once_for_the_guard(comfy, files, calls, family):
    plain, _ = settled(load(comfy, files(family), "fp16", "fp16"), calls(family))
    reads, _ = settled(guarded(comfy, load(comfy, files(family), "fp16", "fp16_safe")), calls(family))
    assert plain.places == []
    assert sorted(reads.places) == ["arithmetic/amax_buffer.read", "guard/model.__call__"]
    assert reads.foreign == plain.foreign


def moved(kernels):
    return sum(kernel.read + kernel.written for kernel in kernels)


@pytest.mark.parametrize(("storage", "compute"), [("fp16", "fp16_safe"), ("fp8_e4m3fn", "fp16_safe"), ("fp8_e4m3fn", "fp8")])
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_kernels_and_bytes_are_counted(comfy, files, calls, family, storage, compute):
    """Prints a row per plan (-s). One product a layer is asserted; two are ComfyUI's own, of positions and time."""
    model = load(comfy, files(family), storage, compute)
    layers = sum(layer["class"] == "Linear" for layer in families.report(comfy, model)["layers"])
    _, plain = settled(load(comfy, files(family), storage, "fp16"), calls(family))
    _, seen = settled(model, calls(family))
    products = sum(kernel.name.split(".")[0] in ("mm", "addmm", "_scaled_mm", "_scaled_mm_v2") for kernel in seen)
    extra, size = (len(seen) - len(plain)) / layers, (moved(seen) - moved(plain)) / 1e6
    print(f"\n{family:14} {storage:10} {compute:9} {layers:3} layers, {len(plain):4} kernels plain, {len(seen):4} planned,"
          f" {extra:+.1f} a layer, {size:+.1f} MB a call")  # fmt: skip
    assert layers <= products <= layers + 2
    assert compute != "fp16_safe" or extra <= 3


@pytest.mark.parametrize("family", ["wan", "flux"])
def test_a_compiled_model_is_one_graph(comfy, files, calls, family):
    call, model = calls(family), compiled(load(comfy, files(family), "fp16", "fp16_safe"), backend="eager")
    torch._dynamo.reset()
    counters.clear()
    try:
        with FakeCuda(model) as fake:
            for _ in range(3):
                fake.call(call)
        assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    finally:
        torch._dynamo.reset()
