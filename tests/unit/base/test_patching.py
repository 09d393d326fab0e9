import pytest
import torch
from halfsafe.precision.base.patching import patched


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
