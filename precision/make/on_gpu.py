"""Quantized weights made on a GPU by the functions of the CPU.

fp8 is equal bit for bit. int8 and fewer bits rotate first, a product whose sums a device adds in
another order: a scale can differ in its last bits from a CPU's, and here and there a code by one
step."""

from collections.abc import Iterator, Mapping

import torch

from ..base.dtypes import QUANTIZED_NAMES
from ..base.flags import flags_set
from ..base.oom import is_torch_oom
from ..formats.comfy_format import Made, stays, tensors_of
from ..formats.layer_plan import LayerPlan
from ..formats.stored_weight import StoredWeight

SMALL = 1 << 18
"""Weights with fewer values are quantized on the CPU, in 0.4 ms in fp8: launch and synchronization
take longer."""
WORK = 256 << 20
"""Bytes of the device that making a weight takes beside it and its result: for codes of 4 bits,
which take most."""


class OnGpu:
    """Makes large plain weights on a GPU, one after another, and all others on the CPU.

    Args:
        device: CUDA's or ROCm's.
        free: bytes of its memory that ComfyUI could have. Half of them are used at most.

    Attributes:
        made: the bytes of the weights that were made there, and ``without_room`` of those that found no room there.
    """

    def __init__(self, device: torch.device, free: int):
        self._device = device
        self._room = free // 2
        self.made = self.without_room = 0

    def weights(
        self, weights: Mapping[str, StoredWeight], plans: Mapping[str, LayerPlan], path, read: bool = True
    ) -> Iterator[Made]:
        """Make weights in their order; see
        :func:`~halfsafe.precision.formats.comfy_format.made_here`."""
        for name, weight in weights.items():
            plan = plans[name]
            made = self._made(weight, plan, path) if _gains(weight, plan) else None
            yield weight, made or tensors_of(weight, plan.storage, path, read)

    def _made(self, weight: StoredWeight, plan: LayerPlan, path) -> dict[str, torch.Tensor] | None:
        """Make a weight on the device; None where the device has no memory left for it."""
        if weight.data.nbytes + plan.bytes + WORK <= self._room:
            try:
                # TF32 rounds what is rotated to 10 bits.
                with flags_set({"tf32_matmul": False}):
                    tensors = tensors_of(weight.moved(self._device), plan.storage, path)
                tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
                self.made += plan.bytes
                return tensors
            except RuntimeError as error:
                if not is_torch_oom(error):
                    raise
        self.without_room += plan.bytes
        return None


def _gains(weight: StoredWeight, plan: LayerPlan) -> bool:
    """True if quantizing on the GPU is faster: a large plain weight without its file's scale, and
    not a cast."""
    quantized = plan.storage in QUANTIZED_NAMES and not stays(weight, plan.storage)
    return quantized and weight.format.is_cast(weight) and weight.data.numel() >= SMALL
