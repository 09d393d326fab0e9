"""The table of ComfyUI's names: it follows the source of `nodes`, and its check finds what a ComfyUI lacks."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from halfsafe import __main__ as cli
from halfsafe.precision.commands import core_names
from support.shipped import ROOT

COMFY = ("comfy", "comfy_api", "comfy_execution", "folder_paths", "server", "nodes")
OBJECTS = {"patcher": "comfy.model_patcher.ModelPatcher", "current_patcher": "comfy.model_patcher.ModelPatcher", "vae": "comfy.sd.VAE", "clip": "comfy.sd.CLIP", "bar": "comfy.utils.ProgressBar"}
PLAIN = [row.partition("(")[0] for row in [*core_names.USED, *core_names.IF_THERE]]


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def used_names() -> set[str]:
    """Every dotted name of ComfyUI in `nodes`, imported or read, and the attributes read of its objects."""
    found = set()
    for path in (ROOT / "nodes").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        modules = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names if a.name.split(".")[0] in COMFY}
        froms = [n for n in nodes if isinstance(n, ast.ImportFrom) and not n.level and n.module.split(".")[0] in COMFY]
        found |= {f"{n.module}.{a.name}" for n in froms for a in n.names}
        for node in nodes:
            if isinstance(node, ast.Attribute):
                name = dotted(node)
                found |= {name} if any(name.startswith(f"{module}.") and name not in modules for module in modules) else set()
                owner = OBJECTS.get(dotted(node.value).rpartition(".")[2])
                found |= {f"{owner}.{node.attr}"} if owner else set()
    return {name for name in found if not any(module.startswith(f"{name}.") for module in PLAIN) and "__" not in name}


def test_the_table_has_every_name_that_the_source_uses() -> None:
    found = used_names()
    assert len(found) > 70
    assert {name for name in found if not any(name == row or name.startswith(f"{row}.") for row in PLAIN)} == set()


def test_no_name_is_listed_twice_or_out_of_order() -> None:
    assert sorted(set(core_names.USED)) == core_names.USED


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "ops.py").write_text(
        "import torch\n"
        "def run(a, b=1, *, c): pass\n"
        "try:\n    from kitchen import Tensor\nexcept ImportError:\n    class Tensor: pass\n"
        "class Base:\n    def held(self, x): pass\n    here: int = 1\n"
        "class Layer(Base):\n    def __init__(self, size):\n        self.size = size\n        Layer.instance = self\n"
        "    @staticmethod\n    def made(x): pass\n    @property\n    def shape(self): pass\n",
        encoding="utf-8",
    )
    return tmp_path


@pytest.mark.parametrize(
    "row",
    ["run(a, c=)", "run(a, b, c=)", "Tensor", "Layer(size)", "Layer.size", "Layer.instance", "Layer.held(x)", "Layer.made(x)", "Layer.here", "Layer.shape"],
)  # fmt: skip
def test_what_is_there_is_found(comfyui: Path, row: str) -> None:
    assert core_names.names_missing(comfyui, [f"comfy.ops.{row}"]) == []


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("gone", "comfy/ops.py has no gone"), ("Layer.gone", "comfy/ops.py has no Layer.gone"), ("run(a)", "missing a required argument: 'c'"),
        ("run(a, c=, d=)", "unexpected keyword argument 'd'"), ("run(a, b, x, c=)", "too many positional arguments"),
        ("Layer()", "missing a required argument: 'size'"), ("Layer.held()", "missing a required argument: 'x'"), ("Layer.made()", "missing a required argument: 'x'"),
    ],
)  # fmt: skip
def test_what_is_gone_or_takes_something_else_is_named(comfyui: Path, row: str, why: str) -> None:
    (found,) = core_names.names_missing(comfyui, [f"comfy.ops.{row}"])
    assert found.name == f"comfy.ops.{row}" and why in found.why


def test_files_that_are_not_there_are_told_apart_from_names(comfyui: Path) -> None:
    assert core_names.names_missing(comfyui, ["comfy.sd.VAE"]) == [] and "comfy.sd.VAE.patcher" in core_names.names_unread(comfyui)


def test_doctor_prints_the_table_for_a_comfyui(comfyui: Path, capsys) -> None:
    (comfyui / "comfyui_version.py").write_text('__version__ = "9.9.9"\n', encoding="utf-8")
    assert cli.main(["doctor", "--comfyui", str(comfyui)]) == 0
    said = capsys.readouterr().out
    assert "ComfyUI 9.9.9 in" in said and "comfy.ops.run_every_op(): comfy/ops.py has no run_every_op" in said
    assert "comfy.sd.VAE.patcher: not checked" in said
    assert cli.main(["doctor", "--json", "--comfyui", str(comfyui)]) == 0
    assert json.loads(capsys.readouterr().out)["comfyui"]["version"] == "9.9.9"
