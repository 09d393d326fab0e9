"""The table of quantization formats against ComfyUI's own, and against the products of its comfy-kitchen."""

import re

import pytest

ASKED_BY_CHECKPOINT = {"float8_e4m3fn": {"input_scale"}, "float8_e5m2": {"input_scale"}}
"""Tensors of plain fp8 layers that ``precision/formats/checkpoint.py`` reads itself, whatever the dialect."""


@pytest.fixture(scope="module")
def algorithms(comfy) -> dict[str, dict]:
    from comfy.quant_ops import QUANT_ALGOS

    return QUANT_ALGOS


def rows():
    from halfsafe.precision.formats.registry import FORMATS

    return FORMATS


def test_every_format_of_comfyui_has_a_row(algorithms):
    assert set(algorithms) <= set(rows())


def test_a_row_reads_exactly_the_tensors_that_comfyui_reads(algorithms):
    ours = {name: {*rows()[name].leaves, *ASKED_BY_CHECKPOINT.get(name, ())} for name in algorithms}
    assert ours == {name: set(algorithm["parameters"]) for name, algorithm in algorithms.items()}


def test_a_row_holds_the_weight_in_comfyuis_dtype(algorithms):
    held = {name: rows()[name].dtypes for name in algorithms}
    assert all(algorithm["storage_t"] in held[name] for name, algorithm in algorithms.items())


def test_products_are_functions_of_the_comfy_kitchen_that_has_the_format(algorithms):
    import comfy_kitchen

    known = {name for backend in comfy_kitchen.list_backends().values() for name in backend["capabilities"]}
    products = {name: rows()[name].product for name in algorithms if rows()[name].product}
    assert products and set(products.values()) <= known


def test_a_format_that_this_comfyui_lacks_came_with_a_later_one(algorithms):
    import comfyui_version

    def numbers(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)]

    newer = {name for name, row in rows().items() if numbers(row.since) > numbers(comfyui_version.__version__)}
    assert set(rows()) - set(algorithms) == newer
