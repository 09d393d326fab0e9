"""This ComfyUI has every name that `nodes/` uses, read from its source, and takes the arguments it is given.

Attributes of ComfyUI's modules (``torch.nn.Module``) have no class to look them up in: `nodes/host/comfyui/attributes.py` alone reads and sets them, and its
annotations name the file of ComfyUI that mentions them. Nothing reads comfy-kitchen's private attributes.
"""

import ast
import asyncio
import importlib
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch
from support.shipped import ROOT

NODES = ROOT / "nodes"
CORE = NODES / "host" / "comfyui" / "attributes.py"
COMFY = ("comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "server", "nodes")
OBJECTS = {
    "patcher.model": "comfy.model_base.BaseModel", "patcher": "comfy.model_patcher.ModelPatcher", "_patcher": "comfy.model_patcher.ModelPatcher",
    "current_patcher": "comfy.model_patcher.ModelPatcher", "vae": "comfy.sd.VAE", "clip": "comfy.sd.CLIP", "bar": "comfy.utils.ProgressBar",
    "config": "comfy.supported_models.SDXL", "server": "server.PromptServer",
}  # fmt: skip
"""Variables that hold the same class of ComfyUI's wherever they stand in `nodes/`; the longest name counts."""
IF_THERE = {
    "comfy.ops.linear_input_act", "comfy.ops._eager_input_act", "comfy.ops.INPUT_ACT_EAGER",
    "comfy.ldm.lumina.model._int8_convrot_linear", "comfy.memory_management.aimdo_enabled", "comfy.quant_ops.ck", "comfy.ops.*.can_use_quantized_matmul",
    "comfy.model_patcher.ModelPatcher.additional_models", "comfy.model_patcher.ModelPatcher.is_multigpu_base_clone", "comfy.ops.*.pre_quant_scale",
    "comfy.ldm.qwen_image21.model.*.prefix_cache_enabled", "comfy.ldm.qwen_image21.model.*.qwen_image21_cache",
    "comfy.ldm.qwen_image21.model.*.reset_prefix_cache", "comfy.cli_args.*.disable_comfy_compiler", "comfy.cli_args.*.use_ck_attention", "comfy.model_prefetch.*.cleanup_malloc_graph",
    "comfy.ldm.wan.model_animate2.*.animate2_cache", "comfy.ldm.wan.model_animate2.*.free",
    "comfy.ldm.modules.attention.*.config", "comfy.ldm.modules.attention.*.function", "comfy.text_encoders.qwen35.*.kv_cache_type",
}  # fmt: skip
"""What the code asks for before it uses it."""
NOT_COMFYS = {
    *dir(torch.nn.Module),
    "by_key",
    "plan_for",
    "set_strengths",
    "forwards",
    "sorted_patches",
    "low_rank_model",
    "low_rank_patcher",
    "passes_to_weights",
}
"""Attributes that torch gives a model, and those of our own patcher of LoRAs."""
PROBES = ("getattr", "hasattr", "setattr")


class Use(NamedTuple):
    """A name, the file of `nodes/` that uses it, and the call that is made of it, if any."""

    name: str
    file: str
    call: ast.Call | None = None


def missing(uses: list[Use]) -> dict[str, str]:
    """Map the names that this ComfyUI lacks, or that refuse the arguments they are given, to the file and the reason."""
    reasons = {use: why_missing(use) for use in uses if use.name not in IF_THERE}
    return {use.name: f"{use.file}: {why}" for use, why in reasons.items() if why}


def why_missing(use: Use) -> str:
    if ".*." in use.name:
        module, attribute = use.name.split(".*.")
        source = inspect.getsource(importlib.import_module(module))
        return "" if re.search(rf"\b{attribute}\b", source) else f"{module} mentions no {attribute}"
    owner, value = None, None
    for place, part in enumerate(parts := use.name.split(".")):
        owner, value = value, imported(".".join(parts[: place + 1])) or getattr(value, part, None)
        if value is None:
            in_class = isinstance(owner, type) and any(
                re.search(rf"\b{part}\b", source_of(base)) for base in owner.__mro__
            )
            return "" if in_class or hasattr(owner, part) else f"there is no {'.'.join(parts[: place + 1])}"
    is_method = isinstance(owner, type) and inspect.isfunction(inspect.getattr_static(owner, part))
    return (
        why_refused(value, use.call, is_method)
        if use.call and (inspect.isfunction(value) or isinstance(value, type))
        else ""
    )


def imported(name: str) -> object | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@cache
def source_of(kind: type) -> str:
    return inspect.getsource(kind) if kind.__module__.partition(".")[0] in COMFY else ""


def why_refused(function: Callable, call: ast.Call, is_method: bool) -> str:
    if any(isinstance(one, ast.Starred) for one in call.args) or any(not one.arg for one in call.keywords):
        return ""
    try:
        inspect.signature(function).bind(
            *[None] * (len(call.args) + is_method), **dict.fromkeys(one.arg for one in call.keywords)
        )
    except TypeError as error:
        return str(error)
    return ""


@cache
def all_uses() -> list[Use]:
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(NODES.rglob("*.py"))
    }
    found = [use for file, tree in trees.items() for use in uses_in(tree, file)]
    return [
        *found,
        *(Use(f"{file}.*.{name}", "nodes/host/comfyui/attributes.py") for file, name in module_attributes()),
    ]


def uses_in(tree: ast.Module, file: str) -> Iterator[Use]:
    nodes = list(ast.walk(tree))
    modules = {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names if is_comfys(alias.name)
    }
    froms = [
        node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level and is_comfys(node.module or "")
    ]
    names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in froms for alias in node.names}
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    yield from (Use(name, file) for name in names.values())
    for node in nodes:
        name = dotted(node)
        base, _, rest = name.partition(".")
        if any(name.startswith(f"{module}.") and name not in modules for module in modules):
            yield Use(name, file, calls.get(id(node)))
        elif base in names:
            yield Use(f"{names[base]}.{rest}".rstrip("."), file, calls.get(id(node)))
        elif isinstance(node, ast.Attribute) and node.attr not in NOT_COMFYS and "__" not in node.attr:
            of = next((kind for known, kind in OBJECTS.items() if f".{dotted(node.value)}".endswith(f".{known}")), None)
            yield from [Use(f"{of}.{node.attr}", file, calls.get(id(node)))] if of else []
        elif isinstance(node, ast.FunctionDef):
            kinds = {parameter.arg: names.get(annotation_of(parameter), "") for parameter in node.args.args}
            yield from (
                Use(f"{kind}.{name}", file)
                for parameter, kind in kinds.items()
                if kind
                for name in attributes_of(node, parameter)
                if name not in NOT_COMFYS
            )
    of_modules = {**{module: module for module in modules}, **names}
    yield from (
        Use(f"{kind}.{name}", file) for alias, kind in of_modules.items() for name in set_or_probed(tree, [alias])
    )


@cache
def module_attributes() -> frozenset[tuple[str, str]]:
    """(file of ComfyUI, attribute) of everything that `attributes.py` reads or sets of ComfyUI's modules."""
    tree = ast.parse(CORE.read_text(encoding="utf-8"))
    aliases = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and dotted(getattr(node.value, "value", node)) == "Annotated"
    ]
    owners = {dotted(node.targets[0]): text for node in aliases for text in texts(node.value.slice.elts[1])}
    constants = [node for node in tree.body if isinstance(node, ast.AnnAssign) and dotted(node.annotation) in owners]
    found = {(owners[dotted(node.annotation)], text) for node in constants for text in texts(node.value)}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for parameter in (*function.args.args, *function.args.kwonlyargs):
            kind = annotation_of(parameter)
            found |= (
                {(owners[kind], name) for name in attributes_of(function, parameter.arg)} if kind in owners else set()
            )
    return frozenset(found)


def attributes_of(function: ast.FunctionDef, parameter: str) -> Iterator[str]:
    """The attributes that a function reads or sets of a parameter or its class: in code, by probes and in patches."""
    owners = [parameter, f"type({parameter})"]
    read = (
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners
    )
    yield from (name for name in [*read, *set_or_probed(function, owners)] if "__" not in name)


def set_or_probed(tree: ast.AST, owners: list[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in PROBES and ast.unparse(node.args[0]) in owners:
            yield from texts(node.args[1])
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3 and ast.unparse(node.elts[0]) in owners:
            yield from texts(node.elts[1])


def annotation_of(parameter: ast.arg) -> str:
    return next(texts(parameter.annotation), dotted(parameter.annotation))


def is_comfys(module: str) -> bool:
    return module.partition(".")[0] in COMFY


def texts(node: ast.AST | None) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def dotted(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


ATTRIBUTES = {attribute for _, attribute in module_attributes()}
PRIVATE = re.compile(r"\b_qdata\b|\._params\b|\b_layout_cls\b")


def touched(code: str) -> list[str]:
    """Attributes of ComfyUI's modules that code reads, sets or names, those of its own objects left out."""
    nodes = list(ast.walk(ast.parse(code)))
    attributes = [
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES and ast.unparse(node.value) != "self"
    ]
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in texts if text.rpartition(".")[2] in ATTRIBUTES] + attributes


def test_attributes_of_comfyuis_modules_are_touched_in_one_file_alone() -> None:
    assert len(ATTRIBUTES) > 15 and len(touched("hasattr(module, 'bias_function') or len(module.weight_function)")) == 2
    others = (path for path in NODES.rglob("*.py") if path != CORE)
    found = {path.name: touched(path.read_text(encoding="utf-8")) for path in others}
    assert {name: names for name, names in found.items() if names} == {}


def test_no_file_reads_a_private_attribute_of_comfy_kitchens_tensors() -> None:
    """But for those that ``kernels.bound_format`` looks for: a weight without them runs ComfyUI's own forward."""
    assert [path.name for path in NODES.rglob("*.py") if PRIVATE.search(path.read_text(encoding="utf-8"))] == [
        "kernels.py"
    ]


def test_this_comfyui_has_every_name_and_takes_what_it_is_given(comfy):
    assert len({use.name for use in all_uses()}) > 150 and missing(all_uses()) == {}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import comfy.ops\ncomfy.ops.gone", "there is no comfy.ops.gone"),
        ("from comfy.sd import VAE\ndef f(vae: VAE): vae.gone", "there is no comfy.sd.VAE.gone"),
        ("import comfy.ops\nhasattr(comfy.ops, 'gone')", "there is no comfy.ops.gone"),
        ("loaded.patcher.gone(1)", "there is no comfy.model_patcher.ModelPatcher.gone"),
        ("patcher.add_object_patch(1)", "missing a required argument: 'obj'"),
        ("import comfy.utils\ncomfy.utils.ProgressBar(1, parts=2)", "unexpected keyword argument 'parts'"),
    ],
)
def test_a_name_that_is_gone_or_takes_something_else_is_told(comfy, code, why):
    (reason,) = missing([*uses_in(ast.parse(code), "a.py")]).values()
    assert reason.startswith("a.py: ") and why in reason


def test_an_attribute_that_no_module_of_comfyuis_mentions_is_told(comfy):
    assert missing([Use("comfy.ops.*.gone", "a.py"), Use("comfy.ops.*.weight_function", "a.py")]) == {
        "comfy.ops.*.gone": "a.py: comfy.ops mentions no gone"
    }


def test_a_wrong_device_profile_is_told_at_start_up(pack, monkeypatch, caplog):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "rtx 9999")
    with caplog.at_level(logging.ERROR):
        extension = asyncio.run(pack.comfy_entrypoint())
        asyncio.run(extension.on_load())
    assert (
        "HALFSAFE_DEVICE_PROFILE=rtx 9999: " in caplog.text and "is ignored" in caplog.text and "sm_86" in caplog.text
    )
    assert "HALFSAFE_DEVICE_PROFILE" not in os.environ
