"""The names of ComfyUI that ``nodes/`` uses, read from its source, so that none is missing and none outlives its use.

Attributes of ComfyUI's modules have no class to look them up in, as they are set from outside or probed for: they are
read and set in ``nodes/host/core.py`` alone, whose annotations name the file of ComfyUI that has them.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

NODES = Path(__file__).resolve().parents[2] / "nodes"
CORE = NODES / "host" / "core.py"
COMFY = ("comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "server", "nodes")
OBJECTS = {
    "patcher.model": "comfy.model_base.BaseModel",
    "patcher": "comfy.model_patcher.ModelPatcher", "_patcher": "comfy.model_patcher.ModelPatcher",
    "current_patcher": "comfy.model_patcher.ModelPatcher",
    "vae": "comfy.sd.VAE", "clip": "comfy.sd.CLIP", "bar": "comfy.utils.ProgressBar",
    "config": "comfy.supported_models_base.BASE", "server": "server.PromptServer",
}  # fmt: skip
"""Variables and attributes that hold the same class of ComfyUI's wherever they stand in ``nodes/``;
the longest name counts."""
LORA_METHODS = ("by_key", "set_strengths", "forwards", "sorted_patches")
"""Of the classes of ``lora/``, whose objects stand in the place of a ModelPatcher and its model."""
KITCHENS = "QuantizedTensor"
PROBES = ("getattr", "hasattr", "setattr")


@cache
def used_names() -> dict[str, tuple[str, ...]]:
    """Map every name of ComfyUI in the source to the files of ``nodes/`` that use it.

    Names are what is imported, what is read of it, and attributes of its objects. ``comfy.ops.*.seed_key`` is an
    attribute of a module, which ``comfy/ops.py`` mentions. What torch gives every module is left out.
    """
    files = {path: _tree(path) for path in sorted(NODES.rglob("*.py"))}
    ours = {*dir(torch.nn.Module), *LORA_METHODS}
    found: dict[str, set[str]] = {f"{file}.*.{name}": {_name(CORE)} for file, name in module_attributes()}
    for path, tree in files.items():
        for name in map(_without_methods, _names_in(tree)):
            if "__" not in name and not (_is_of_class(name) and name.rpartition(".")[2] in ours):
                found.setdefault(name, set()).add(_name(path))
    return {
        name: tuple(sorted(users))
        for name, users in found.items()
        if not any(other.startswith(f"{name}.") for other in found)
    }


def _name(path: Path) -> str:
    return path.relative_to(NODES.parent).as_posix()


def _is_of_class(name: str) -> bool:
    return name.split(".")[-2][:1].isupper()


@cache
def module_attributes() -> frozenset[tuple[str, str]]:
    """Return (file of ComfyUI, attribute) of everything that ``core.py`` reads or sets of ComfyUI's modules."""
    tree = _tree(CORE)
    owners = dict(pair for node in tree.body for pair in _alias(node))
    found = {(owners[kind], name) for node in tree.body for kind, name in _constant(node) if kind in owners}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for parameter, annotation in _annotated(function):
            if annotation in owners:
                found |= {(owners[annotation], attribute) for attribute in _attributes_of(function, parameter)}
    return frozenset(found)


def _alias(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield (name, file) of an alias ``Layer = Annotated[torch.nn.Module, "comfy.ops"]``."""
    if not (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Subscript)
        and isinstance(node.value.slice, ast.Tuple)
    ):
        return
    if _dotted(node.value.value) == "Annotated":
        yield from ((_dotted(target), file) for target in node.targets for file in _texts(node.value.slice.elts[1]))


def _constant(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield (annotation, text) of a constant ``CAST_DTYPE: ModelAttribute = "manual_cast_dtype"``."""
    if isinstance(node, ast.AnnAssign) and node.value:
        yield from ((_dotted(node.annotation), text) for text in _texts(node.value))


def _names_in(tree: ast.Module) -> Iterator[str]:
    nodes = list(ast.walk(tree))
    modules = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names if a.name.split(".")[0] in COMFY}
    froms = [
        n
        for n in nodes
        if isinstance(n, ast.ImportFrom) and not n.level and n.module and n.module.split(".")[0] in COMFY
    ]
    imported = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in froms for alias in node.names}
    yield from imported.values()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield from _names_of(node, modules, imported)
        elif isinstance(node, ast.Call) and _dotted(node.func) in PROBES and len(node.args) > 1:
            owner = imported.get(_dotted(node.args[0]), _dotted(node.args[0]))
            yield from (f"{owner}.{name}" for name in _texts(node.args[1]) if owner in {*modules, *imported.values()})
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3 and _dotted(node.elts[0]) in modules:
            yield from (f"{_dotted(node.elts[0])}.{name}" for name in _texts(node.elts[1]))
        elif isinstance(node, ast.FunctionDef):
            known = (
                (parameter, imported[annotation])
                for parameter, annotation in _annotated(node)
                if annotation in imported
            )
            yield from (
                f"{owner}.{attribute}" for parameter, owner in known for attribute in _attributes_of(node, parameter)
            )


def _names_of(node: ast.Attribute, modules: set[str], imported: dict[str, str]) -> Iterator[str]:
    """Yield the name of ComfyUI that an attribute stands for:
    of an imported module, an imported class, or a known object."""
    name = _dotted(node)
    if any(name.startswith(f"{module}.") and name not in modules for module in modules):
        yield name
    base, _, rest = name.partition(".")
    # Of classes alone: a module's own names, as those of io, are the API's.
    if imported.get(base, "").rpartition(".")[2][:1].isupper():
        yield f"{imported[base]}.{rest}"
    value = f".{_dotted(node.value)}"
    if owner := next((owner for known, owner in OBJECTS.items() if value.endswith(f".{known}")), None):
        yield f"{owner}.{node.attr}"


def _without_methods(name: str) -> str:
    """Cut what follows a constant, which is Python's (``QUANT_ALGOS.items``), or comfy-kitchen's class."""
    parts = name.split(".")
    ends = [place for place, part in enumerate(parts, 1) if part == KITCHENS or (part.isupper() and "_" in part)]
    return ".".join(parts[: ends[0]]) if ends else name


def _annotated(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """List (parameter, name of its annotation) of a function."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [(parameter.arg, _annotation(parameter.annotation)) for parameter in parameters]


def _annotation(node: ast.AST | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return _dotted(node) if node else ""


def _attributes_of(function: ast.FunctionDef, parameter: str) -> Iterator[str]:
    """Yield the attributes that a function reads or sets of a parameter or its class, in code,
    by probes and in patches."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and _is_parameter(node.value, parameter):
            yield node.attr
        elif isinstance(node, ast.Call) and _dotted(node.func) in PROBES and _is_parameter(node.args[0], parameter):
            yield from _texts(node.args[1])
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3 and _is_parameter(node.elts[0], parameter):
            yield from _texts(node.elts[1])


def _is_parameter(node: ast.AST, parameter: str) -> bool:
    if isinstance(node, ast.Call) and _dotted(node.func) == "type":
        return _is_parameter(node.args[0], parameter)
    return isinstance(node, ast.Name) and node.id == parameter


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
