"""A block whose operands are known to fit measures nothing, and whatever happens to one of them is measured again."""

import contextlib
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.attention import Kernels, SafeAttention
from halfsafe.precision.arithmetic.bounds.known_norm import KnownNorm
from halfsafe.precision.arithmetic.bounds.known_values import SAMPLED, KnownValues, counted
from halfsafe.precision.arithmetic.bounds.value_bounds import ValueBound
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from support.leaf_operations import LeafOperations, Reductions

WIDTH, HEADS, TOKENS = 128, 2, 16


def weights(module, x, dtype, bias_dtype=torch.float32):
    bias = getattr(module, "bias", None)
    return contextlib.nullcontext((module.weight.to(dtype), None if bias is None else bias.to(bias_dtype)))


def sdpa(q, k, v, heads, **_):
    dtype = q.dtype
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q.float(), k.float(), v.float()))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).to(dtype)


class Block:
    """Two norms, attention to the stream and to a text, and a layer whose operand no norm makes."""

    def __init__(self, wide: bool | None = None):
        torch.manual_seed(0)
        self.calibration = Calibration()
        self.calibration.results.allowed = True
        self.norms = [self.norm(), self.norm()]
        of = dict.fromkeys(["q", "k", "v", "o", "q2", "k2", "v2", "o2", "last"])
        self.linears = {name: torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False) for name in of}
        self.layers = {
            name: SafeOperation(
                linear, self.calibration.scale(f"blocks.0.{name}"), self.calibration, weights, wide, largest_fp16=128.0
            )
            for name, linear in self.linears.items()
        }
        self.attention = SafeAttention(self.calibration)
        self.x = torch.randn(1, TOKENS, WIDTH)
        self.text = torch.randn(1, 5, WIDTH)
        self.between = lambda n: n
        self.after = lambda x: x

    def norm(self):
        module = torch.nn.LayerNorm(WIDTH).requires_grad_(False)
        module.weight.data.normal_()
        module.bias.data.normal_()
        return KnownNorm(module, module.forward, self.calibration, weights)

    def once(self):
        self.attention.begin()
        text = counted(self.text)
        self.calibration.values.note(text)
        x = self.x
        for _ in range(2):
            n = self.between(self.norms[0](x))
            x = x + self.attended("", n, n)
            x = x + self.attended("2", self.norms[1](x), text)
            x = self.after(x)
        return self.layers["last"](x * torch.ones(()))

    def attended(self, which, x, context):
        q, k, v = self.layers["q" + which](x), self.layers["k" + which](context), self.layers["v" + which](context)
        return self.layers["o" + which](self.attention(Kernels(sdpa, sdpa), q, k, v, HEADS))

    def call(self):
        with torch.inference_mode(), Reductions() as seen:
            result = self.calibration.run(self.once)
        self.seen = seen.count
        return result.float()


@pytest.fixture
def block():
    made = Block()
    made.call()
    return made


def plain(block) -> torch.Tensor:
    """The same in fp32."""
    with torch.inference_mode():
        norms = [lambda x, norm=norm: norm.inner(x) for norm in block.norms]
        x = block.x
        for _ in range(2):
            for norm, which, text in zip(norms, ("", "2"), (None, block.text), strict=True):
                n = norm(x)
                n = block.between(n) if not which else n
                context = n if text is None else text
                q, k, v = (block.linears[name + which](to) for name, to in (("q", n), ("k", context), ("v", context)))
                x = x + block.linears["o" + which](sdpa(q, k, v, HEADS).float())
            x = block.after(x)
        return block.linears["last"](x)


def error(block, result) -> float:
    reference = plain(block)
    return ((result - reference).norm() / reference.norm()).item()


def test_a_call_measures_only_its_last_operand_and_its_text(block):
    result = block.call()
    assert block.seen == 1 + 3  # the text's amax and row norms, once for both blocks
    assert error(block, result) < 2e-3 and block.calibration.repeats == 0


def test_what_is_known_changes_no_result(block, monkeypatch):
    known = block.call()
    monkeypatch.setattr(KnownValues, "covers", lambda self, scale, x: False)
    monkeypatch.setattr(KnownValues, "of", lambda self, x: None)
    assert torch.equal(known, block.call()) and block.seen > 20


def test_one_call_of_some_measures_all(block):
    counts = []
    for _ in range(SAMPLED + 1):
        block.call()
        counts.append(block.seen)
    few = counts[0]
    assert [place for place, count in enumerate(counts, 1) if count > few] == [SAMPLED]
    assert block.calibration.repeats == 0


def _scaled_view(n):
    n.view(-1)[:].mul_(1e6)
    return n


@pytest.mark.parametrize(
    "between",
    [lambda n: n.mul_(1e6), lambda n: n * 1e6, _scaled_view],
    ids=["in place", "a new tensor", "through a view"],
)
def test_a_normalized_tensor_that_grows_is_measured(block, between):
    block.between = between
    result = block.call()
    assert torch.isfinite(result).all() and block.calibration.repeats == 1
    assert error(block, result) < 2e-2


def test_what_another_pack_does_to_some_calls_is_measured_in_these(block):
    block.call()
    few = block.seen
    block.between = lambda n: n * 1.0
    block.call()
    assert block.seen > few and block.calibration.repeats == 0
    block.between = lambda n: n
    block.call()
    assert block.seen == few


def test_a_stream_that_is_not_finite_is_noticed(block):
    block.after = lambda x: x / 0.0
    block.call()
    assert block.calibration.repeats == 1


def test_a_text_that_grows_is_calibrated_for_once(block):
    block.call()
    block.text = block.text * 100
    assert error(block, block.call()) < 1e-2 and block.calibration.repeats == 1
    block.text = block.text / 100
    block.call()
    block.text = block.text * 100
    block.call()
    assert block.calibration.repeats == 1


def test_a_new_calibration_records_at_the_same_addresses(block):
    records = [buffer.records for buffer, _ in block.calibration._buffers.values()]
    block.calibration.recalibrate()
    block.text = block.text * 3
    block.call()
    assert all(buffer.records is old for (buffer, _), old in zip(block.calibration._buffers.values(), records, strict=True))
    block.call()
    assert block.seen == 1 + 3 and block.calibration.repeats == 0


def test_an_attention_by_somebody_elses_kernel_bounds_nothing():
    block = Block()

    def attended(which, x, context):
        q, k, v = (block.layers[name + which](to) for name, to in (("q", x), ("k", context), ("v", context)))
        larger = lambda *args, **kwargs: 30 * sdpa(*args, **kwargs)  # noqa: E731
        return block.layers["o" + which](block.attention(Kernels(larger, larger, foreign=True), q, k, v, HEADS))

    block.attended = attended
    block.call()
    block.call()
    assert all(block.layers[name].scale.covered is None for name in ("o", "o2"))
    assert all(block.layers[name].scale.covered is not None for name in ("q", "q2"))


def test_a_bound_that_the_weight_takes_past_fp16_is_not_relied_on():
    block = Block()
    block.linears["q"].weight.data *= 1e3
    block.call()
    assert block.layers["q"].scale.covered is None or not block.layers["q"].scale.result.proven
    result = block.call()
    assert torch.isfinite(result).all() and error(block, result) < 2e-2


def test_a_device_that_returns_fp16_only_relies_on_a_bound_of_the_sums():
    block = Block(wide=False)
    block.calibration.results.allowed = False
    block.call()
    covered = {name: layer.scale for name, layer in block.layers.items() if layer.scale.covered}
    assert all(scale.reach.largest <= 65504 / 2 for scale in covered.values())
    assert error(block, block.call()) < 2e-3


def tagged(values: KnownValues) -> torch.Tensor:
    x = counted(torch.zeros(4, 8))
    values.note(x, ValueBound(2.0, 3.0, 2.5))
    return x


def test_a_bound_is_of_a_tensor_and_of_its_views():
    values = KnownValues()
    values.begin(calibrating=False)
    with torch.inference_mode():
        x = tagged(values)
        assert values.of(x) == ValueBound(2.0, 3.0, 2.5)
        for view in (x.t(), x[1:, ::2], x.unsqueeze(0).movedim(0, 1).expand(4, 2, 8), x.view(-1)[4:12], x.view(2, 16), x.view(-1)[2:6]):
            assert values.of(view) == ValueBound(2.0)
        for view in (x.view(8, 4), x.reshape(2, 2, 8)[0], x[1], x.view(-1)[4:8], x.unsqueeze(0)):  # their rows lie inside of rows
            assert values.of(view) == ValueBound(2.0, 3.0)
        for other in (x * 1, x.clone(), x.half(), x.t().contiguous(), x.view(torch.int32), torch.cat([x, x])):
            assert values.of(other) is None


def test_a_bound_of_a_view_of_all_of_a_tensor_is_of_its_other_views():
    values = KnownValues()
    values.begin(calibrating=False)
    with torch.no_grad():
        for made, known in ((torch.zeros(8, 4).view(2, 4, 4), True), (torch.zeros(8, 4)[:4].view(4, 4), False)):
            values.note(made, ValueBound(2.0))
            assert values.of(made) == ValueBound(2.0)
            assert (values.of(made.chunk(2, dim=-1)[1]) is not None) == known


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(2),
        lambda x: x[0].add_(1),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: x.copy_(x * 2),
        lambda x: F.silu(x, inplace=True),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.view(-1).fill_(7),
    ],
    ids=["mul_", "part", "set", "copy_", "silu", "out", "view"],
)
def test_a_bound_ends_where_somebody_writes_to_the_tensor(write):
    values = KnownValues()
    values.begin(calibrating=False)
    with torch.inference_mode():
        x = tagged(values)
        view = x.view(8, 4)
        write(x)
        assert values.of(x) is None and values.of(view) is None


def test_a_bound_of_an_earlier_call_is_not_relied_on():
    values = KnownValues()
    values.begin(calibrating=False)
    with torch.inference_mode():
        x = tagged(values)
        values.begin(calibrating=False)
        assert values.of(x) is None


def test_a_tensor_to_which_torch_counts_no_writes_has_no_bound():
    values = KnownValues()
    values.begin(calibrating=False)
    with torch.inference_mode():
        x = torch.zeros(4)
        assert values.note(x, ValueBound(1.0)) is None and values.of(x) is None
        same = counted(x)
        same.add_(1)
        assert x[0] == 1 and not same.requires_grad


def test_the_last_operand_is_measured_though_it_is_known():
    block = Block()
    block.once = lambda: block.layers["last"](block.norms[1](block.layers["q"](block.norms[0](block.x)).float()))
    block.call()
    block.call()
    assert block.seen == 1 and block.calibration.repeats == 0
    block.x = block.x / 0.0
    block.call()
    assert block.calibration.repeats == 1


class Casts(LeafOperations):
    """List the shapes of what is cast to fp16."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def leaf(self, func, args, kwargs):
        result = func(*args, **kwargs)
        if func.name().startswith(("aten::_to_copy", "aten::to.")) and result.dtype == torch.float16 != args[0].dtype:
            self.shapes.append(tuple(result.shape))
        return result


class Embedded(Block):
    """The same with a text that a layer makes of what the model is given, in fp32, as ``text_embedding`` of Wan."""

    def __init__(self):
        super().__init__()
        self.layers["last"].largest_fp16 = None

    def once(self):
        self.attention.begin()
        text, x = self.layers["last"](counted(self.text)), self.x
        for _ in range(3):
            x = x + self.attended("2", self.norms[1](x), self.between(text))
        return self.layers["o"](x * torch.ones(()))


def test_a_text_that_all_blocks_are_given_is_cast_once(block):
    with Casts() as seen:
        block.call()
    assert seen.shapes.count((1, 5, WIDTH)) == 1


def test_a_layers_result_that_all_blocks_are_given_is_measured_and_cast_once():
    block = Embedded()
    block.call()
    with Casts() as seen:
        result = block.call()
    assert block.seen == 2 + 3 and block.calibration.repeats == 0  # the first and the last operand; the text, once
    assert seen.shapes.count((1, 5, WIDTH)) == 2  # the given text and the made one
    block.text = block.text * 1e3
    grown = block.call()
    assert block.calibration.repeats == 1 and torch.isfinite(grown).all() and torch.isfinite(result).all()


def test_a_layers_result_that_somebody_writes_to_is_measured_again():
    block = Embedded()
    block.call()
    block.between = lambda text: text.mul_(30.0)
    block.call()
    assert block.seen > 2 + 3


def test_of_two_texts_that_a_layer_makes_each_is_measured():
    block = Embedded()
    steady = torch.zeros(1, 5, WIDTH)
    steady[..., 0] = block.text.abs().max()
    embedded = block.layers["last"]
    embedded.module.weight.data.copy_(torch.eye(WIDTH))
    block.text = steady.clone()

    def once():
        block.attention.begin()
        x = block.x
        for text in (embedded(counted(block.text)), embedded(counted(steady))):
            for _ in range(2):
                x = x + block.attended("2", block.norms[1](x), text)
        return block.layers["o"](x * torch.ones(()))

    block.once = once
    block.call()
    block.text = steady.amax().expand(1, 5, WIDTH).clone()  # no element is larger, and each row is 11 times as long
    block.call()
    assert block.calibration.repeats == 1


def test_what_is_cast_once_goes_with_its_tensor():
    block = Block()
    block.call()
    block.call()
    operands, values = block.calibration.operands, block.calibration.values
    operands.begin(calibrating=False)
    with torch.no_grad():
        x = torch.randn(4, WIDTH)
        values.note(x)
        scale = next(layer.scale for layer in block.layers.values() if layer.scale.once is not None and layer.scale.once.is_shared)
        assert values.covers(scale, x)
        operand = weakref.ref(operands._made(scale, x))
        assert operand() is operands._made(scale, x)
        del x
    assert operand() is None
    with torch.no_grad():
        half = torch.randn(4, WIDTH, dtype=torch.float16)
        values.note(half)
        assert values.covers(scale, half)
        assert operands._made(scale, half) is half and values.tag_of(half)[0].operand is None
        x = torch.randn(4, WIDTH)
        values.note(x)
        assert values.covers(scale, x)
        operand = weakref.ref(operands._made(scale, x))
        operands.end()
    assert operand() is None and x is not None


def test_a_head_of_a_view_lies_inside_of_a_row():
    values = KnownValues()
    values.begin(calibrating=False)
    with torch.no_grad():
        x = torch.zeros(4, 2, 64)
        values.note(x, ValueBound(2.0, 3.0))
        assert values.head_norm(x, 64) == values.head_norm(x.view(4, 128), 64) == 3.0
        assert values.head_norm(x.view(4, 128), 128) == 2.0 * math.sqrt(128)
        assert values.head_norm(x.transpose(0, 1), 64) == values.head_norm(x.view(-1)[32:96], 64) == 16.0
        assert values.head_norm(x + 0, 64) == math.inf


def test_a_wide_layer_takes_its_bias_as_it_is_held(block):
    asked = []

    def noted(module, x, dtype, bias_dtype=torch.float32):
        asked.append((dtype, bias_dtype))
        return weights(module, x, dtype, bias_dtype or torch.float16)

    block.layers["last"].weights, block.layers["last"].largest_fp16 = noted, None
    block.calibration.recalibrate()
    block.call()
    asked.clear()
    first = block.call()
    assert asked == [(torch.float16, None)] and error(block, first) < 2e-3
    block.layers["last"].wide = False
    block.calibration.recalibrate()
    block.call()
    block.call()
    assert asked[-1] == (torch.float16, torch.float32)
