"""Kinds of modules that hold or use weights in their own ways: applied to, called, copied, saved, restored."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.errors import HalfsafeError
from halfsafe.precision.library.applied import apply, restore
from support.measures import relative_error
from torch import nn
from torch.nn.utils import parametrizations, prune

pytestmark = pytest.mark.usefixtures("without_gradients")

SETTINGS = {
    "fp8": ({"storage": "fp8_e4m3fn", "rules": "* storage=fp8_e4m3fn"}, 0.06),
    "bf16": ({"compute": "bf16"}, 0.03),
    "safe": ({"compute": "fp16_safe", "storage": "fp16"}, 2e-3),
}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.both = nn.Linear(16, 16), nn.Bilinear(16, 16, 16)

    def forward(self, x):
        return self.both(self.one(x), x)


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.RNNBase]):
        super().__init__()
        self.one, self.cells = nn.Linear(16, 16), cls(16, 16, batch_first=True)

    def forward(self, x):
        return self.cells(self.one(x))[0]


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.cell = nn.Linear(16, 16), nn.LSTMCell(16, 16)

    def forward(self, x):
        return self.cell(self.one(x[:, 0]))[0]


class LowRank(nn.Linear):
    """As LoRA layers that are a subclass of Linear: a branch beside it, added to each call or merged in ``eval()``."""

    def __init__(self, merges: bool):
        super().__init__(16, 16)
        self.up, self.down, self.merges, self.merged = nn.Parameter(torch.ones(16, 4)), nn.Parameter(torch.randn(4, 16)), merges, False

    def train(self, mode: bool = True):
        if self.merges and self.merged is mode:
            self.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + F.linear(F.linear(x, self.down), self.up)


class Twice(nn.Module):
    """One layer under two names, and parameters in a list and a dictionary."""

    def __init__(self):
        super().__init__()
        self.one = self.other = nn.Linear(16, 16)
        self.listed, self.named = nn.ParameterList([nn.Parameter(torch.randn(16))]), nn.ParameterDict({"gain": nn.Parameter(torch.randn(16))})

    def forward(self, x):
        return self.other(self.one(x)) * self.named["gain"] + self.listed[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.bag = nn.Transformer(16, 2, 1, 1, 32, batch_first=True), nn.EmbeddingBag(8, 16)

    def forward(self, x):
        return self.inner(x, x) + self.bag(torch.tensor([[1, 2]]))


def beside(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(16, 16))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "bilinear": Pair,
    **{cls.__name__: lambda cls=cls: Recurrent(cls) for cls in (nn.RNN, nn.LSTM, nn.GRU)},
    "cell": Cell,
    "low rank": lambda: beside(LowRank(merges=False)),
    "two names": Twice,
    "transformer": Encoder,
    "grouped": lambda: nn.Sequential(nn.ConvTranspose1d(5, 5, 3, groups=5), nn.Conv1d(5, 10, 3, groups=5), nn.Conv1d(10, 5, 3, padding=1, padding_mode="replicate")),
    "norms": lambda: beside(nn.Sequential(nn.BatchNorm1d(5), nn.InstanceNorm1d(5, affine=True), nn.GroupNorm(1, 5), nn.PReLU(), nn.RMSNorm(16))),
    "weight_norm, hooks": lambda: beside(nn.utils.weight_norm(nn.Linear(16, 16))),
    "weight_norm": lambda: beside(parametrizations.weight_norm(nn.Linear(16, 16))),
    "spectral_norm, hooks": lambda: beside(nn.utils.spectral_norm(nn.Linear(16, 16))),
    "spectral_norm": lambda: beside(parametrizations.spectral_norm(nn.Linear(16, 16))),
    "pruned": lambda: beside(prune.l1_unstructured(nn.Linear(16, 16), "weight", 0.3)),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]().eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_module_is_right_while_applied_and_itself_after(kind, setting):
    model, plain, x = made(kind), made(kind), torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    exact, (arguments, bound) = model(x), SETTINGS[setting]
    apply(model, **arguments, keep=True)
    found = model(x)
    assert relative_error(exact, found) < bound
    plain.load_state_dict(model.state_dict())
    again = 1e-5 if "compute" not in arguments else bound
    assert relative_error(found, plain(x)) < again
    if not kind.endswith("hooks") and kind != "pruned":  # whose weights are no leaves: torch copies no such module
        assert relative_error(found, copy.deepcopy(model)(x)) < again
    restore(model)
    assert torch.equal(model(x), exact)


class Counting(nn.Module):
    """As a module that keeps a sum in a buffer, or a cache of keys."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(16, 16)
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x):
        self.total.add_(x.mean(0))
        return self.one(x) + self.total


@pytest.mark.parametrize("arguments", [{"storage": "bf16"}, {"compute": "bf16"}, {"compute": "fp32"}], ids=str)
@pytest.mark.parametrize(("make", "use"), [(lambda: LowRank(merges=True), lambda model: model.train()), (Counting, lambda model: model(torch.ones(4, 16)))])
def test_what_is_written_into_a_tensor_is_kept_or_refused(make, use, arguments):
    torch.manual_seed(0)
    model, plain = nn.Sequential(make()).eval(), nn.Sequential(make()).eval()
    plain.load_state_dict(model.state_dict())
    use(plain[0])
    apply(model, **arguments)
    is_computed = arguments.get("compute") == "bf16" or ("storage" in arguments and make is not Counting)
    if is_computed:
        with pytest.raises(HalfsafeError, match="cannot be written into"):
            use(model[0])
    else:
        use(model[0])
        assert all(relative_error(plain.state_dict()[name] + 1e-9, value + 1e-9) < 5e-3 for name, value in model.state_dict().items())
