"""Finding tensors in what models are given and return."""

import torch
from halfsafe.precision.base.nested import floats_in, leaves, tensors_in

A, B, INTEGERS = torch.zeros(1), torch.ones(2), torch.ones(3, dtype=torch.int64)


class Nested:
    """As ComfyUI's nested tensors: no tensor itself."""

    def unbind(self):
        return (A, B)


class Other(torch.Tensor):
    """A tensor class of another pack."""


def test_tensors_are_found_in_lists_tuples_dicts_and_nested_tensors():
    values = {"samples": Nested(), "more": [(INTEGERS, 3.5), None, "text"]}
    assert [name for name, leaf in leaves(values) if isinstance(leaf, torch.Tensor)] == [
        "samples[0]",
        "samples[1]",
        "more[0][0]",
    ]
    assert [id(tensor) for tensor in tensors_in(values)] == [id(A), id(B), id(INTEGERS)]
    assert [id(tensor) for tensor in floats_in(values)] == [id(A), id(B)]


def test_tensors_of_other_classes_are_told_from_torchs_own():
    other = torch.zeros(1).as_subclass(Other)
    assert tensors_in([other, A]) == [A] and len(floats_in([other, A])) == 2
