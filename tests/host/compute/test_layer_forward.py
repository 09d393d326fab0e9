"""The one forward of a layer: its fields act in the order of its text, are taken back, and nothing of it stays on the layer."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import comfy.ops
import pytest
import torch
from halfsafe.nodes.host.comfyui.layer_forward import (
    GIVEN,
    STANDING,
    LayerForward,
    with_frame,
)
from halfsafe.precision.base.patching import patched
from support.imagined_cores import GAIN, layers_take


def a_linear() -> torch.nn.Linear:
    layer = comfy.ops.manual_cast.Linear(4, 4, bias=False, device="cpu", dtype=torch.float32)
    layer.weight = torch.nn.Parameter(2 * torch.eye(4), requires_grad=False)
    return layer


class Adds(torch.nn.Module):
    """Adds 8 to a layer's result, and keeps the dtypes that it was given."""

    missed = False

    def forward(self, x, result):
        self.given = x.dtype, result.dtype
        return result + 8


def test_each_field_acts_at_its_place_in_a_call():
    layer, adds, x = a_linear(), Adds(), torch.ones(1, 4).bfloat16()
    seen = []

    def sums(product, x):
        seen.append(("sums", x.dtype))
        return product(x)

    def frame(forward, x):
        result = forward(x)
        seen.append(("frame", x.dtype, result.dtype))
        return result

    def measure(forward, x):
        seen.append(("measure", x.dtype))
        return forward(x)

    one = LayerForward(layer, layer.forward, torch.float16, torch.float32, sums)
    with (
        patched(one.put_on()),
        patched(one.with_fields(adds=adds)),
        patched(with_frame(layer, frame)),
        patched(LayerForward.on(layer).with_fields(measure=measure)),
    ):
        assert layer(x).tolist() == [[10.0] * 4]
    assert seen == [
        ("measure", torch.bfloat16),
        ("sums", torch.float16),
        ("frame", torch.bfloat16, torch.float32),
    ]
    assert adds.given == (torch.bfloat16, torch.float32)
    given = LayerForward(layer, layer.forward, torch.float16, GIVEN)
    with patched(given.put_on()):
        assert layer(x).dtype == torch.bfloat16


def test_stages_set_fields_of_what_stands_in_any_number_and_an_interrupt_takes_them_back():
    layer, adds = a_linear(), Adds()
    one = LayerForward(layer, layer.forward, torch.float16, GIVEN)
    before = dict(vars(one))
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as held:
        held.enter_context(patched(one.put_on()))
        held.enter_context(patched(LayerForward.on(layer).with_fields(adds=adds)))
        held.enter_context(patched(with_frame(layer, lambda forward, x: forward(x))))
        assert LayerForward.on(layer) is one and layer.forward.__self__ is one and one.adds is adds
        assert layer(torch.ones(1, 4)).tolist() == [[10.0] * 4]
        raise KeyboardInterrupt
    assert vars(one) == before and one.adds is one.frame is None
    assert not {"forward", STANDING} & vars(layer).keys()


def test_what_another_pack_puts_over_ours_is_what_is_found():
    layer = a_linear()
    one = LayerForward(layer, layer.forward, torch.float16, GIVEN)
    with patched(one.put_on()):
        inner = layer.forward
        with patched([(layer, "forward", lambda x: -inner(x))]), patched(with_frame(layer, lambda run, x: run(x) + 1)):
            assert LayerForward.on(layer) is not one
            assert layer(torch.ones(1, 4)).tolist() == [[-1.0] * 4]


def test_a_layer_is_not_kept_alive_copied_or_saved_with_what_stood_on_it():
    layer = a_linear()
    one = LayerForward(layer, layer.forward, torch.float16, GIVEN)
    patches = [*one.put_on(), *one.with_fields(frame=lambda run, x: run(x))]
    with patched(patches):
        assert list(layer.state_dict()) == ["weight"]
        assert copy.deepcopy(layer)(torch.ones(1, 4)).tolist() == [[2.0] * 4]
    kept, held = weakref.ref(layer), gc.isenabled()
    gc.disable()
    try:
        del layer, one, patches
        assert kept() is None, "its weights wait for the garbage collector"
    finally:
        if held:
            gc.enable()


@pytest.mark.parametrize("field", ["frame", "measure", "adds"])
def test_a_call_with_an_argument_that_is_not_known_is_framed_and_nothing_else(field):
    seen, adds = [], Adds()

    def watch(forward, x, *args, **kwargs):
        seen.append({*kwargs})
        return forward(x, *args, **kwargs)

    with layers_take("Linear", "keyword", (0.5,)):
        layer = a_linear()
        expected = layer(torch.ones(1, 4))
        one = LayerForward(layer, layer.forward)
        with patched(one.with_fields(**{field: adds if field == "adds" else watch})):
            assert torch.equal(layer(torch.ones(1, 4)), expected)
    assert seen == ([{GAIN}] if field == "frame" else []) and adds.missed == (field == "adds")
