"""One call puts dtypes on a module and one takes them off: judged at the operation, by value, by identity."""

import copy
import doctest
import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from halfsafe import precision
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.devices.detect import PROFILE_VARIABLE
from halfsafe.precision.errors import HalfsafeError, RuleError
from halfsafe.precision.library import applied
from halfsafe.precision.library.applied import apply, restore
from support.measures import relative_error
from support.shipped import ROOT
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Parameter(torch.ones(width))
        self.register_buffer("offset", torch.zeros(width))

    def forward(self, x):
        return x + self.gate * self.down(F.gelu(self.up(self.norm(x)))) + self.offset


class Model(nn.Module):
    """Embedding, convolution, blocks and a head; hidden values of the first block exceed fp16's range."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(10, 32), nn.LayerNorm(32)
        self.mix = nn.Conv1d(32, 32, 3, padding=1)
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))
        self.proj_out = nn.Linear(32, 16)
        self.blocks[0].up.weight.data.mul_(500)
        self.blocks[0].down.weight.data.mul_(500)

    def forward(self, tokens, x, scale=None):
        x = self.mix((self.norm(self.table(tokens)) + x).mT).mT
        for block in self.blocks:
            x = block(x)
        return self.proj_out(x if scale is None else x * scale)


@pytest.fixture
def model():
    return Model().eval()


def inputs(dtype=torch.float32, size=1.0):
    generator = torch.Generator().manual_seed(1)
    return torch.arange(10).reshape(2, 5), (torch.randn(2, 5, 32, generator=generator) * size).to(dtype)


def weight_bytes(model):
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def state(model):
    """Everything of a module that could be changed: attributes, and parameters by identity, dtype and bits."""
    modules = {name: dict(module.__dict__) for name, module in model.named_modules()}
    attributes = {name: {key: id(value) for key, value in found.items()} for name, found in modules.items()}
    tensors = {name: (id(t), t.dtype, t.requires_grad, t.detach().clone()) for name, t in model.named_parameters()}
    return attributes, tensors


def assert_same(model, before):
    attributes, tensors = state(model)
    assert attributes == before[0]
    for name, (identity, dtype, grad, values) in tensors.items():
        assert (identity, dtype, grad) == before[1][name][:3], name
        assert torch.equal(values, before[1][name][3]), name


@pytest.fixture(params=[True, False], ids=["inference mode", "no grad"])
def mode(request):
    with torch.inference_mode() if request.param else torch.no_grad():
        yield


def test_fp16_safe_multiplies_fp16_operands_and_stays_right_where_fp16_overflows(model, mode, monkeypatch):
    exact, operands = model(*inputs()), []
    product = SafeOperation._product

    def spy(self, x, weight, *args, **kwargs):
        operands.append((x.dtype, weight.dtype))
        return product(self, x, weight, *args, **kwargs)

    monkeypatch.setattr(SafeOperation, "_product", spy)
    handle = apply(model, compute="fp16_safe")
    result = model(*inputs())
    assert relative_error(exact, result) < 1e-3 and result.dtype == torch.float32
    assert operands == [(torch.float16, torch.float16)] * 8
    assert set(handle.modes().values()) <= {"fp16_wide", "fp16_scaled"} and len(handle.modes()) == 8
    assert relative_error(exact, model(*inputs())) < 1e-3, "later calls too"
    handle.remove()
    assert not copy.deepcopy(model).half()(*inputs(torch.float16)).isfinite().all(), "plain fp16 overflows here"


@pytest.mark.parametrize("compute", ["fp16_safe", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_module_in_any_dtype_computes_in_the_one_asked_for(model, compute, dtype, mode):
    exact = model(*inputs())
    model.to(dtype)
    seen = []
    model.blocks[1].norm.register_forward_hook(lambda module, args, result: seen.append((args[0].dtype, result.dtype)))
    with apply(model, compute=compute):
        result = model(*inputs(dtype), scale=torch.ones(32, dtype=dtype))
    activations = torch.bfloat16 if compute == "bf16" else torch.float32
    assert set(seen) == {(activations, activations)} and result.dtype == activations
    assert relative_error(exact, result) < (0.03 if torch.bfloat16 in (dtype, activations) else 2e-3)


def test_rules_decide_layers(model):
    handle = apply(model, compute="bf16", rules="blocks.1.* compute=fp32\nproj_out stream=fp32")
    assert model(*inputs()).dtype == torch.float32
    assert {name: mode for name, mode in handle.modes().items() if mode != "bf16"} == {
        "blocks.1.up": "fp32", "blocks.1.down": "fp32",
    }  # fmt: skip


def test_auto_follows_the_device(model, monkeypatch):
    monkeypatch.setenv(PROFILE_VARIABLE, "sm_75")
    handle = apply(model, compute="auto")
    assert set(handle.modes().values()) == {"fp16_wide"}, "an unknown family is not safe in fp16, and sm_75 has no bf16"


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2"])
def test_fp8_storage_is_scaled_and_leaves_what_the_rules_keep(model, storage, mode):
    exact, before = model(*inputs()), weight_bytes(model)
    handle = apply(model, storage=storage)
    assert handle.stored == {f"blocks.{index}.{layer}": storage for index in range(3) for layer in ("up", "down")}
    assert set(handle.kept) == {"mix", "proj_out"}
    assert weight_bytes(model) < before / 2
    assert relative_error(exact, model(*inputs())) < (0.06 if storage == "fp8_e4m3fn" else 0.12)
    assert model.blocks[0].up(torch.ones(1, 32)).isfinite().all(), "layers work one by one"


def test_storage_and_compute_together(model, mode):
    exact = model(*inputs())
    with apply(model, storage="fp16", compute="fp16_safe", rules="blocks.2.* storage=fp8_e4m3fn") as handle:
        assert handle.stored["blocks.2.up"] == "fp8_e4m3fn" and handle.stored["mix"] == "fp16"
        assert relative_error(exact, model(*inputs())) < 0.04


def test_a_weight_beyond_fp16_is_not_stored_in_it(model):
    model.blocks[1].up.weight.data[0, 0] = 7e4
    handle = apply(model, storage="fp16")
    assert model.blocks[1].up.weight.dtype == torch.float32 and "7e+04" in handle.kept["blocks.1.up"]


SETTINGS = [
    {"compute": "fp16_safe"},
    {"storage": "fp8_e4m3fn", "keep": True},
    {"storage": "fp16", "compute": "bf16", "keep": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_remove_restores_everything_exactly(model, settings, mode):
    before = state(model)
    exact = model(*inputs())
    handle = apply(model, **settings)
    model(*inputs())
    assert not torch.equal(model(*inputs()), exact)
    handle.remove()
    handle.remove()
    assert_same(model, before)
    assert torch.equal(model(*inputs()), exact)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_exception_inside_leaves_the_module_usable_and_removable(model, settings):
    before = state(model)

    def fail(module, args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), apply(model, **settings):
        inside = state(model)[0]
        hook = model.blocks[1].down.register_forward_pre_hook(fail)
        try:
            model(*inputs())
        finally:
            hook.remove()
            assert state(model)[0] == inside
    assert_same(model, before)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_module_that_cannot_be_applied_to_is_left_as_it_was(model, settings):
    settings = {"storage": "fp8_e4m3fn"} | settings
    model.blocks[2].down.weight.data[0, 0] = float("nan")
    before = state(model)[0]
    with pytest.raises(HalfsafeError, match=r"blocks\.2\.down\.weight holds NaN"):
        apply(model, **settings | {"keep": True})
    assert state(model)[0] == before


def test_without_keep_remove_returns_what_the_storage_holds(model):
    original = model.blocks[0].up.weight.detach().clone()
    with apply(model, storage="fp8_e4m3fn"):
        pass
    weight = model.blocks[0].up.weight
    assert weight.dtype == torch.float32 and weight.requires_grad and not weight.is_inference()
    assert 0.01 < relative_error(original, weight) < 0.04
    with apply(model, storage="fp8_e4m3fn"):
        pass
    assert torch.equal(model.blocks[0].up.weight, weight), "values of fp8 survive it a second time"


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "bf16"])
def test_a_layer_by_itself_and_applied_inside_inference_mode_works_outside(storage):
    layer = nn.Linear(32, 32).eval()
    with torch.inference_mode():
        handle = apply(layer, storage=storage, compute="bf16")
    x = torch.ones(2, 32, requires_grad=True)
    layer(x).float().sum().backward()
    assert x.grad is not None and handle.modes() == {"": "bf16"}
    restore(layer)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("compute", ["fp16_safe", "fp16", "bf16"])
def test_a_model_is_called_as_it_is_and_its_biases_get_gradients(compute):
    """Weights held in fp8 have no gradient, biases do."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    with apply(model, storage="fp8_e4m3fn", compute=compute):
        model(torch.ones(2, 32)).float().sum().backward()
    assert all(model[place].bias.grad is not None for place in (0, 2))


def test_attention_kernels_of_torch_that_read_weights_are_left_to_themselves(mode):
    encoder = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    model = nn.Sequential(nn.Linear(32, 32), encoder)
    x = torch.randn(1, 4, 32)
    exact = model(x)
    with apply(model, storage="fp8_e4m3fn", compute="fp16_safe") as handle:
        assert relative_error(exact, model(x)) < 0.06
    assert set(handle.modes()) == {"0"}
    assert set(handle.skipped) == {"1.self_attn.out_proj", "1.linear1", "1.linear2"}


def test_a_copy_of_an_applied_module_has_a_life_of_its_own(model, mode):
    exact = model(*inputs())
    apply(model, storage="fp8_e4m3fn", compute="fp16_safe", keep=True)
    twin = copy.deepcopy(model)
    restore(model)
    assert torch.equal(model(*inputs()), exact)
    assert 0 < relative_error(exact, twin(*inputs())) < 0.06
    restore(twin)
    for kept, own in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(kept, own) and kept.dtype == own.dtype
    assert not any("forward" in module.__dict__ for module in twin.modules())
    assert relative_error(exact, twin(*inputs())) < 1e-6, (
        "equal weights elsewhere in memory may be summed in another order"
    )


def test_a_module_is_not_kept_alive_by_what_is_on_it():
    model = Model().eval()
    apply(model, storage="fp8_e4m3fn", compute="fp16_safe")
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"compute": "fp8"}, HalfsafeError, "compute='fp8'.*fp16_safe"),
        ({"storage": "as_file"}, HalfsafeError, "storage='as_file'.*fp8_e4m3fn"),
        ({"storage": "bf16", "rules": "a b"}, RuleError, "line 1"),
    ],
)
def test_settings_that_cannot_be_applied_are_named(settings, error, words):
    layer = nn.Linear(4, 4)
    with pytest.raises(error, match=words):
        apply(layer, **settings)
    assert "forward" not in layer.__dict__


def test_a_second_apply_is_refused_until_the_first_is_removed():
    layer = nn.Linear(4, 4)
    apply(layer, compute="bf16")
    with pytest.raises(HalfsafeError, match="restore"):
        apply(layer, compute="fp32")
    restore(layer)
    apply(layer, compute="fp32")


def test_a_compiled_module_is_refused():
    with pytest.raises(HalfsafeError, match="compiled"):
        apply(torch.compile(nn.Linear(4, 4)), compute="bf16")


def test_the_examples_in_the_docstrings_are_true():
    found = doctest.testmod(applied)
    assert found.attempted > 10 and found.failed == 0


def test_every_name_of_the_front_door_is_there():
    names = "Applied HalfsafeError apply convert_file detect inspect_file plan_file portable_apply restore rules_from scan_file"
    assert precision.__all__ == names.split()
    assert all(getattr(precision, name).__doc__ for name in precision.__all__)
    with pytest.raises(AttributeError, match="no attribute 'applied_by'"):
        precision.applied_by  # noqa: B018


def test_importing_the_package_imports_nothing_else():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import precision; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
