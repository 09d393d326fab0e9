"""Running compiled code as plain torch for a while."""

import threading

import pytest
import torch
import torch._dynamo
from halfsafe.precision.base.compiling import compile_disabled


def stance():
    return torch._dynamo.eval_frame._stance.stance


def test_it_holds_inside_and_not_after():
    with compile_disabled():
        assert stance() == "force_eager"
        with compile_disabled():
            assert stance() == "force_eager"
        assert stance() == "force_eager"
    assert stance() == "default"


def test_it_is_put_back_after_an_error():
    with pytest.raises(ValueError), compile_disabled():
        raise ValueError
    assert stance() == "default"


def test_threads_that_overlap_leave_nothing():
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first():
        with compile_disabled():
            first_in.set()
            second_in.wait(10)
        first_out.set()

    def second():
        first_in.wait(10)
        with compile_disabled():
            second_in.set()
            first_out.wait(10)
            seen.append(stance())

    seen = []
    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == ["force_eager"] and stance() == "default"
