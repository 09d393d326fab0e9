"""What cannot be put back is named with its pack and node; random numbers of Python and numpy are put back."""

import collections
import itertools
import random
import sys
import textwrap
from importlib.util import module_from_spec, spec_from_file_location

import numpy
import pytest
import torch
from halfsafe.nodes.host.run.kept_state import KeptState
from support import families
from support.guarding import core, guarded, inside, report_of

PACK = """
    import itertools

    def numbers():
        yield from range(1000)

    class Counter:
        def __init__(self):
            self.state = {"numbers": numbers()}

        def __call__(self):
            return next(self.state["numbers"])

    class CountingNode:
        def patch(self, kind):
            if kind == "in a closure of the node":
                counted = [numbers()]
                return lambda: next(counted[0])
            if kind == "of Python's library in a closure of the node":
                counted = itertools.count()
                return lambda: next(counted)
            if kind == "in an instance":
                return Counter()

    counted = numbers()

    def of_the_module():
        return next(counted)
"""
NODE = "ComfyUI-Counting, node 'Count On'"
NAMES = {
    "in a closure of the node": f"numbers ({NODE})",
    "of Python's library in a closure of the node": f"count ({NODE})",
    "in an instance": "numbers (ComfyUI-Counting)",
    "of the module": "numbers (ComfyUI-Counting)",
}


@pytest.fixture
def counting_pack(tmp_path, monkeypatch):
    """A pack in a folder of custom nodes, as ComfyUI imports and registers one."""
    folder = tmp_path / "custom_nodes" / "ComfyUI-Counting"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(textwrap.dedent(PACK))
    spec = spec_from_file_location(str(folder), folder / "__init__.py", submodule_search_locations=[str(folder)])
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(core("nodes").NODE_CLASS_MAPPINGS, "CountOn", module.CountingNode)
    monkeypatch.setitem(core("nodes").NODE_DISPLAY_NAME_MAPPINGS, "CountOn", "Count On")
    return module


@pytest.mark.parametrize("kind", NAMES)
def test_a_generator_that_a_pack_keeps_is_named_with_pack_and_node(comfy, wan, counting_pack, kind):
    count = counting_pack.of_the_module if kind == "of the module" else counting_pack.CountingNode().patch(kind)

    def change(executor, args, kwargs):
        return executor(*args, **kwargs) * (1 + count())

    model = guarded(comfy, inside(families.load(comfy, wan, "bf16", "bf16"), change), check="first step")
    families.sample(model, "wan", steps=1)
    assert report_of(model).checks[0].left_out.startswith(f"{NAMES[kind]} goes on with each call")
    assert count() == 1, "the check drew nothing"


ITERATORS = {
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1, 2]),
    "list": lambda: iter([1, 2]),
    "dict": lambda: iter({1: 1, 2: 2}),
    "map of a generator": lambda: map(str, (number for number in (1, 2))),
    "one that cannot be copied": lambda: iter(memoryview(b"ab")),
}


@pytest.fixture(scope="module")
def model(comfy, wan):
    return families.load(comfy, wan, "fp16", "fp16").model


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_that_has_advanced_is_told(model, kind):
    kept = ITERATORS[kind]()
    state = KeptState(model, {"kept": [kept]})
    assert state.lost() == [] or kind == "one that cannot be copied"
    next(kept)
    assert len(state.lost()) == 1


RANDOM = {
    "Python's": (random, lambda: random.random()),
    "one of Python": (of := random.Random(1), of.random),
    "numpy's": (numpy.random, lambda: numpy.random.rand()),
    "one of numpy": (generator := numpy.random.default_rng(1), generator.random),
    "a legacy one of numpy": (legacy := numpy.random.RandomState(1), legacy.rand),
    "one of torch": (own := torch.Generator().manual_seed(1), lambda: torch.rand((), generator=own).item()),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_numbers_are_drawn_again(model, kind):
    kept, draw = RANDOM[kind]
    state = KeptState(model, {"kept": [kept]})
    drawn = draw()
    state.restore()
    assert draw() == drawn


def test_a_check_draws_no_random_numbers_of_pythons(comfy, wan):
    latents = collections.defaultdict(list)
    for check in ("off", "first step"):
        random.seed(7)
        changed = inside(families.load(comfy, wan, "bf16", "bf16"), lambda run, args, kwargs: run(*args, **kwargs) * (1 + 0.1 * random.random()))
        model = guarded(comfy, changed, check=check)
        latents[check] = [families.sample(model, "wan", steps=3), torch.tensor(random.random())]
    assert all(itertools.starmap(torch.equal, zip(*latents.values(), strict=True)))
    (one,) = report_of(model).checks
    assert one.left_out == "" and one.snr_db > 33, "the call in fp32 drew what the call drew"
