"""Layers are measured and chosen on a small net: the choice holds its target, and its text reads back as the same rules."""

import contextlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.base.amax import amax_value
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.formats.checkpoint import StoredWeight, read_checkpoint
from halfsafe.precision.formats.fp8 import quantize
from halfsafe.precision.plan.rules import Rule, patterns, rules_from
from halfsafe.precision.study import sensitivity as a
from halfsafe.precision.study.analysis_text import analysis_result
from halfsafe.precision.study.candidates import CANDIDATES, Candidate, with_fp16_sums
from halfsafe.precision.study.charts import COLOURS, analysis_chart
from halfsafe.precision.study.layer_error import MeasuredForward
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ImageColor
from support.measures import relative_error, sqnr_db
from support.plain_weights import plain_weights
from support.storing import tensors_in
from torch.overrides import TorchFunctionMode

FP8 = Candidate("fp8_e4m3fn")
OUTLIER = 2.0**17
ROLES = {"time_embedding": "timestep"}
pytestmark = pytest.mark.usefixtures("one_thread")


class NoFloat64(TorchFunctionMode):
    """As on Metal, which has no float64: tensors are doubled on the host alone, where ``cpu`` has brought them."""

    def __init__(self):
        super().__init__()
        self.on_host = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.double and not any(args[0] is tensor for tensor in self.on_host):
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu:
            self.on_host.append(result)
        return result


def test_an_snr_is_computed_on_the_host():
    reference, result = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5])
    with NoFloat64():
        assert a.closeness([reference], [result])[0] == pytest.approx(20.0)
        assert a.closeness([reference], [reference])[0] == math.inf
    assert a.closeness([reference], [torch.tensor([3.0, math.nan])])[0] == -math.inf


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(torch.nn.Module):
    """Blocks of products and a convolution. ``outliers``: blocks with a column so large that fp8 has nothing left for the others."""

    def __init__(self, blocks=8, outliers=(), width=32):
        super().__init__()
        self.time_embedding, self.unused = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.up, self.down = (
            torch.nn.ModuleList(torch.nn.Linear(*size) for _ in range(blocks))
            for size in ((width, 2 * width), (2 * width, width))
        )
        self.mix = torch.nn.Conv1d(width, width, 3, padding=1)
        for seed, layer in enumerate((self.time_embedding, self.unused, *self.up, *self.down, self.mix)):
            layer.weight.data = normal(*layer.weight.shape, seed=seed) * layer.weight[0].numel() ** -0.5
            layer.bias.data.zero_()
        for block in outliers:
            self.down[block].weight.data[:, 0] *= OUTLIER
            self.up[block].weight.data[0] /= OUTLIER

    def forward(self, x):
        x = x + self.time_embedding(x)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(F.layer_norm(x, x.shape[-1:]))))
        return x

    def sampled(self, step=lambda: contextlib.nullcontext()):
        """The latent after a few steps, each of which starts from what the one before gave."""
        x = normal(1, 12, 32, seed=1)
        with torch.no_grad():
            for _ in range(3):
                with step():
                    x = x - 0.3 * self(x)
        return [x]


def change(module, candidate):
    """The candidate on a torch module: its weight is shadowed, or its forward is."""
    if candidate.stores:
        return [(module, "weight", candidate.weight(module.weight))]

    def forward(x):
        exact = F.linear(x, module.weight, module.bias)
        return exact + candidate.error(module, x, module.weight, module.bias, 0.0, exact)

    return [(module, "forward", forward)]


def layer_result(name, cls="Linear", role="", barred=False, size=10):
    return a.LayerResult(
        name, cls, size, a.BARRED if barred else a.KEPT, "no Linear" if barred else role, sensitive=bool(role)
    )


def analyzed(net, target, candidate=FP8, pin=True):
    subjects = [
        (layer_result(name, type(module).__name__, ROLES.get(name, ""), isinstance(module, torch.nn.Conv1d)), module)
        for name, module in net.named_modules()
        if hasattr(module, "weight")
    ]

    @contextlib.contextmanager
    def step():
        session.begin_step()
        with session.inside():
            yield

    session = a.Session(subjects, candidate, lambda: net.sampled(step), plain_weights, change)
    return session.analyze(target, pin)


def snr_of(net, names):
    """The SNR of the final latent of a net whose layers hold fp8 weights, measured without the analysis."""
    exact, weights = net.sampled(), {name: net.get_submodule(name).weight.data for name in names}
    for name, weight in weights.items():
        net.get_submodule(name).weight.data = FP8.weight(weight)
    found = net.sampled()
    for name, weight in weights.items():
        net.get_submodule(name).weight.data = weight
    return sqnr_db(exact[0], found[0])


def names_of(layers) -> set[str]:
    return {layer.name for layer in layers}


def test_the_weight_is_that_of_the_packs_own_quantizer():
    for dtype, name in ((torch.float32, "fp8_e4m3fn"), (torch.bfloat16, "fp8_e5m2")):
        weight, candidate = (normal(64, 48) * 0.02).to(dtype), Candidate(name)
        data, scale = quantize(weight, candidate.dtype, amax_value(weight))
        expected = (data.float() * scale).to(dtype)
        assert torch.equal(candidate.weight(weight), expected)
        assert candidate.weight_error(weight) == pytest.approx(sqnr_db(weight, expected), abs=1e-3)


def test_int8_is_that_of_the_packs_files_and_products_cost_more():
    stored = StoredWeight("a.weight", normal(48, 128))
    held = read_checkpoint(tensors_in(stored, "int8"), {}, "m").weights["a.weight"]
    weights, products = Candidate("int8", products=False), Candidate("int8")
    assert torch.equal(weights.weight(stored.data), held.dequantize(torch.float32))
    layer, x = torch.nn.Linear(128, 48), normal(64, 128, seed=1)
    layer.weight.data = stored.data
    alone, both = (one.output_error(layer, x, layer.weight.data, None)[0] for one in (weights, products))
    assert torch.equal(weights.input(x), x) and 2 < alone - both < 4
    x[:, 5] *= 300
    expected = F.linear(products.input(x), held.dequantize(torch.float32))
    found = products.error(layer, x, stored.data, None, 0.0, F.linear(x, stored.data)) + F.linear(x, stored.data)
    assert torch.allclose(found, expected, atol=1e-3)


def test_fp16_sums_round_as_often_as_they_are_added_up_and_overflow(monkeypatch):
    x, weight = normal(5, 4096), normal(7, 4096, seed=1)
    exact, half = F.linear(x, weight), F.linear(x.half().float(), weight.half().float())
    assert (
        3 * relative_error(half, half.half())
        < relative_error(exact, with_fp16_sums(x.half(), weight.half(), None))
        < 5e-3
    )
    big, sign = torch.full((1, 64), 200.0), torch.ones(1, 64)
    sign[0, 32:] = -1
    assert F.linear(big, big * sign).item() == 0
    assert not torch.isfinite(with_fp16_sums(big, big * sign, None)).any(), "the partial sum passes 65504"
    monkeypatch.setattr("halfsafe.precision.study.candidates.SUM_LENGTH", 4096)
    assert relative_error(half, with_fp16_sums(x.half(), weight.half(), None)) < 1e-3, "rounded once"


def sampled(layer, x):
    return MeasuredForward(layer, layer_result("a"), FP8, plain_weights).sample(x)


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_error_of_a_layer_on_samples_is_that_of_all_its_inputs(name):
    layer, x = torch.nn.Linear(64, 48), normal(1, 4000, 64, seed=1)
    layer.weight.data, candidate = normal(48, 64) / 8, Candidate(name)
    few, every = (
        candidate.output_error(layer, rows, layer.weight.data, layer.bias.data) for rows in (sampled(layer, x), x[0])
    )
    assert len(sampled(layer, x)) == 64 and few == pytest.approx(every, abs=1.0)
    expected = {"fp8_e4m3fn": 31.5, "fp8_e5m2": 25.5, "bf16": 52, "fp16": 70, "fp16_acc16": 66, "int8": 41.5}[name]
    assert few[0] == pytest.approx(expected, abs=3)


@pytest.mark.parametrize(("kind", "groups"), [(torch.nn.Conv1d, 1), (torch.nn.Conv2d, 4), (torch.nn.Conv3d, 1)])
def test_convolutions_are_measured_on_a_crop(kind, groups):
    dimensions = int(kind.__name__[4])
    layer, x = kind(8, 16, 3, padding=1, groups=groups), normal(2, 8, *[20] * dimensions)
    assert sampled(layer, x).shape == (1, 8, *(2, 8, 8)[-dimensions:])
    error = Candidate("bf16").output_error(layer, sampled(layer, x), layer.weight.data, layer.bias.data)
    assert 45 < error[1] <= error[0] + 3 < 65


def test_an_error_that_large_channels_hide_is_seen():
    layer, x = torch.nn.Linear(64, 48), normal(64, 64, seed=1)
    layer.weight.data = normal(48, 64) / 8
    assert FP8.output_error(layer, x, layer.weight.data, None)[1] == pytest.approx(31.5, abs=1)
    layer.weight.data[0] *= OUTLIER
    whole, channel = FP8.output_error(layer, x, layer.weight.data, None)
    assert whole > 30 and channel < 6, "the large channel alone is right, the others are lost"


@pytest.mark.parametrize("target", [20, 28, 32, 36, 45])
def test_the_choice_holds_its_target_and_its_figure_is_true(target):
    net = Net(outliers=(1, 2))
    found = analyzed(net, target)
    assert found.snr_db >= target and bool(found.chosen) == (found.snr_db < math.inf)
    assert not found.chosen or found.snr_db == pytest.approx(snr_of(net, names_of(found.chosen)), abs=0.01)
    assert found.trials <= a.MAX_TRIALS and found.steps == 3 * (1 + found.trials)


class Additive:
    """Runs of layers whose noise powers add up, one latent each: what the search sees of a model."""

    def __init__(self, noises, guesses=None):
        layers = [layer_result(str(index)) for index in range(len(noises))]
        for layer, guess in zip(layers, guesses or noises, strict=True):
            layer.output_db = layer.channel_db = -10 * math.log10(guess)
            layer.flops = 1
        self.session = a.Session([(layer, None) for layer in layers], FP8, self.run, plain_weights, None)
        self.noises = noises

    def run(self):
        self.session.begin_step()
        return [torch.tensor([1.0, math.sqrt(self.noise(self.session._changed or ()))], dtype=torch.float64)]

    def noise(self, names):
        return sum(self.noises[int(name)] for name in names)

    def analyzed(self, target=20.0):
        found = self.session.analyze(target)
        assert self.noise(names_of(found.chosen)) <= 10 ** (-target / 10) * (1 + 1e-9), "whatever is found holds"
        return found


def test_layers_are_found_where_thirteen_of_thirty_hold_the_target_by_themselves():
    noises = [0.004 if index % 7 in (1, 3, 5) else 3.0 for index in range(30)]
    assert sum(noise <= 0.01 for noise in noises) == 13
    assert len(Additive(noises).analyzed().chosen) == 2, "as many as there is room for"
    upside_down = Additive(noises, [1 / (1 + noise) for noise in noises]).analyzed()
    assert (
        not upside_down.chosen
        and upside_down.trials == a.MAX_TRIALS
        and "No layer was found" in analysis_result(upside_down).text
    )
    found = [Additive(noises, normal(30, seed=seed).exp().tolist()).analyzed() for seed in range(20)]
    assert sum(bool(one.chosen) for one in found) >= 18, "where errors of layers tell nothing of the model's"


@given(
    st.lists(st.sampled_from([1e-6, 1e-3, 0.009, 0.02, 5.0]), min_size=1, max_size=60),
    st.lists(st.floats(1e-6, 1.0), min_size=60, max_size=60),
)
@settings(max_examples=100, deadline=None)
def test_whatever_layers_cost_the_choice_holds_and_nothing_untried_is_denied(noises, guesses):
    found = Additive(noises, guesses[: len(noises)]).analyzed()
    assert found.trials <= a.MAX_TRIALS
    assert found.chosen or found.trials == a.MAX_TRIALS or min(noises) > 0.01


@pytest.mark.parametrize(("candidate", "first"), [(FP8, "large"), (Candidate("fp16"), "busy")])
def test_what_saves_most_for_its_error_is_tried_first_and_what_overflows_never(candidate, first):
    figures = {"large": (100, 1, 30.0), "busy": (1, 100, 30.0), "worse": (1, 1, 20.0), "inf": (100, 100, -math.inf)}
    layers = [
        a.LayerResult(name, "Linear", size, a.KEPT, "", False, 30.0, snr, snr, work)
        for name, (size, work, snr) in figures.items()
    ]
    order = a.Session([], candidate, list, plain_weights, change).ordered(layers)
    assert order[0] == first and order[-1] == "worse" and len(order) == 3


def test_statuses_and_reasons():
    layers = {layer.name: layer for layer in analyzed(Net(), 20).layers}
    assert layers["time_embedding"].status == a.PINNED and layers["time_embedding"].output_db > 25
    assert layers["mix"].status == a.BARRED and layers["mix"].weight_db is None
    assert layers["unused"].status == a.UNUSED and layers["unused"].output_db is None


def test_a_model_that_is_not_called_is_refused():
    with pytest.raises(HalfsafeError, match="not called"):
        a.Session([], FP8, list, plain_weights, change).measure()


LAYERS = [f"blocks.{block}.{layer}" for block in range(4) for layer in ("ffn.0", "ffn.2", "attn.q", "attn.o")] + [
    "head",
    "mix.blocks.0.ffn.0",
]


@given(st.sets(st.sampled_from(LAYERS)))
@settings(max_examples=100, deadline=None)
def test_patterns_mean_exactly_the_layers_they_stand_for(kept):
    found = patterns(kept, [name for name in LAYERS if name not in kept])
    matchers = [Rule(pattern, ()).matches for pattern, _ in found]
    assert {name for name in LAYERS if any(match(name, "") for match in matchers)} == kept
    assert sorted(name for _, names in found for name in names) == sorted(kept)


@pytest.mark.parametrize(("names", "line"), [
    (LAYERS[:4], "blocks.0.*"), (LAYERS[1:16:4], "blocks.*.ffn.2"), (LAYERS[1:12:4], r"re:^blocks\.(0|1|2)\.ffn\.2$"),
])  # fmt: skip
def test_whole_blocks_and_whole_kinds_become_one_line(names, line):
    assert [pattern for pattern, _ in patterns(names, [name for name in LAYERS if name not in names])] == [line]


@pytest.mark.parametrize(("target", "pin"), [(0, True), (34, False), (38, True), (119, False)])
def test_text_reads_back_as_the_rules_which_give_every_layer_its_outcome(target, pin):
    found = analyzed(Net(outliers=(1, 2)) if target < 119 else Net(blocks=1), target, pin=pin)
    rules, result = found.rules, analysis_result(found, "Net")
    text = result.text
    assert rules_from(text) == rules and f"{found.steps} steps" in text
    assert ("cannot be reached" in text) == (target == 119) == (result.tone == "warn")
    for layer in found.layers:
        setting = rules.setting("storage", layer.name, layer.cls)
        stored = (setting[0] if setting else "fp8_e4m3fn") == "fp8_e4m3fn"
        assert stored == (layer.status == a.CHOSEN) or layer.cls != "Linear", layer.name


def test_rules_for_arithmetic_name_the_chosen_layers():
    found = analyzed(Net(), 60, Candidate("fp16"))
    rules = found.rules.own
    for layer in found.layers:
        assert any(rule.matches(layer.name, layer.cls) for rule in rules) == (layer.status == a.CHOSEN)
    assert {rule.settings for rule in rules} == {(("compute", "fp16"),)}
    acc16 = analyzed(Net(), 30, Candidate("fp16_acc16")).rules.own
    assert {rule.settings for rule in acc16} == {(("compute", "fp16"), ("accumulation", "fp16"))}


@pytest.mark.parametrize("count", [0, 1, 900])
def test_the_chart_shows_every_outcome(count):
    statuses = [a.CHOSEN, a.KEPT, a.PINNED, a.BARRED, a.UNUSED]
    layers = [
        a.LayerResult(
            f"blocks.{index}.a_rather_long_name.ffn.0", "Linear", 10, statuses[index % 5], "", False, 31.0, value, value
        )
        for index, value in zip(range(count), [31.0, 3.0, -math.inf, math.inf, 12.0] * 200, strict=False)
    ]
    picture = analysis_chart(a.Analysis(FP8, 25.0, layers, 27.1, 12.0, count), "WAN21")
    assert (
        picture.shape[1:] == (1024, 3) and picture.dtype.name == "float32" and 0 <= picture.min() <= picture.max() <= 1
    )
    for status in {layer.status for layer in layers}:
        assert (np.rint(picture * 255) == ImageColor.getrgb(COLOURS[status])).all(-1).any()


def test_what_has_no_decibels_is_said_in_words(monkeypatch):
    written = []
    monkeypatch.setattr(
        "halfsafe.precision.report.draw.write_text", lambda drawing, x, y, text, *_: written.append(text)
    )
    found = a.Analysis(
        FP8,
        25.0,
        [a.LayerResult("a", "Linear", 10, a.CHOSEN, "", False, math.inf, math.inf, math.inf)],
        math.inf,
        -math.inf,
        3,
    )
    analysis_chart(found)
    for text in (" ".join(written), analysis_result(found).text):
        assert "no error" in text and "NaN or Inf" in text and "exact" in text and "inf dB" not in text
