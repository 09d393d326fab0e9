"""Fixtures that need a real ComfyUI, named by the environment variable COMFYUI_DIR.

Without one the tests are reported as skipped, or fail where HALFSAFE_STRICT is set, as `scripts/test.py` does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from setup.comfyui_server import MODEL_FOLDERS, Server, make_base_directory
from support import families, fast_norm, inprocess, next_core, second_device, tiny_models
from support.cuda_rules import RULES, CudaRules, HostReads, rules_in_kernels, with_rules
from support.guarded_runs import MODEL
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensor

CPU = DispatchKeySet(DispatchKey.CPU)
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
CONVOLUTIONS = ("_slow_conv2d_forward", "slow_conv3d_forward")
HERE = Path(__file__).parent
ROOT = HERE.absolute().parents[1]
COMFYUI = Path(os.environ["COMFYUI_DIR"]).resolve() if os.environ.get("COMFYUI_DIR") else None
MISSING = "set COMFYUI_DIR to a ComfyUI folder, or run scripts/test.py"
_base = tempfile.TemporaryDirectory(prefix="halfsafe-host-")

if COMFYUI:
    make_base_directory(Path(_base.name), ROOT)
    inprocess.setup_comfyui(COMFYUI, Path(_base.name), "--cpu")


ONCE_PER_CALL = {"arithmetic/proofs.read", "guard/model.around_call"}
CALIBRATING = {
    "arithmetic/linear._choose", "arithmetic/calibration.watch_inputs",
    "arithmetic/fp16_accumulation._calibrate", "arithmetic/attention._calibrated",
}  # fmt: skip
IN_A_CHECK = {"check/drift", "check/attention"}
AFTER_A_FAILURE = {
    "guard/localize", "guard/failure", "guard/inputs", "guard/causes", "replay/call.sigma", "replay/call.step"
}  # fmt: skip
ONCE_PER_DEVICE = {"devices/probes", "base/amax._drops_nan"}
HOST_MEMORY = {
    "formats/plain.bound",
    "formats/format.bound",
    "formats/stored_weight.amax",
    "formats/checkpoint._scale",
    "formats/checkpoint._is_bare",
}
ANALYSIS = {"study/sensitivity", "study/layer_error", "study/candidates", "formats/fp8"}
CALIBRATE = {"make/calibration.add"}
ALLOWED_READS = frozenset(
    CALIBRATE | ONCE_PER_CALL | CALIBRATING | AFTER_A_FAILURE | IN_A_CHECK | ONCE_PER_DEVICE | HOST_MEMORY | ANALYSIS
)


class Unavailable(pytest.Module):
    """Stands for a test file that cannot be imported without ComfyUI."""

    def collect(self) -> list:
        if os.environ.get("HALFSAFE_STRICT"):
            raise self.CollectError(MISSING)
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if COMFYUI is None and Path(__file__).parent in module_path.parents:
        return Unavailable.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist shares them out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under the next core, run one test of each setting. Put the tests that need the server or its models first: the process that begins with them keeps them, and the other takes tests from the end.

    The slow ones come next: one that began last would leave the other process without work.
    """
    if os.environ.get("HALFSAFE_NEXT_CORE") and not os.environ.get("HALFSAFE_RELEASE"):
        kept = each_value_once(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items.sort(
        key=lambda item: (
            {"server", "small_models"}.isdisjoint(item.fixturenames),
            item.get_closest_marker("slow") is None,
        )
    )


def each_value_once(items: list[pytest.Item]) -> set[pytest.Item]:
    """The fewest cases of each parametrized test that have each value of each of its parameters; tests without parameters whole."""
    cases: dict[tuple[Path, str], dict[pytest.Item, set]] = {}
    for item in items:
        spec = getattr(item, "callspec", None)
        values = {(name, repr(value)) for name, value in spec.params.items()} if spec else set()
        cases.setdefault((item.path, item.originalname), {})[item] = values
    kept: set[pytest.Item] = set()
    for of_test in cases.values():
        left = set().union(*of_test.values())
        while True:
            best = max(of_test, key=lambda item: len(of_test[item] & left))
            kept.add(best)
            left -= of_test[best]
            if not left:
                break
    return kept


def pytest_sessionfinish() -> None:
    _base.cleanup()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `graph/test_composed.py`; `scripts/compose.py` gives them."""
    parser.addoption("--composed-seed", type=int, default=0)
    parser.addoption("--composed-cases", type=int, default=0)
    parser.addoption("--composed-row", action="append", default=[])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "not_as_on_cuda(reason): outside of CUDA's rules and of inference mode")


@pytest.fixture(scope="session", autouse=True)
def core_under_test() -> Iterator[None]:
    """The imported ComfyUI; where HALFSAFE_NEXT_CORE is set, with the layer call of the one after 0.39."""
    with next_core.installed() if os.environ.get("HALFSAFE_NEXT_CORE") else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def sizes_of_files() -> Iterator[None]:
    """A model file whose metadata names sizes is built with them."""
    with tiny_models.small_sizes():
        yield


@pytest.fixture(scope="session", autouse=True)
def read_once() -> Iterator[None]:
    """A tokenizer's files are read once, and a seed is made of a tensor's name once: ComfyUI does it for each encoder and each weight that a LoRA changes,
    the seed bit by bit in Python. Neither is changed by those who have it."""
    import comfy.utils
    from transformers import PreTrainedTokenizerBase

    made, read = {}, PreTrainedTokenizerBase.from_pretrained.__func__

    def from_pretrained(cls, path, *args, **options):
        key = cls, str(path), repr((args, options))
        if key not in made:
            made[key] = read(cls, path, *args, **options)
        return made[key]

    with (
        mock.patch.object(PreTrainedTokenizerBase, "from_pretrained", classmethod(from_pretrained)),
        mock.patch.object(comfy.utils, "string_to_seed", functools.cache(comfy.utils.string_to_seed)),
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def fast_matmuls() -> Iterator[None]:
    """Products of fp8 and fp16 take as long as those of fp32: torch's own on a CPU take six to three hundred times as long. The largest
    magnitude of a tensor takes as long as its maximum, of which torch's own norm takes ten times as long.

    The numbers are the same: each is multiplied and summed in fp32 and rounded once, as a CUDA device does. The unit tier runs
    on torch's own kernels.
    """
    if not hasattr(torch.library, "get_kernel"):  # torch 2.8 hands out no kernel of its own
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "_scaled_mm": _scaled_mm(_own("_scaled_mm")),
        **{name: _convolution(_own(name)) for name in CONVOLUTIONS},
        **fast_norm.kernels(),
    }
    kernels |= {name: _product(_own(name)) for name in PRODUCTS}
    for operation in RULES:
        name = operation.name().removeprefix("aten::")
        kernels[name] = with_rules(operation, kernels.get(name) or _own_if_any(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an operator that has a kernel already
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
    yield
    library._destroy()


def _own(name: str) -> Callable:
    """Return torch's own kernel of an operation."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    return lambda *args, **kwargs: kernel.call_boxed(CPU, *args, **kwargs)


def _own_if_any(name: str) -> Callable | None:
    return _own(name) if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU") else None


def _scaled_mm(own: Callable) -> Callable:
    """torch's kernel is given one row of every product, so that it refuses what it always refuses."""

    def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
        row = own(a[:1], b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
        result = (a.float() @ b.float()) * (scale_a * scale_b)
        return (result if bias is None else result + bias.float()).to(row.dtype)

    return scaled_mm


def _product(own: Callable) -> Callable:
    def product(*tensors, **factors):
        if any(tensor.dtype != torch.float16 for tensor in tensors):
            return own(*tensors, **factors)
        return own(*(tensor.float() for tensor in tensors), **factors).half()

    return product


def _convolution(own: Callable) -> Callable:
    def convolution(x, weight, kernel_size, bias=None, stride=1, padding=0):
        if x.dtype != torch.float16:
            return own(x, weight, kernel_size, bias, stride, padding)
        dims = len(kernel_size)
        wide = (None if tensor is None else tensor.float() for tensor in (x, weight, bias))
        return torch.convolution(*wide, stride, padding, [1] * dims, False, [0] * dims, 1).half()

    return convolution


@pytest.fixture(autouse=True)
def as_on_cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test in inference mode, as ComfyUI executes nodes, and each model call of this process under CUDA's rules."""
    import comfy.model_base

    if request.node.get_closest_marker("not_as_on_cuda"):
        yield
        return
    monkeypatch.setattr(comfy.model_base.BaseModel, "apply_model", _ruled(comfy.model_base.BaseModel.apply_model))
    with torch.inference_mode():
        yield


def _ruled(apply_model: Callable) -> Callable:
    watched = threading.Lock()

    def call(*args, **kwargs):
        rules = _rules(args[1])
        if not watched.acquire(blocking=False):  # reads are watched in the whole process: not by two threads at once
            with rules:
                return apply_model(*args, **kwargs)
        try:
            with rules, HostReads(ALLOWED_READS):
                return apply_model(*args, **kwargs)
        finally:
            watched.release()

    return call


def _rules(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """CUDA's rules for a call of a model: in the kernels, or as a mode where tensors without values reach no kernel."""
    if second_device.is_present():
        return contextlib.nullcontext()  # it has a rule book of its own
    in_kernels = (
        hasattr(torch.library, "get_kernel")
        and not isinstance(x, FakeTensor)
        and torch._C._len_torch_dispatch_stack() == 0
    )
    return rules_in_kernels() if in_kernels else CudaRules()


@pytest.fixture(scope="session")
def comfyui_dir() -> Path:
    """The ComfyUI under test."""
    return COMFYUI


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """`models/` of the in-process ComfyUI: files written below it are found by `folder_paths`."""
    return Path(_base.name) / "models"


@pytest.fixture(scope="session")
def pack() -> ModuleType:
    """The pack, loaded into this process; the same module tests import as `halfsafe`."""
    module = inprocess.load_pack()
    gc.collect()
    gc.freeze()  # see tests/conftest.py
    return module


@pytest.fixture(scope="session")
def comfy(pack: ModuleType) -> SimpleNamespace:
    """The in-process ComfyUI: `pack`, `nodes` (pack nodes by id), `core` (core nodes by id), `run(id, **inputs)`."""
    import nodes as core

    ours = inprocess.node_classes(pack)
    return SimpleNamespace(pack=pack, nodes=ours, core=core.NODE_CLASS_MAPPINGS, run=inprocess.runner(ours))


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `models/` folder with a small model of each kind that a server's prompts ask for."""
    models = tmp_path_factory.mktemp("models")
    for name in MODEL_FOLDERS:
        (models / name).mkdir()
    tiny_models.wan(models / "diffusion_models" / "wan.safetensors")
    tiny_models.clip_l(models / "text_encoders" / "clip_l.safetensors")
    tiny_models.wan_vae(models / "vae" / "wan_vae.safetensors")
    tiny_models.sd15_checkpoint(models / "checkpoints" / "sd15_checkpoint.safetensors")
    return models


@pytest.fixture(scope="session")
def server(comfyui_dir: Path, small_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real ComfyUI process that serves the small models, with the pack in `custom_nodes/Halfsafe-Pack`."""
    base = make_base_directory(tmp_path_factory.mktemp("base"), ROOT)
    shutil.copy(ROOT / "tests" / "support" / "custom_nodes" / "qwen_image_21.py", base / "custom_nodes")
    with Server(comfyui_dir, base, ["--models-directory", str(small_models)]) as running:
        yield running


@pytest.fixture(scope="module")
def running(server: Server, small_models: Path) -> Server:
    """The server with a Wan model that overflows in fp16; a new file, of which no guard has learned."""
    tiny_models.wan_overflowing(small_models / "diffusion_models" / MODEL)
    return server


@pytest.fixture(scope="session")
def shared_files(models_dir: Path) -> tuple[Path, Path]:
    """The files that every module has: ``wan`` and ``overflowing``."""
    folder = models_dir / "diffusion_models"
    return tiny_models.wan(folder / "wan_clean.safetensors"), tiny_models.wan_overflowing(
        folder / "wan_overflowing.safetensors"
    )


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_collected() -> Iterator[None]:
    """After a module, leave what it has imported and compiled out of later collections: a study, an unloading and several tests begin with
    one, and torch's compiler alone made each of them take a quarter of a second."""
    yield
    families.unload_models()  # a model that is frozen stays
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def files_of_a_module(shared_files: tuple[Path, Path]) -> Iterator[None]:
    """All other files that a module's tests write end with it: those of all modules, 17 GB, filled a disk."""
    before = _files()
    yield
    for path in _files() - before:
        path.unlink(missing_ok=True)


def _files() -> set[Path]:
    return {
        path for folder in ("models", "output") for path in (Path(_base.name) / folder).rglob("*") if path.is_file()
    }


@pytest.fixture(scope="session")
def wan(shared_files: tuple[Path, Path]) -> Path:
    """A small Wan model that is finite in fp16. Tests write changed copies of it, never to it."""
    return shared_files[0]


@pytest.fixture(scope="session")
def overflowing(shared_files: tuple[Path, Path]) -> Path:
    """The same with a feed-forward scaled, so that it is NaN in fp16 and finite in bf16 and fp32."""
    return shared_files[1]


@pytest.fixture(scope="session")
def call(comfy: SimpleNamespace, wan: Path) -> families.Call:
    """The first call that ComfyUI's sampler makes of a Wan model, whatever its weights."""
    return families.capture(families.load(comfy, wan), "wan")


@pytest.fixture(scope="session")
def call_of_two(comfy: SimpleNamespace, wan: Path) -> families.Call:
    """The same with a batch of two."""
    return families.capture(families.load(comfy, wan), "wan", batch=2)


@pytest.fixture(scope="module")
def base(comfy: SimpleNamespace, wan: Path):
    """The finite model, loaded in plain fp16."""
    return families.load(comfy, wan, "fp16", "fp16")


@pytest.fixture(scope="module")
def fp32(comfy: SimpleNamespace, overflowing: Path):
    """The overflowing model in fp32: what its results are held against."""
    return families.load(comfy, overflowing, "fp32", "fp32")


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on an Ampere card, which has every switch of the Accumulation node but fp8's."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")


@pytest.fixture
def flags_as_before() -> Iterator[None]:
    """torch's precision flags are after the test exactly as they were."""
    from support.summing import states

    before = states()
    yield
    assert states() == before


@pytest.fixture
def one_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU. The CPU's default attention asks the system for free memory, which breaks the graph without us too."""
    import torch._dynamo
    from comfy.ldm.modules import attention
    from comfy.ldm.wan import model
    from torch._dynamo.utils import counters

    monkeypatch.setattr(model, "optimized_attention", attention.attention_pytorch)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
