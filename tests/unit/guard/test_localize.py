"""Naming the operation that made a value non-finite."""

import math

import pytest
import torch
from halfsafe.precision.guard.localize import Localizer, first_bad_weight
from torch.nn.functional import layer_norm, linear


class Block(torch.nn.Module):
    """A masked attention by hand, then a gated feed-forward; every step of it can be made to overflow."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 32)
        self.gate = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)
        self.scale = 1.0

    def forward(self, x):
        mask = torch.full((4, 4), -math.inf).triu(1).to(x.dtype)
        scores = x @ x.transpose(-1, -2) * 0.05 + mask
        y = self.norm(x + scores.softmax(-1) @ x)
        return x + self.down(self.up(y) * self.gate(y)) * self.scale


class Toy(torch.nn.Module):
    def __init__(self, clamp=False):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.out = torch.nn.Linear(16, 8)
        self.clamp = clamp

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if self.clamp:
            x = torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504)
        return self.out(layer_norm(x, (16,)))


@pytest.fixture
def toy():
    torch.manual_seed(0)
    return Toy().half().eval()


@pytest.fixture
def x():
    return torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)).half()


def located(model, x):
    localizer = Localizer(model)
    with torch.inference_mode(), localizer.watching():
        result = model(x)
    return localizer.origin(result)


def test_a_clean_call_has_no_origin_though_its_masks_are_infinite(toy, x):
    assert located(toy, x) is None


def test_a_layer_whose_product_overflows(toy, x):
    with torch.no_grad():
        toy.blocks[1].down.weight *= 3e4
        toy.blocks[1].up.weight *= 30
    origin = located(toy, x)
    assert (origin.layer, origin.op, origin.kind, origin.dtype) == ("blocks.1.down", "matmul", "overflow", "fp16")
    assert origin.multiplies and 1 < origin.largest < 65504


def test_the_product_of_a_gate_between_layers(toy, x):
    with torch.no_grad():
        toy.blocks[0].up.weight *= 1e3
        toy.blocks[0].gate.weight *= 1e3
    origin = located(toy, x)
    assert (origin.layer, origin.op, origin.multiplies) == ("blocks.0", "mul", False)


def test_a_residual_add(x):
    class Residual(torch.nn.Module):
        def forward(self, x):
            return x + (x * 0 + 4e4)

    origin = located(torch.nn.Sequential(Residual()), x + 3e4)
    assert (origin.layer, origin.op) == ("0", "add") and origin.largest >= 3e4


def test_scores_that_overflow_before_the_softmax(toy, x):
    origin = located(toy, x * 300)
    assert (origin.layer, origin.op) == ("blocks.0", "matmul")


def test_a_weight_that_is_nan_is_named(toy, x):
    with torch.no_grad():
        toy.blocks[0].gate.weight[3, 3] = math.nan
    origin = located(toy, x)
    assert (origin.layer, origin.op, origin.kind) == ("blocks.0.gate", "blocks.0.gate.weight", "weights")
    assert first_bad_weight(toy) == "blocks.0.gate.weight"


def test_a_weight_that_overflows_when_it_is_cast_is_the_cast_of_its_layer(x):
    class Cast(torch.nn.Linear):
        def forward(self, x):
            return linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    model = torch.nn.Sequential(Cast(16, 16))
    with torch.no_grad():
        model[0].weight *= 1e9
    origin = located(model, x)
    assert (origin.layer, origin.op) == ("0", "cast")


def test_fp8_weights_with_nan_bytes_are_named(x):
    class Fp8(torch.nn.Module):
        def __init__(self):
            super().__init__()
            data = torch.ones(16, 16).to(torch.float8_e4m3fn)
            data.view(torch.uint8)[2, 2] = 0x7F
            self.weight = torch.nn.Parameter(data, requires_grad=False)

        def forward(self, x):
            return linear(x, self.weight.to(x.dtype))

    origin = located(torch.nn.Sequential(Fp8()), x)
    assert (origin.kind, origin.op) == ("weights", "0.weight")


def test_what_a_clamp_hides_is_found_though_the_result_is_finite(x):
    torch.manual_seed(0)
    model = Toy(clamp=True).half()
    with torch.no_grad():
        model.blocks[0].down.weight *= 3e4
        model.blocks[0].up.weight *= 30
    assert located(model, x).layer == "blocks.0.down"


HIDERS = {
    "clamp": lambda x: x.clamp(-6e4, 6e4),
    "clip_": lambda x: x.clip_(-6e4, 6e4),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "nan_to_num_": lambda x: x.nan_to_num_(0.0),
}


@pytest.mark.parametrize("name", HIDERS)
@pytest.mark.parametrize(("dtype", "layer"), [(torch.float16, "0"), (torch.float32, None)])
def test_of_whatever_hides_an_overflow_of_fp16_the_layer_before_it_is_found(name, dtype, layer):
    """A value that is Inf in fp32 is none that model code hides in fp16."""

    class Hiding(torch.nn.Module):
        def forward(self, x):
            return HIDERS[name](-x if name == "relu" else x)

    model = torch.nn.Sequential(torch.nn.Linear(16, 16), Hiding()).to(dtype)
    with torch.no_grad():
        model[0].weight.fill_(6e4 if dtype == torch.float16 else 3e38)
    origin = located(model, torch.ones(2, 16, dtype=dtype))
    assert (origin and origin.layer) == layer


def test_a_finite_view_of_what_overflowed_does_not_hide_its_origin(x):
    """As of the text's tokens and the image's in one tensor, of which a patch writes into the image's."""

    class Tokens(torch.nn.Module):
        def forward(self, x):
            both = torch.cat([x, x])
            both[2:] += x * 3e38 * 10
            return torch.nn.functional.layer_norm(both[:2], both.shape[-1:]) + both[2:]

    model = torch.nn.Sequential(Tokens(), torch.nn.Identity())
    origin = located(model, x[:2].float())
    assert (origin.layer, origin.op, origin.kind) == ("0", "mul", "overflow")


def test_what_an_in_place_operation_made_finite_is_no_origin(x):
    class Replaced(torch.nn.Module):
        def forward(self, x):
            first = x * 3e38 * 10
            first.zero_()
            return first + x / torch.zeros(1)

    assert located(torch.nn.Sequential(Replaced()), x[:2].float()).op == "div"


def test_a_kernel_that_cannot_be_watched_is_named_as_one_operation(toy, x):
    def kernel(value):
        return value * math.nan

    localizer = Localizer(toy)
    with localizer.watching():
        result = toy.out(localizer.opaque("attention by sage", kernel, x))
    origin = localizer.origin(result)
    assert (origin.op, origin.layer) == ("attention by sage", "")


def test_a_module_is_blamed_when_nothing_in_it_was_seen(toy, x):
    class Hidden(torch.nn.Module):
        def forward(self, x):
            with torch.utils._python_dispatch._disable_current_modes():
                return x * math.nan

    toy.blocks[1] = Hidden()
    assert located(toy, x).layer == "blocks.1"


def test_forwards_are_restored_also_after_an_error(toy, x):
    before = [dict(module.__dict__) for module in toy.modules()]
    toy.blocks[1].scale = None
    with pytest.raises(TypeError):
        located(toy, x)
    toy.blocks[1].scale = 1.0
    assert [dict(module.__dict__) for module in toy.modules()] == before


def test_the_result_is_the_one_the_model_gives_unwatched(toy, x):
    with torch.inference_mode(), Localizer(toy).watching():
        watched = toy(x)
    with torch.inference_mode():
        assert torch.equal(watched, toy(x))


@pytest.mark.parametrize("held", [math.nan, 0.0])
def test_a_buffer_that_a_result_is_written_to_is_no_input(held):
    buffer = torch.full((2, 4), held, dtype=torch.float16)

    class Scaling(torch.nn.Module):
        def forward(self, x):
            return torch.mul(x, 1.0, out=buffer)

    model = torch.nn.Sequential(Scaling())
    localizer = Localizer(model)
    with localizer.watching():
        result = model(torch.full((2, 4), 1e6))
    assert localizer.origin(result).kind == "overflow"


class Divides(torch.nn.Module):
    """Divides zero by zero: NaN from operands below 1."""

    def forward(self, x):
        zero = x * 0
        return zero / zero


class Unseen(torch.nn.Module):
    """Makes NaN by no operation of torch."""

    def forward(self, x):
        y = x.clone()
        with torch.utils._python_dispatch._disable_current_modes():
            y.fill_(math.nan)
        return y


class Copies(torch.nn.Linear):
    """Multiplies by a copy of its weight, as ComfyUI does under dynamic VRAM."""

    def forward(self, x):
        with torch.utils._python_dispatch._disable_current_modes():
            weight = self.weight.clone()
        return linear(x, weight, self.bias)


def test_nan_of_small_operands_is_no_overflow(x):
    origin = located(torch.nn.Sequential(Divides()), x)
    assert (origin.layer, origin.op, origin.kind, origin.dtype, origin.result) == ("0", "div", "nan", "fp16", "fp16")
    assert origin.largest == 0.0 and not origin.multiplies


def test_a_module_whose_failure_no_operation_shows_is_blamed_with_what_it_was_given(x):
    origin = located(torch.nn.Sequential(torch.nn.Identity(), Unseen()), x)
    assert (origin.layer, origin.op, origin.kind, origin.dtype, origin.result) == ("1", "", "unknown", "fp16", "fp16")
    assert origin.largest == x.abs().amax().item()


def test_a_weight_is_named_though_the_layer_multiplies_by_a_copy_of_it(x):
    layer = Copies(16, 16).half()
    with torch.no_grad():
        layer.weight[0, 0] = math.nan
    origin = located(torch.nn.Sequential(layer), x)
    assert (origin.layer, origin.op, origin.kind) == ("0", "0.weight", "weights")


def test_a_result_that_no_module_made_is_of_unknown_origin(toy, x):
    localizer = Localizer(toy)
    with torch.inference_mode(), localizer.watching():
        toy(x)
    origin = localizer.origin(torch.full((2,), math.nan, dtype=torch.bfloat16))
    assert (origin.layer, origin.op, origin.kind, origin.dtype) == ("", "", "unknown", "bf16") and math.isnan(
        origin.largest
    )


def test_a_kernel_is_given_all_of_its_arguments(toy, x):
    localizer = Localizer(toy)
    with localizer.watching():
        assert localizer.opaque("kernel", lambda a, *, scale: a * scale, x, scale=2).equal(x * 2)
