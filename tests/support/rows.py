"""Rows of a parametrization whose values are handled apart: each of one list beside one of another in turn, instead of beside all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import pytest


def rotated(many: Iterable, few: Iterable, whole: Sequence = ()) -> list[tuple]:
    """Each of ``many`` beside the next of ``few``, and those of ``whole``, which stand for the others of their kind, beside all of them.

    Values that are tuples are put into the row as columns of it.
    """
    few, rows = list(few), []
    turn = 0
    for each in many:
        if each in whole:
            rows += [(*_columns(each), *_columns(other)) for other in few]
        else:
            rows.append((*_columns(each), *_columns(few[turn % len(few)])))
            turn += 1
    return rows


def the_rest_before_a_release(rows: Sequence[tuple], everything: Iterable[tuple]) -> list:
    """``rows``, which run each time, and those of ``everything`` that are not among them, with the marker `release`."""
    return [*rows, *(pytest.param(*row, marks=pytest.mark.release) for row in everything if row not in rows)]


def all_of(*lists: Iterable) -> list[tuple]:
    """Each of a list beside each of the others, as ``few`` of `rotated`."""
    return list(product(*lists))


def _columns(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value,)
