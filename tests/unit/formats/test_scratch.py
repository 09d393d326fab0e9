"""Memory to compute in, the same while it is asked for alike."""

from concurrent.futures import ThreadPoolExecutor

import torch
from halfsafe.precision.formats import scratch

CPU = torch.device("cpu")


def test_memory_that_is_asked_for_alike_is_the_same():
    with torch.inference_mode():
        (first,) = scratch.scratch(1, 1000, torch.float32, CPU)
        assert scratch.scratch(1, 1000, torch.float32, CPU)[0] is first
    assert scratch.scratch(1, 1000, torch.float32, CPU)[0] is first and (first.fill_(2.5) == 2.5).all()
    assert scratch.scratch(1, 1000, torch.bfloat16, CPU)[0] is not first


def test_each_thread_has_its_own():
    mine = scratch.scratch(2, 10, torch.float32, CPU)
    with ThreadPoolExecutor(1) as other:
        assert not {id(one) for one in mine} & {id(one) for one in other.submit(scratch.scratch, 2, 10, torch.float32, CPU).result()}


def test_forgotten_memory_is_made_anew():
    (first,) = scratch.scratch(1, 10, torch.float32, CPU)
    scratch.forget_scratch()
    assert scratch.scratch(1, 10, torch.float32, CPU)[0] is not first
