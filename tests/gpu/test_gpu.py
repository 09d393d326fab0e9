"""What only a CUDA device shows, through the pack's nodes: kernels, plans, the guard, scopes of flags, memory, graphs.

Each test compares with fp32 on the same device. In a dry run (HALFSAFE_DRY_RUN=1, a CPU) the tests show that they are sound
themselves; those that count what a CPU does not have are skipped.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.precision.devices import probes
from halfsafe.precision.devices.detect import PROFILE_VARIABLE, detect
from safetensors.torch import load_file, save_file
from support import families, model_files, tiny_models
from support.compiling import COMPILER, compiled
from support.families import load
from support.guarding import guarded, is_finite, plain_fp16, report_of
from support.inprocess import end_of
from support.measures import relative_error
from support.probing import missed_expectations
from support.summing import FP16_ACCUMULATION, accumulation, products, spied, started_with, states
from torch._dynamo.utils import counters

DRY = bool(os.environ.get("HALFSAFE_DRY_RUN"))
ROOT = Path(__file__).absolute().parents[2]
LORA = {f"blocks.{block}.ffn.0": (1024, 256) for block in (0, 1)} | {"blocks.0.self_attn.q": (256, 256)}
QUANTIZED = {
    "int8": ("int8", "auto"),
    "int8, fp16_safe": ("int8", "fp16_safe"),
    "fp8, bf16": ("fp8_e4m3fn", "bf16"),
    "fp8 products": ("fp8_e4m3fn", "fp8"),
}
BOUND = {"int8": 0.05, "int8, fp16_safe": 0.05, "fp8, bf16": 0.1, "fp8 products": 0.15}
DYNAMIC = {"fp32": 5e-3, "bf16": 0.05, "fp16": 0.02, "fp16_safe": 0.01, "fp8": 0.15}
IN_A_PROCESS = "import conftest, sys; sys.argv[0] = 'main.py'; from pathlib import Path; import dynamic_process as p; p.main(*map(Path, sys.argv[1:]))"
VAES = {
    "image": ((1, 4, 8, 8), "decoder.mid.block_1.conv2.weight"),
    "video": ((1, 16, 2, 8, 8), "decoder.middle.0.residual.6.weight"),
}
needs_cuda = pytest.mark.skipif(DRY, reason="counts what a CPU does not have")


@pytest.fixture(scope="module")
def clean(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "gpu_clean.safetensors")


@pytest.fixture(scope="module")
def overflowing(models_dir):
    return tiny_models.wan_overflowing(models_dir / "diffusion_models" / "gpu_overflowing.safetensors")


@pytest.fixture(scope="module")
def reference(comfy, overflowing):
    return families.sample(load(comfy, overflowing, "fp32", "fp32"), "wan").cpu()


@pytest.fixture(scope="module")
def exact(comfy, clean):
    return families.sample(load(comfy, clean, "fp32", "fp32"), "wan").cpu()


@pytest.fixture
def as_nvidia(monkeypatch):
    """In a dry run, decisions as for a device with fp8 products: the pack sets nothing for a CPU."""
    if DRY:
        monkeypatch.setenv(PROFILE_VARIABLE, "sm_89")


def error(reference, model) -> float:
    return relative_error(reference, families.sample(model, "wan").cpu())


def test_the_probes_agree_with_the_profile(device):
    assert missed_expectations(device) == []


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_canary_is_right(device, dtype):
    ok, detail = probes.canary(device, dtype)
    assert ok, detail


@pytest.mark.parametrize("storage", ["as_file", "fp16", "fp8_e4m3fn", "int8"])
def test_fp16_safe_is_finite_and_right(comfy, overflowing, storage):
    expected = families.sample(load(comfy, overflowing, storage, "fp32"), "wan").cpu()
    model = load(comfy, overflowing, storage, "fp16_safe")
    assert all(error(expected, model) < 0.01 for _ in range(2))


def test_auto_goes_on_in_fp16_safe_after_an_overflow(comfy, overflowing, reference, as_nvidia):
    model = load(comfy, overflowing, "fp16", "auto")
    assert all(error(reference, model) < 0.02 for _ in range(2))


def test_the_guard_recovers_and_does_not_repeat_afterwards(comfy, overflowing, reference):
    model = guarded(comfy, plain_fp16(comfy, overflowing))
    assert error(reference, model) < 0.02 and report_of(model).verdict == "recovered"
    assert error(reference, model) < 0.02 and report_of(model).extra_calls == 0


@pytest.mark.parametrize("family", ["flux", "sd3", "sdxl"])
def test_families_under_the_guard(comfy, models_dir, family):
    folder = models_dir / "diffusion_models"
    path = families.write_scaled(
        families.write(family, folder), folder / f"gpu_{family}.safetensors", families.OVERFLOWS[family]["ffn"]
    )
    expected = families.sample(load(comfy, path, "fp32", "fp32"), family).cpu()
    assert relative_error(expected, families.sample(guarded(comfy, plain_fp16(comfy, path)), family).cpu()) < 0.02


def test_fp16_sums_act_and_are_scoped(comfy, clean, exact, gaining):
    before = states()
    model = accumulation(comfy, plain_fp16(comfy, clean), fp16_accumulation="auto")
    assert error(exact, model) < 0.02 and states() == before
    seen, _ = products(model, families.capture(model, "wan"))
    assert any(on for _, on in seen), "no product ran with fp16 sums"


@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp16_safe"])
def test_reduced_precision_reduction_is_off_around_a_whole_model(comfy, clean, exact, as_nvidia, compute):
    """Without split-k cuBLAS refuses every product that cuBLASLt does not take."""
    from halfsafe.precision.base import flags

    seen = []
    model = accumulation(comfy, load(comfy, clean, "as_file", compute), reduced_precision_reduction="off")
    model = spied(model, lambda: seen.append(flags.is_on("fp16_reduced_precision_reduction")))
    assert error(exact, model) < 0.05 and seen and not any(seen)


@pytest.mark.parametrize("with_guard", [False, True])
def test_a_model_that_overflows_is_right_under_the_flag_of_fast(comfy, overflowing, reference, with_guard):
    """ComfyUI's ``--fast`` sets fp16 accumulation for the whole process; cuBLAS refuses fp32 results meanwhile."""
    model = (
        guarded(comfy, plain_fp16(comfy, overflowing)) if with_guard else load(comfy, overflowing, "fp16", "fp16_safe")
    )
    with started_with([FP16_ACCUMULATION], True) as fast:
        assert all(error(reference, model) < 0.02 for _ in range(2))
        assert states() == fast


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2"])
def test_fp8_products_with_weights_of_either_format(comfy, clean, as_nvidia, device, storage):
    """CUDA multiplies no e5m2 by e5m2."""
    if not detect(device).capabilities["fp8_matmul"]:
        pytest.skip("no fp8 products here")
    expected = families.sample(load(comfy, clean, storage, "fp32"), "wan").cpu()
    assert error(expected, load(comfy, clean, storage, "fp8")) < 0.15


@pytest.mark.parametrize("way", QUANTIZED)
def test_a_lora_on_8_bit_weights_costs_no_accuracy_wholly_or_partly_loaded(comfy, clean, device, way, monkeypatch):
    if way == "fp8 products" and not detect(device).capabilities["fp8_matmul"]:
        pytest.skip("no fp8 products here")

    def with_lora(model):
        return load_lora_for_models(model, None, model_files.lora(LORA, rank=8), 0.3, 0.0)[0]

    whole = load(comfy, clean, "fp32", "fp32")
    call = families.capture(whole, "wan")
    expected = families.replay(with_lora(whole), call)
    model = with_lora(load(comfy, clean, *QUANTIZED[way]))
    assert relative_error(expected, families.replay(model, call)) < BOUND[way]
    partially_load = type(model).partially_load
    monkeypatch.setattr(type(model), "partially_load", lambda self, device, *_, **__: partially_load(self, device, 1))
    importlib.import_module("comfy.model_management").unload_all_models()
    assert relative_error(expected, families.replay(model, call)) < 1.5 * BOUND[way] and model.model.model_lowvram


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_weights_quantized_there_are_right(comfy, clean, exact, storage):
    assert error(exact, load(comfy, clean, storage, "fp32")) < BOUND["fp8, bf16"]


def waits(model) -> int:
    """How often a clean call makes the host wait, whoever asks for it."""
    call = families.capture(model, "wan")
    families.replay(model, call)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            families.replay(model, call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@needs_cuda
@pytest.mark.parametrize("compute", ["auto", "fp16_safe"])
def test_a_clean_call_reads_back_once_and_once_more_with_the_guard(comfy, clean, compute):
    plain, model = waits(plain_fp16(comfy, clean)), load(comfy, clean, "fp16", compute)
    assert waits(model) <= plain + 1 and waits(guarded(comfy, model)) <= plain + 2


@needs_cuda
def test_device_memory_is_flat_over_runs(comfy, overflowing):
    model, taken = guarded(comfy, plain_fp16(comfy, overflowing)), []
    for _ in range(6):
        families.sample(model, "wan")
        gc.collect()
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_allocated())
    assert taken[-1] <= taken[1]


def test_a_model_is_right_after_offloading(comfy, overflowing, reference):
    model = guarded(comfy, load(comfy, overflowing, "as_file", "fp16_safe"))
    families.sample(model, "wan")
    importlib.import_module("comfy.model_management").unload_all_models()
    assert error(reference, model) < 0.01


@pytest.mark.parametrize("kind", VAES)
def test_a_decode_that_overflows_is_made_again(comfy, models_dir, kind):
    shape, name = VAES[kind]
    write = tiny_models.sd_vae if kind == "image" else tiny_models.wan_vae
    path = write(models_dir / "vae" / f"gpu_{kind}.safetensors", dtype=torch.float32)
    tensors = load_file(str(path))
    tensors[name] = tensors[name] * 2e5
    save_file({key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}, str(path))
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected, raw = (comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype=dtype)[0] for dtype in ("fp32", "fp16"))
        assert not is_finite(raw.decode(latent))
        cured = comfy.run("HalfsafeGuardVAE", vae=raw, on_nan="retry_higher")[0].decode(latent)
        assert relative_error(expected.decode(latent).cpu(), cured.cpu()) < 0.02


@pytest.fixture
def fresh_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_the_whole_model_is_one_graph(comfy, overflowing, reference, fresh_graphs):
    model = compiled(load(comfy, overflowing, "as_file", "fp16_safe"), backend=COMPILER if DRY else "inductor")
    assert all(error(reference, model) < 0.01 for _ in range(2))
    assert DRY or (counters["stats"]["unique_graphs"] == 1 and sum(counters["graph_break"].values()) == 0)


def test_dynamic_vram_in_a_process_of_its_own(device, tmp_path):
    """It has to be turned on before anything touches CUDA; a CPU has no device to lend memory of."""
    folders = (ROOT / "tests", ROOT / "scripts", Path(__file__).parent)
    paths = os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", IN_A_PROCESS, os.environ["COMFYUI_DIR"], str(tmp_path)]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, end_of(ran.stderr)
    result = json.loads(ran.stdout.splitlines()[-1])
    if "unavailable" in result:
        pytest.skip(result["unavailable"])
    worse = {name: errors for name, errors in result.items() if not all(one < DYNAMIC[name] for one in errors)}
    assert not worse
