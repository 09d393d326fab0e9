"""Which quantized layers run the product that is bound to them."""

import pytest
import torch
from halfsafe.nodes.host.comfyui.weights import Bound


def note_bound(monkeypatch: pytest.MonkeyPatch, kind: type[Bound] = Bound) -> list[torch.nn.Module]:
    """Return a list that gets the layer of each call of a product of this kind, but for calls that run the layer's own forward."""
    seen: list[torch.nn.Module] = []
    ready = kind.is_ready

    def is_ready(self: Bound, x: torch.Tensor) -> bool | None:
        found = ready(self, x)
        seen.extend([] if found is None else [self.module])
        return found

    monkeypatch.setattr(kind, "is_ready", is_ready)
    return seen
