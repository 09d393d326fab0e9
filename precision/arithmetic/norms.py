"""Norms that bound sums of products, computed on the device without a synchronisation."""

import torch


def largest_row_norm(x: torch.Tensor) -> torch.Tensor:
    """Compute the largest 2-norm of the rows of ``x`` (..., K), 0-dim fp32; 0 where it is empty."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax()


def weight_norms(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the largest 1-norm and 2-norm of the rows of a weight (outputs, K), each 0-dim fp32."""
    first, second = (torch.linalg.vector_norm(weight, order, dim=-1, dtype=torch.float32).amax() for order in (1, 2))
    return first, second
