"""The rule book itself: each rule raises CUDA's exception, and what CUDA takes passes. The cases are those a device is asked for."""

import pytest
import torch
from halfsafe.precision.arithmetic.proofs import NOTHING, AmaxBuffer
from support import cuda_rules, rule_cases
from support.cuda_rules import CudaRules, HostReads
from support.fake_tensors import fake_cuda_tensors
from support.rule_cases import REFUSED, TAKEN

CPU = torch.device("cpu")
TWO_DEVICES = "two devices"


@pytest.fixture(params=[False, True], ids=["no_grad", "inference_mode"], autouse=True)
def mode(request):
    """torch hands composite operations to a mode whole in inference mode only."""
    with torch.inference_mode() if request.param else torch.no_grad():
        yield


@pytest.mark.parametrize("rule", [name for name in REFUSED if name != TWO_DEVICES])
def test_what_cuda_refuses_raises_cudas_exception(rule):
    with CudaRules():
        assert rule_cases.unrefused(REFUSED[rule], CPU) == ""


@pytest.mark.parametrize("taken", TAKEN)
def test_what_cuda_takes_passes(taken):
    with CudaRules():
        assert rule_cases.untaken(TAKEN[taken], CPU) == ""


def test_each_operation_of_the_rule_book_has_a_case_that_its_rule_refuses(monkeypatch):
    refusing = set()

    def noting(operation, rule):
        def run(*args, **kwargs):
            try:
                rule(*args, **kwargs)
            except Exception:
                refusing.add(operation)
                raise

        return run

    rules = {operation: noting(operation, rule) for operation, rule in cuda_rules.RULES.items()}
    monkeypatch.setattr(cuda_rules, "RULES", rules)
    with CudaRules():
        assert [name for name, case in REFUSED.items() if rule_cases.unrefused(case, CPU)] == [TWO_DEVICES]
    assert refusing == {*rules}


def test_a_device_that_answers_otherwise_is_told_by_rule(monkeypatch):
    """A CPU without the rule book refuses nothing in CUDA's words, and waits for no read."""
    otherwise = rule_cases.answered_otherwise(CPU)
    assert {*REFUSED} - {*otherwise} <= {"fp8: bmm"}, "a CPU has no bmm of fp8 either, and says so in the same words"
    assert otherwise["int8: rows of 16"] == "not refused" and "expected m1 and m2" in otherwise["two dtypes: mm"]
    monkeypatch.setitem(rule_cases.TAKEN, "fp32", lambda device: torch.ones(3, device=device))
    assert rule_cases.answered_otherwise(CPU)["fp32"] == "wrong values"


def test_flags_are_as_before_after_each_case():
    before = {
        name: getattr(torch.backends.cuda.matmul, name) for name in ("allow_fp16_accumulation", rule_cases.SPLIT_K)
    }
    split_k = getattr(torch.backends.cuda.matmul, f"{rule_cases.SPLIT_K}_split_k", None)
    rule_cases.answered_otherwise(CPU)
    assert {name: getattr(torch.backends.cuda.matmul, name) for name in before} == before
    assert getattr(torch.backends.cuda.matmul, f"{rule_cases.SPLIT_K}_split_k", None) == split_k


def test_the_rules_hold_for_fake_cuda_tensors_and_two_devices_raise():
    with fake_cuda_tensors(), CudaRules():
        left = torch.empty(4, 16, device="cuda", dtype=torch.float16)
        assert torch.mm(left, left.t(), out_dtype=torch.float32).dtype == torch.float32
        with pytest.raises(NotImplementedError):
            torch.mm(left.to(rule_cases.E4M3), left.t().to(rule_cases.E4M3))
        assert rule_cases.unrefused(REFUSED[TWO_DEVICES], torch.device("cuda")) == ""


@pytest.fixture
def buffer():
    return AmaxBuffer(1, torch.device("cpu"))


def test_a_read_by_the_pack_raises_outside_of_the_allowed_places(buffer):
    with (
        HostReads(frozenset()),
        pytest.raises(RuntimeError, match="synchronizing CUDA operation: tolist in arithmetic/proofs.read"),
    ):
        buffer.read()
    with HostReads(frozenset({"arithmetic/proofs.read"})) as reads:
        assert buffer.read() == [NOTHING]
    assert reads.places == ["arithmetic/proofs.read"]
