"""Copies between the host's memory and a device's own, in parts, through two pinned buffers."""

from collections.abc import Iterator

import torch

from ..formats.scratch import empty

PART = 32 << 20
"""Bytes of each buffer."""


class PinnedCopies:
    """Copy tensors to a device and back, the host busy with one buffer while the device copies the other.

    So the page faults of a mapped file pass while the device copies and computes. What goes to the device goes in a
    stream of its own: a tensor is uploaded while another is computed with.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._uploads = torch.cuda.Stream(device)
        self._buffers = torch.empty(2 * PART, dtype=torch.uint8, pin_memory=True).split(PART)
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0

    def close(self) -> None:
        """Give the buffers back to the system."""
        for copied in self._copied:
            copied.synchronize()
        self._buffers = ()
        if hasattr(torch._C, "_host_emptyCache"):  # from torch 2.5 on (PyTorch #134919)
            torch._C._host_emptyCache()  # torch keeps pinned memory for the next who asks

    def upload(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begin to copy a tensor of the host to the device; whoever uses the result there waits for the event."""
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        result.record_stream(self._uploads)  # its memory is not given away before it is written, whatever happens here
        self._uploads.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._uploads):
            for source, target in zip(_parts(tensor), _parts(result), strict=True):
                buffer, copied = self._next(len(source))
                target.copy_(buffer.copy_(source), non_blocking=True)
                copied.record(self._uploads)
        return result, self._uploads.record_event()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of the device, as the current stream leaves it, to the host."""
        result, stream = empty(tensor.shape, tensor.dtype), torch.cuda.current_stream(self._device)
        before = None
        for source, target in zip(_parts(tensor), _parts(result), strict=True):
            buffer, copied = self._next(len(source))
            buffer.copy_(source, non_blocking=True)
            copied.record(stream)
            if before:
                _downloaded(*before)
            before = buffer, copied, target
        if before:
            _downloaded(*before)
        return result

    def _next(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Return the buffer whose copy was asked for first, once that has ended, and the event to record for the next.
        """
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn][:size], self._copied[self._turn]


def _downloaded(buffer: torch.Tensor, copied: torch.cuda.Event, target: torch.Tensor) -> None:
    copied.synchronize()
    target.copy_(buffer)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(tensor.contiguous().view(-1).view(torch.uint8).split(PART))
