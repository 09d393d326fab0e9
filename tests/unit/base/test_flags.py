import itertools
import threading
import types
from dataclasses import replace

import pytest
import torch
from halfsafe.precision.base import flags
from halfsafe.precision.plan.accumulation import flag_report

MATMUL = torch.backends.cuda.matmul


def everything():
    """All that torch tells of its precision flags, old names and new, refusals included; "absent" before torch 2.9."""

    def look(read):
        try:
            return read()
        except RuntimeError:
            return "refused"
        except AttributeError:
            return "absent"

    reads = {
        "fp16_accumulation": lambda: MATMUL.allow_fp16_accumulation,
        "fp16": lambda: MATMUL.allow_fp16_reduced_precision_reduction,
        "fp16 split": lambda: MATMUL.allow_fp16_reduced_precision_reduction_split_k,
        "bf16": lambda: MATMUL.allow_bf16_reduced_precision_reduction,
        "bf16 split": lambda: MATMUL.allow_bf16_reduced_precision_reduction_split_k,
        "tf32": lambda: MATMUL.allow_tf32,
        "matmul new": lambda: MATMUL.fp32_precision,
        "cudnn": lambda: torch.backends.cudnn.allow_tf32,
        "conv new": lambda: torch.backends.cudnn.conv.fp32_precision,
        "rnn new": lambda: torch.backends.cudnn.rnn.fp32_precision,
        "float32": torch.get_float32_matmul_precision,
    }
    return {name: look(read) for name, read in reads.items()}


@pytest.fixture(autouse=True)
def as_before():
    before = everything()
    yield
    MATMUL.allow_fp16_accumulation = before["fp16_accumulation"]
    for name in ("fp16", "bf16"):
        pair = (before[name], before[f"{name} split"])
        setattr(MATMUL, f"allow_{name}_reduced_precision_reduction", pair[0] if "absent" in pair else pair)
    if before["conv new"] != "absent":
        torch.backends.cudnn.conv.fp32_precision = before["conv new"]
    torch.backends.cudnn.allow_tf32 = before["cudnn"]
    torch.set_float32_matmul_precision(before["float32"])
    MATMUL.allow_tf32 = before["tf32"]
    if before["matmul new"] != "absent":
        MATMUL.fp32_precision = before["matmul new"]
    assert everything() == before


def begin(start):
    """Set the flags as a test wants them to be before its scope."""
    if "new name" in start and everything()["matmul new"] == "absent":
        pytest.skip("TF32 has no new names in this torch")
    STARTS[start]()


def reduction_off(name, both):
    """Off as a bool, or with its split-k half where this torch has one."""
    both = both and everything()[f"{name} split"] != "absent"
    setattr(MATMUL, f"allow_{name}_reduced_precision_reduction", (False, False) if both else False)


STARTS = {
    "as torch starts": lambda: None,
    "fp16 accumulation on": lambda: setattr(MATMUL, "allow_fp16_accumulation", True),
    "reductions off": lambda: reduction_off("fp16", both=True),
    "split-k alone": lambda: reduction_off("bf16", both=False),
    "tf32 on, old name": lambda: setattr(MATMUL, "allow_tf32", True),
    "tf32 off, old name": lambda: setattr(MATMUL, "allow_tf32", False),
    "tf32 on, new name": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "ieee, new name": lambda: setattr(MATMUL, "fp32_precision", "ieee"),
    **{
        f"{word}, by the word": lambda word=word: torch.set_float32_matmul_precision(word)
        for word in ("highest", "high", "medium")
    },
    "medium, then in part": lambda: [
        torch.set_float32_matmul_precision("medium"),
        setattr(MATMUL, "allow_tf32", False),
    ],
    "convolution off, old name": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "convolution ieee, new name": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
}


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", flags.SETTINGS)
@pytest.mark.parametrize("start", STARTS)
def test_set_inside_and_exactly_back_outside(start, name, value):
    begin(start)
    before = everything()
    with flags.flags_set({name: value}):
        assert flags.is_on(name) is value
        assert flags.outside(name) is not None
    assert everything() == before


@pytest.mark.parametrize("start", STARTS)
def test_all_at_once_and_back_after_an_error(start):
    begin(start)
    before = everything()
    for values in itertools.product([True, False], repeat=2):
        wanted = dict(zip(flags.SETTINGS, itertools.cycle(values), strict=False))
        with pytest.raises(KeyboardInterrupt), flags.flags_set(wanted):
            assert {name: flags.is_on(name) for name in wanted} == wanted
            raise KeyboardInterrupt
        assert everything() == before


def test_a_flag_that_cannot_be_written_leaves_no_scope_open(monkeypatch):
    before = everything()

    def refuse(value):
        raise RuntimeError("refused")

    with monkeypatch.context() as patch:
        patch.setitem(flags.SETTINGS, "tf32_matmul", replace(flags.SETTINGS["tf32_matmul"], write=refuse))
        wanted = {
            "fp16_accumulation": not flags.is_on("fp16_accumulation"),
            "tf32_matmul": not flags.is_on("tf32_matmul"),
        }
        with pytest.raises(RuntimeError, match="refused"), flags.flags_set(wanted):
            pass
    assert everything() == before
    with flags.flags_set({}):
        assert everything() == before


@pytest.mark.parametrize("start", ["as torch starts", "reductions off"])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_split_k_is_allowed_whatever_a_scope_asks_for(name, value, start):
    """cuBLAS refuses half products where it is not (ATen CUDABlas.cpp, DisallowReducedPrecisionDisallowSplitK)."""
    if everything()["fp16 split"] == "absent":
        pytest.skip("this torch has no split-k half")
    begin(start)
    before = everything()
    with flags.flags_set({f"{name}_reduced_precision_reduction": value}):
        assert (everything()[name], everything()[f"{name} split"]) == (value, True)
    assert everything() == before


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_torch_without_the_split_k_half_takes_a_bool(monkeypatch, name):
    names = [f"allow_{half}_reduced_precision_reduction" for half in ("fp16", "bf16")]
    matmul = types.SimpleNamespace(**dict.fromkeys(names, True))
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    with flags.flags_set({f"{name}_reduced_precision_reduction": False}):
        assert getattr(matmul, f"allow_{name}_reduced_precision_reduction") is False
    assert vars(matmul) == dict.fromkeys(names, True)


def in_thread(action):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(action()))
    thread.start()
    thread.join()
    return seen[0]


def flag_under_fp32_accumulation():
    with flags.fp32_accumulation():
        return flags.is_on("fp16_accumulation")


def test_fp32_accumulation_keeps_the_flag_off_whatever_is_around_them():
    MATMUL.allow_fp16_accumulation = True
    assert flag_under_fp32_accumulation() is False and MATMUL.allow_fp16_accumulation
    for around in (True, False):
        with flags.flags_set({"fp16_accumulation": around}):
            assert flag_under_fp32_accumulation() is False
            with flags.flags_set({"fp16_accumulation": True}):
                assert flag_under_fp32_accumulation() is False
            assert flags.is_on("fp16_accumulation") is around
    assert MATMUL.allow_fp16_accumulation


def test_no_other_thread_turns_the_flag_on_during_fp32_accumulation():
    def turn_on():
        with flags.flags_set({"fp16_accumulation": True}):
            with flags.flags_set({"fp16_accumulation": True}):
                switched = flags.is_on("fp16_accumulation")
            return flags.is_on("fp16_accumulation"), switched

    with flags.fp32_accumulation():
        assert in_thread(turn_on) == (False, False)
        assert flags.is_on("fp16_accumulation") is False
    assert in_thread(turn_on) == (True, True)


def test_a_wide_product_of_another_thread_ends_the_fp16_sums_of_a_layer():
    """A layer with fp16 sums holds the flag on inside of a scope that holds it off."""
    with flags.flags_set({"fp16_accumulation": False}), flags.flags_set({"fp16_accumulation": True}):
        assert flags.is_on("fp16_accumulation") is True
        assert in_thread(flag_under_fp32_accumulation) is False
        assert flags.is_on("fp16_accumulation") is True


def test_nested_scopes_each_put_back_what_was_around_them():
    before = everything()
    with flags.flags_set({"fp16_accumulation": True, "tf32_matmul": True}):
        with flags.flags_set({"fp16_accumulation": False}):
            assert (flags.is_on("fp16_accumulation"), flags.is_on("tf32_matmul")) == (False, True)
            assert flags.outside("fp16_accumulation") is False
        assert flags.is_on("fp16_accumulation") is True
    assert everything() == before


def test_threads_side_by_side_end_where_they_began():
    before = everything()
    gate = threading.Barrier(4)
    seen = []

    def run():
        for _ in range(50):
            with flags.flags_set({"fp16_accumulation": True, "fp16_reduced_precision_reduction": False}):
                seen.append(flags.is_on("fp16_accumulation"))
            gate.wait()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen) and everything() == before


def test_a_flag_that_torch_does_not_have_is_left_alone(monkeypatch):
    def absent():
        raise AttributeError("no such flag")

    setting = replace(flags.SETTINGS["fp16_accumulation"], read=absent, write=lambda value: pytest.fail("written"))
    monkeypatch.setitem(flags.SETTINGS, "fp16_accumulation", setting)
    with flags.flags_set({"fp16_accumulation": True}):
        assert flags.is_on("fp16_accumulation") is None
    assert flags.outside("fp16_accumulation") is None


@pytest.mark.parametrize("value", ["tf32", "ieee"])
def test_tf32_is_read_by_its_new_name_where_the_old_one_refuses(value, monkeypatch):
    class NewNamesWereUsed:
        fp32_precision = value

        @property
        def allow_tf32(self):
            raise RuntimeError("you have used mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends.cuda, "matmul", NewNamesWereUsed())
    assert flags.is_on("tf32_matmul") is (value == "tf32")


@pytest.mark.parametrize(
    ("start", "told", "on"),
    [
        ("tf32 on, new name", "matmul on", True),
        ("ieee, new name", "matmul off", True),
        ("tf32 on, old name", "matmul on", True),
        ("convolution ieee, new name", "convolution off", False),
    ],
)
def test_tf32_is_reported_by_whatever_name_it_was_set(start, told, on):
    begin(start)
    entry = flag_report("tf32", "unchanged", "Why.")
    assert told in entry["reason"] and "not known" not in entry["reason"]
    assert entry["outside"] is entry["in_scope"] is on
