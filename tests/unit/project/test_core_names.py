"""The table of ComfyUI's names: it follows the source of `nodes`, and its check finds what a ComfyUI lacks."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from halfsafe import __main__ as cli
from halfsafe.precision.commands import core_names, core_uses
from support.shipped import ROOT

OTHER_FILES = sorted(path for path in core_uses.NODES.rglob("*.py") if path != core_uses.CORE)
MODULE_ATTRIBUTES = {attribute for _, attribute in core_uses.module_attributes()}


def test_the_source_uses_what_the_table_has() -> None:
    files = core_uses.used_names()
    assert len(core_names.used()) > 150 and sorted(set(core_names.used())) == core_names.used()
    assert files["comfy.ops.*.comfy_cast_weights"] == ("nodes/host/core.py",)
    assert "nodes/host/run/modules.py" in files["comfy.ops.cast_bias_weight"]
    assert set(map(plain, core_names.IF_THERE)) <= set(files)


def plain(row: str) -> str:
    return row.partition("(")[0]


def test_no_row_outlives_its_use() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in core_uses.NODES.rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    assert {row for row in core_names.BY_HAND if plain(row).rpartition(".")[2] not in words} == set()


def test_each_attribute_of_a_module_is_known() -> None:
    assert {"comfy_cast_weights", "_v", "quant_format", "reset_prefix_cache", "qwen_image21_cache"} <= MODULE_ATTRIBUTES
    assert len(MODULE_ATTRIBUTES) > 15


@pytest.mark.parametrize("path", OTHER_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_attributes_of_comfyuis_modules_are_touched_in_core_py_alone(path: Path) -> None:
    assert touched(ast.parse(path.read_text(encoding="utf-8"))) == []


def touched(tree: ast.Module) -> list[str]:
    """Attributes of ComfyUI's modules that a file reads, sets or names, those of its own objects left out."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in MODULE_ATTRIBUTES)
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    named = [text for text in texts if text.rpartition(".")[2] in MODULE_ATTRIBUTES]
    return named + [ast.unparse(node) for node in attributes if ast.unparse(node.value) != "self"]


@pytest.mark.parametrize(
    "code",
    ["module.comfy_cast_weights = True", "hasattr(module, '_v')", "patched([(module, 'set_weight', f)])", "f'{name}._full_precision_mm'", "len(module.weight_function)"],
)  # fmt: skip
def test_what_touches_one_is_found(code: str) -> None:
    assert len(touched(ast.parse(code))) == 1


def test_no_file_of_the_nodes_reads_a_private_attribute_of_comfy_kitchens_tensors() -> None:
    private = re.compile(r"\b_qdata\b|\._params\b|\b_layout_cls\b")
    found = {path.name for path in core_uses.NODES.rglob("*.py") if private.search(path.read_text(encoding="utf-8"))}
    assert found == set()


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "ops.py").write_text(
        "import torch\n"
        "def run(a, b=1, *, c): pass\n"
        "try:\n    from kitchen import Tensor\nexcept ImportError:\n    class Tensor: pass\n"
        "class Base:\n    def held(self, x): pass\n    here: int = 1\n"
        "class Layer(Base):\n    def __init__(self, size):\n        self.size = size\n        Layer.instance = self\n"
        "    @staticmethod\n    def made(x): pass\n    @property\n    def shape(self): pass\n"
        "def load(m):\n    m.nested = hasattr(m, 'probed')\n",
        encoding="utf-8",
    )
    return tmp_path


@pytest.mark.parametrize(
    "row",
    ["run(a, c=)", "run(a, b, c=)", "Tensor", "Layer(size)", "Layer.size", "Layer.instance", "Layer.held(x)", "Layer.made(x)", "Layer.here", "Layer.shape", "*.size", "*.instance", "*.held", "*.probed", "*.nested"],
)  # fmt: skip
def test_what_is_there_is_found(comfyui: Path, row: str) -> None:
    assert core_names.names_missing(comfyui, [f"comfy.ops.{row}"]) == []


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("gone", "comfy/ops.py has no gone"), ("*.gone", "comfy/ops.py mentions no gone"), ("*.siz", "comfy/ops.py mentions no siz"), ("Layer.gone", "comfy/ops.py has no Layer.gone"), ("run(a)", "missing a required argument: 'c'"),
        ("run(a, c=, d=)", "unexpected keyword argument 'd'"), ("run(a, b, x, c=)", "too many positional arguments"),
        ("Layer()", "missing a required argument: 'size'"), ("Layer.held()", "missing a required argument: 'x'"), ("Layer.made()", "missing a required argument: 'x'"),
    ],
)  # fmt: skip
def test_what_is_gone_or_takes_something_else_is_named(comfyui: Path, row: str, why: str) -> None:
    (found,) = core_names.names_missing(comfyui, [f"comfy.ops.{row}"])
    assert found.name == f"comfy.ops.{row}" and why in found.why


def test_files_that_are_not_there_are_told_apart_from_names(comfyui: Path) -> None:
    assert core_names.names_missing(comfyui, ["comfy.sd.VAE"]) == [] and "comfy.sd.VAE.patcher" in core_names.names_unread(comfyui, core_names.used())


def test_doctor_prints_the_table_for_a_comfyui(comfyui: Path, capsys) -> None:
    (comfyui / "comfyui_version.py").write_text('__version__ = "9.9.9"\n', encoding="utf-8")
    assert cli.main(["doctor", "--comfyui", str(comfyui)]) == 0
    said = capsys.readouterr().out
    assert "ComfyUI 9.9.9 in" in said and "comfy.ops.run_every_op(): comfy/ops.py has no run_every_op" in said
    assert "comfy.sd.VAE.patcher: not checked" in said
    assert {name for name in core_names.IF_THERE if f"  {name}: not in this version" not in said} == {"comfy.ops.run_if_there"} & core_names.IF_THERE.keys()
    assert cli.main(["doctor", "--json", "--comfyui", str(comfyui)]) == 0
    assert json.loads(capsys.readouterr().out)["comfyui"]["version"] == "9.9.9"
