"""What a guard without a check does in a call that is finite: little."""

from collections import Counter
from functools import partial

import pytest
from support import families, tiny_models
from support.families import load
from support.guarding import guarded
from support.leaf_operations import LeafOperations
from support.measures import functions_run


class Operations(LeafOperations):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def leaf(self, func, args, kwargs):
        self.seen[func.name()] += 1
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def files(models_dir):
    return [
        tiny_models.wan(models_dir / "diffusion_models" / f"wan_of_{blocks}.safetensors", blocks=blocks)
        for blocks in (2, 6)
    ]


@pytest.mark.not_as_on_cuda
def test_it_looks_at_no_module_of_the_model(comfy, files):
    """ComfyUI runs more than 300 Python functions for a block of Wan; the guard as many for any number of blocks.

    CUDA's rules are left out: they see each operation in Python, 1,800 functions a block.
    """
    counts = []
    for path in files:
        plain = load(comfy, path, "as_file", "bf16")
        call = families.capture(plain, "wan")
        counts.append(
            [functions_run(partial(families.replay, model, call))["call"] for model in (plain, guarded(comfy, plain))]
        )
    (plain, with_guard), (more_plain, more_with_guard) = counts
    assert more_with_guard - more_plain == with_guard - plain


def test_it_measures_the_result_and_reads_once(comfy, files):
    plain = load(comfy, files[0], "as_file", "bf16")
    call, seen = families.capture(plain, "wan"), []
    for model in (plain, guarded(comfy, plain)):
        families.replay(model, call)
        with Operations() as operations:
            families.replay(model, call)
        seen.append(operations.seen)
    more = {name: count for name, count in (seen[1] - seen[0]).items() if "resolve" not in name}
    assert more == {"aten::linalg_vector_norm": 1, "aten::stack": 1}
