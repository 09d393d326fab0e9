"""Saying what of a value is not finite."""

import math
import re

import torch
from halfsafe.precision.guard.inputs import LISTED, not_finite
from hypothesis import given
from hypothesis import strategies as st


def test_a_finite_latent_has_nothing_to_tell():
    assert not_finite({"samples": torch.zeros(2, 4, 8, 8), "noise_mask": torch.ones(1, 1)}) == []


def test_what_only_fp64_can_hold_is_finite():
    assert not_finite(torch.tensor([1e300], dtype=torch.float64)) == []


def test_counts_and_rows_are_told():
    samples = torch.zeros(3, 4, 2)
    samples[1, 0, 0] = math.nan
    samples[2, :2, 1] = -math.inf
    told = "samples: 1 NaN and 2 Inf of 24 values (12.5%), batch rows 1, 2"
    assert not_finite({"samples": samples}) == [("samples", told)]


def test_a_conditioning_names_the_part_that_is_bad():
    pooled = torch.full((1, 8), math.nan)
    found = not_finite([[torch.zeros(1, 4, 8), {"pooled_output": pooled, "guidance": 3.5}]])
    assert [name for name, _ in found] == ["[0][1].pooled_output"]


def test_nested_latents_are_looked_into():
    class Nested:
        def unbind(self):
            return (torch.zeros(2), torch.tensor([math.inf]))

    assert [name for name, _ in not_finite({"samples": Nested()})] == ["samples[1]"]


@given(st.lists(st.sampled_from([0.0, 1.5, math.nan, math.inf, -math.inf]), min_size=1, max_size=20))
def test_the_counts_are_right(values):
    ((_, told),) = not_finite(torch.tensor(values)[:, None]) or [("", "")]
    bad = [index for index, value in enumerate(values) if not math.isfinite(value)]
    more = ", ..." if len(bad) > LISTED else ""
    assert told.rpartition("batch rows ")[2] == ", ".join(map(str, bad[:LISTED])) + more
    assert sum(map(int, re.findall(r"(\d+) (?:NaN|Inf)", told))) == len(bad)
