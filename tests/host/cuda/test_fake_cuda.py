"""Whole toy models on fake CUDA tensors: what a call reads back and what it launches; `tests/host/compile/test_fake_cuda.py` compiles them."""

from collections import Counter

import pytest
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.lora.low_rank import is_8bit_matrix
from halfsafe.precision.devices import probes
from support import families, model_files
from support.fake_cuda import FakeCuda, Kernels
from support.families import load
from support.rows import rotated

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
    """A later call, which measures nothing and knows what the first one found: its reads and its kernels."""
    with FakeCuda(model) as fake:
        for _ in range(2):
            fake.call(call)
        with Kernels() as kernels:
            fake.call(call)
    return fake.reads, kernels.seen


@pytest.fixture(scope="module")
def alone(comfy, files, calls):
    """(family, storage, compute) -> what the later call of a model with nothing beside it reads and launches, called once."""
    made = {}

    def get(family, storage, compute):
        key = family, storage, compute
        if key not in made:
            made[key] = settled(load(comfy, files(family), storage, compute), calls(family))
        return made[key]

    return get


def guarded(comfy, model):
    return comfy.run(GUARD, model=model, on_nan="retry_higher", max_retries=2)[0]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.release) if family in ("sd3", "hunyuan_video") else family
        for family in FAMILIES
    ],
)
def test_a_clean_call_reads_once_and_once_for_the_guard(comfy, files, calls, alone, family):
    plain, _ = alone(family, "fp16", "fp16")
    reads, _ = settled(guarded(comfy, load(comfy, files(family), "fp16", "fp16_safe")), calls(family))
    assert plain.places == []
    assert sorted(reads.places) == ["arithmetic/proofs.read", "guard/model.around_call"]
    assert reads.foreign == plain.foreign


@pytest.mark.parametrize(
    ("storage", "compute"), [("fp16", "fp16_safe"), ("fp8_e4m3fn", "fp16_safe"), ("fp8_e4m3fn", "fp8")]
)
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_a_layer_is_one_product_and_few_kernels_more(comfy, files, alone, family, storage, compute):
    """Two products are ComfyUI's own, of positions and time."""
    model = load(comfy, files(family), storage, compute)
    layers = sum(layer["class"] == "Linear" for layer in families.report(comfy, model)["layers"])
    _, plain = alone(family, storage, "fp16")
    _, seen = alone(family, storage, compute)
    products = sum(kernel.name.split(".")[0] in ("mm", "addmm", "_scaled_mm", "_scaled_mm_v2") for kernel in seen)
    assert layers <= products <= layers + 2
    assert compute != "fp16_safe" or len(seen) - len(plain) <= 4 * layers


@pytest.mark.parametrize(("family", "compute"), rotated(["flux", "wan"], ["fp16_safe", "bf16", "fp16"], whole=["wan"]))
def test_a_lora_of_eight_bit_weights_takes_few_kernels_a_layer(comfy, files, calls, alone, family, compute):
    """Its two products, of which one adds to the layer's, and one kernel between them: no copy of an input or a result. In
    `fp16_safe` its input is measured and brought to fp16, and the sum is in fp32: an operand more may be measured and cast."""
    model = load(comfy, files(family), "fp8_e4m3fn", compute)
    modules = model.model.diffusion_model.named_modules()
    shapes = {name: tuple(module.weight.shape) for name, module in modules if is_8bit_matrix(module)}
    with_lora = load_lora_for_models(model, None, model_files.lora(shapes, rank=8), 1.0, 0.0)[0]
    _, plain = alone(family, "fp8_e4m3fn", compute)
    reads, seen = settled(with_lora, calls(family))
    beside = Counter(kernel.name for kernel in seen) - Counter(kernel.name for kernel in plain)
    measured = sum(beside.pop(name, 0) for name in ("linalg_vector_norm", "linalg_vector_norm.out", "amax.out"))
    assert sum(beside.values()) <= (8 if compute == "fp16_safe" else 3) * len(shapes)
    assert measured <= (1.5 * len(shapes) if compute == "fp16_safe" else 0)
    assert [place for place in reads.places if "read" not in place] == []
