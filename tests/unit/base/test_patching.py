import threading

import pytest
import torch
import torch._dynamo
from halfsafe.precision.base.patching import compile_disabled, patched


def test_set_inside_and_gone_outside():
    module = torch.nn.Linear(2, 2)
    with patched([(module, "forward", lambda x: x + 1)]):
        assert module(torch.zeros(1)).item() == 1
    assert "forward" not in module.__dict__
    assert module(torch.zeros(1, 2)).shape == (1, 2)


def test_a_value_that_was_there_comes_back_after_nesting_and_errors():
    module = torch.nn.Linear(2, 2)
    module.__dict__["forward"] = original = lambda x: "original"
    with pytest.raises(KeyError), patched([(module, "forward", lambda x: "outer")]):
        with patched([(module, "forward", lambda x: "inner"), (module, "flag", True)]):
            assert module(1) == "inner" and module.flag
        assert module(1) == "outer"
        raise KeyError
    assert module.__dict__["forward"] is original
    assert "flag" not in module.__dict__


def test_an_error_while_setting_undoes_what_was_set():
    module = torch.nn.Linear(2, 2)

    def patches():
        yield module, "forward", None
        raise RuntimeError("no second patch")

    with pytest.raises(RuntimeError, match="no second patch"), patched(patches()):
        pass
    assert "forward" not in module.__dict__


def stance():
    return torch._dynamo.eval_frame._stance.stance


def test_compiled_code_runs_as_plain_torch_inside_and_not_after():
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
