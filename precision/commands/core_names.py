"""Every name of ComfyUI that ``nodes/`` uses, with the arguments it passes, and whether a ComfyUI has them.

``names_missing`` reads ComfyUI's source and imports nothing, so that any version's files can be asked, also a few of
them. ``core_uses`` reads the names from the source of ``nodes/``; those with arguments stand here.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .core_uses import used_names

ANY = "*"
BY_HAND = [
    "comfy.controlnet.ControlBase.pre_run(model, percent_to_timestep_function)",
    "comfy.controlnet.ControlNet.load_device",
    "comfy.controlnet.controlnet_load_state_dict(module, tensors)",
    "comfy.controlnet.load_controlnet_state_dict(tensors, model_options=)",
    "comfy.controlnet.load_t2i_adapter(tensors, model_options=)",
    "comfy.lora.calculate_weight(patches, weight, key, original_weights=)",
    "comfy.model_base.BaseModel.apply_model(x, t, c_concat, c_crossattn, control, transformer_options)",
    "comfy.model_base.BaseModel.get_dtype()",
    "comfy.model_detection.convert_diffusers_mmdit(state_dict, output_prefix)",
    "comfy.model_detection.model_config_from_diffusers_unet(state_dict)",
    "comfy.model_detection.model_config_from_unet(state_dict, prefix, metadata=)",
    "comfy.model_detection.unet_prefix_from_state_dict(state_dict)",
    "comfy.model_management.get_free_memory(device)",
    "comfy.model_management.get_torch_device()",
    "comfy.model_management.interrupt_current_processing()",
    "comfy.model_management.is_oom(error)",
    "comfy.model_management.soft_empty_cache()",
    "comfy.model_management.text_encoder_device()",
    "comfy.model_management.text_encoder_dtype(device)",
    "comfy.model_management.throw_exception_if_processing_interrupted()",
    "comfy.model_management.unet_dtype(model_params=, supported_dtypes=, weight_dtype=)",
    "comfy.model_management.unet_offload_device()",
    "comfy.model_management.unload_all_models()",
    "comfy.model_patcher.CoreModelPatcher(model, load_device, offload_device, size=)",
    "comfy.model_patcher.ModelPatcher.add_callback_with_key(kind, key, callback)",
    "comfy.model_patcher.ModelPatcher.add_object_patch(name, object)",
    "comfy.model_patcher.ModelPatcher.add_wrapper_with_key(kind, key, wrapper)",
    "comfy.model_patcher.ModelPatcher.clone(model_override=)",
    "comfy.model_patcher.ModelPatcher.get_clone_model_override()",
    "comfy.model_patcher.ModelPatcher.get_combined_hook_patches(hooks)",
    "comfy.model_patcher.ModelPatcher.get_model_object(name)",
    "comfy.model_patcher.ModelPatcher.inject_model()",
    "comfy.model_patcher.ModelPatcher.load()",
    "comfy.model_patcher.ModelPatcher.model_patches_models()",
    "comfy.model_patcher.ModelPatcher.model_size()",
    "comfy.model_patcher.ModelPatcher.model_state_dict(filter_prefix)",
    "comfy.model_patcher.ModelPatcher.model_state_dict_for_saving(model, prefix)",
    "comfy.model_patcher.ModelPatcher.partially_unload(device)",
    (
        "comfy.model_patcher.ModelPatcher.patch_hook_weight_to_device(hooks, combined_patches, key, original_weights, "
        "memory_counter)"
    ),
    "comfy.model_patcher.ModelPatcher.patch_weight_to_device(key, device_to=, return_weight=)",
    "comfy.model_patcher.ModelPatcher.remove_wrappers_with_key(kind, key)",
    "comfy.model_patcher.ModelPatcher.set_attachments(key, attachment)",
    "comfy.model_patcher.ModelPatcher.set_injections(key, injections)",
    "comfy.model_patcher.ModelPatcher.set_model_compute_dtype(dtype)",
    "comfy.model_patcher.ModelPatcher.size",
    "comfy.model_patcher.ModelPatcher.use_ejected()",
    "comfy.ops.cast_bias_weight(module, dtype=, device=, bias_dtype=, offloadable=, want_requant=)",
    "comfy.ops.manual_cast.Linear(inputs, outputs, bias=, device=, dtype=)",
    "comfy.ops.pick_operations(weight_dtype, compute_dtype, load_device=, model_config=)",
    "comfy.ops.run_every_op()",
    "comfy.ops.uncast_bias_weight(module, weight, bias, stream)",
    "comfy.patcher_extension.PatcherInjection(inject, eject)",
    "comfy.sample.fix_empty_latent_channels(model, latent, downscale_ratio_spacial=, downscale_ratio_temporal=)",
    "comfy.sample.prepare_noise(latent, seed, batch_index)",
    "comfy.sample.sample(model, noise, steps, cfg, sampler, scheduler, positive, negative, latent)",
    (
        "comfy.sd.CLIP(target, embedding_directory=, tokenizer_data=, parameters=, state_dict=, model_options=, "
        "disable_dynamic=)"
    ),
    "comfy.sd.CLIP.clone()",
    "comfy.sd.VAE(sd=, metadata=, dtype=)",
    "comfy.sd.detect_te_model(state_dict)",
    "comfy.sd.load_diffusion_model_state_dict(state_dict, model_options=, metadata=, disable_dynamic=)",
    (
        "comfy.sd.load_state_dict_guess_config(state_dict, output_vae=, output_clip=, model_options=, metadata=, "
        "disable_dynamic=)"
    ),
    (
        "comfy.sd.load_text_encoder_state_dicts(state_dicts, embedding_directory=, clip_type=, model_options=, "
        "disable_dynamic=)"
    ),
    "comfy.supported_models.SDXL.clip_target(state_dict=)",
    "comfy.supported_models_base.BASE.get_model(state_dict, prefix, device=)",
    "comfy.supported_models_base.BASE.process_clip_state_dict(state_dict)",
    "comfy.supported_models_base.BASE.process_unet_state_dict(state_dict)",
    "comfy.supported_models_base.BASE.process_vae_state_dict(state_dict)",
    "comfy.supported_models_base.BASE.set_inference_dtype(dtype, manual_cast_dtype)",
    "comfy.utils.ProgressBar(total)",
    "comfy.utils.ProgressBar.update(value)",
    "comfy.utils.ProgressBar.update_absolute(value, total)",
    "comfy.utils.calculate_parameters(state_dict)",
    "comfy.utils.clip_text_transformers_convert(state_dict, prefix_from, prefix_to)",
    "comfy.utils.get_attr(model, name)",
    "comfy.utils.load_torch_file(path)",
    "comfy.utils.state_dict_prefix_replace(state_dict, replace_prefix=, filter_keys=)",
    "comfy.utils.unet_to_diffusers(unet_config)",
    "comfy_execution.utils.get_executing_context()",
    "folder_paths.get_filename_list(folder)",
    "folder_paths.get_folder_paths(folder)",
    "folder_paths.get_full_path(folder, name)",
    "folder_paths.get_output_directory()",
    "folder_paths.get_save_image_path(prefix, folder)",
    "server.PromptServer.send_progress_text(text, node_id, sid)",
    "server.PromptServer.send_sync(event, data, client_id)",
]
"""Names with the arguments that are passed to them, of methods that are replaced too, and attributes of objects without
a name of their own in the source; the other names are read from it."""
IF_THERE = {
    "comfy.ops.linear_input_act(linear, x, input_act)": "no layer is called with a fused activation",
    "comfy.ops.cast_bias_weight(module, compute_dtype=)": "LoRAs of dynamic VRAM are added in the weight's dtype",
    "comfy.memory_management.aimdo_enabled": "files are mapped by Halfsafe itself",
    "comfy.quant_ops.ck": "int8 products are taken to gain nothing: comfy-kitchen is not told of",
    "comfy.model_patcher.ModelPatcher.additional_models": "no model runs on several devices",
    "comfy.model_patcher.ModelPatcher.is_multigpu_base_clone": "no model runs on several devices",
    "comfy.ops.*.can_use_quantized_matmul": "full precision holds for the formats that quantize a layer's input",
    "comfy.ops.*.pre_quant_scale": "no layer scales its input before it multiplies",
    "comfy.ldm.qwen_image21.model.*.prefix_cache_enabled": "no model keeps keys and values of the text between steps",
    "comfy.ldm.qwen_image21.model.*.qwen_image21_cache": "no model keeps keys and values of the text between steps",
    "comfy.ldm.qwen_image21.model.*.reset_prefix_cache": "no model keeps keys and values of the text between steps",
    "comfy.cli_args.*.disable_comfy_compiler": "there is no model compiler to turn off",
    "comfy.model_prefetch.*.cleanup_malloc_graph": "there is no model compiler to clean up after",
}
"""What is used where it is there, and what happens where it is not."""


@cache
def used() -> list[str]:
    """List what ``nodes/`` uses of every ComfyUI, in order: with arguments where they are known."""
    covered = {row.partition("(")[0] for row in [*BY_HAND, *IF_THERE]}
    methods = {row.partition("(")[0].rpartition(".")[2] for row in BY_HAND if row.partition("(")[0] not in used_names()}
    read = (name for name in used_names() if name not in covered and name.rpartition(".")[2] not in methods)
    return sorted([*BY_HAND, *read])


@dataclass(frozen=True)
class Missing:
    """A name that a ComfyUI lacks, or that does not take what is passed; ``why`` says which."""

    name: str
    why: str


def names_missing(root: Path, names: Iterable[str] | None = None) -> list[Missing]:
    """Find the names that the ComfyUI in a folder does not have; those of modules the folder lacks are left out.

    Args:
        root: a ComfyUI folder, or one that holds some of its files at their places.
        names: rows of :func:`used`, all of them if None; ``f(a, b=)`` passes one argument by position and one by name.
    """
    names = used() if names is None else names
    return [Missing(name, why) for name in names if (why := _why_missing(root, name))]


def report(root: Path) -> dict:
    """Report what a ComfyUI folder has of the table, for ``doctor``. JSON-safe."""
    version = root / "comfyui_version.py"
    not_there = {missing.name for missing in names_missing(root, IF_THERE)}.union(names_unread(root, IF_THERE))
    return {
        "folder": str(root),
        "version": version.read_text(encoding="utf-8").split('"')[-2] if version.is_file() else None,
        "used": used(),
        "missing": [vars(missing) for missing in names_missing(root)],
        "unread": names_unread(root, used()),
        "absent": {name: effect for name, effect in IF_THERE.items() if name in not_there},
    }


def names_unread(root: Path, names: Iterable[str]) -> list[str]:
    """List the names whose module the folder has no file for, and which were therefore not checked."""
    return [name for name in names if _split(root, name)[0] is None]


def _why_missing(root: Path, row: str) -> str:
    module, path = _split(root, row.partition("(")[0])
    if module is None:
        return ""
    if path[0] == ANY:
        return "" if path[1] in _mentions(module) else f"{module.relative_to(root).as_posix()} mentions no {path[1]}"
    found = _find(module, path)
    if found is None:
        return f"{module.relative_to(root).as_posix()} has no {'.'.join(path)}"
    return _why_refused(found.arguments, found.bound, row) if "(" in row and found.arguments else ""


def _split(root: Path, name: str) -> tuple[Path | None, list[str]]:
    """Find the file of the module a dotted name begins with, and the rest of the name."""
    parts = name.partition("(")[0].split(".")
    for length in range(len(parts) - 1, 0, -1):
        base = root.joinpath(*parts[:length])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file, parts[length:]
    return None, parts


@dataclass(frozen=True)
class _Found:
    """A definition: the arguments of a function or a constructor, and whether the first is the object itself."""

    node: ast.AST | None = None
    arguments: ast.arguments | None = None
    bound: bool = False


@cache
def _mentions(file: Path) -> frozenset[str]:
    """Return the attributes that a file reads, sets, defines or probes for, of whatever object."""
    nodes = list(ast.walk(_tree(file)))
    named = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    probed = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    bound = {name for node in nodes for name in _bound_names(node)}
    return frozenset({node.attr for node in nodes if isinstance(node, ast.Attribute)} | named | probed | bound)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _find(file: Path, path: list[str]) -> _Found | None:
    found = _member(_tree(file), path[0])
    for name in path[1:]:
        if found is None or found.node is None:
            return found
        found = _inherited(file, found.node, name)
    if found and isinstance(found.node, ast.ClassDef):
        init = _inherited(file, found.node, "__init__")
        return _Found(found.node, init.arguments if init else None, bound=True)
    return found


def _inherited(file: Path, node: ast.AST, name: str) -> _Found | None:
    """Find a class's member, or that of a base in the same file."""
    if found := _member(node, name):
        return found
    for base in getattr(node, "bases", []):
        inside = _member(_tree(file), base.id) if isinstance(base, ast.Name) else None
        if inside and inside.node and (found := _inherited(file, inside.node, name)):
            return found
    return None


def _member(scope: ast.AST, name: str) -> _Found | None:
    """Find what a module or class defines under a name; the last definition counts,
    an import or a value has no arguments."""
    found = None
    for node in _statements(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
            is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
            found = _Found(None, None if is_property else node.args, isinstance(scope, ast.ClassDef) and not static)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            found = _Found(node)
        elif name in _bound_names(node):
            found = _Found()
    return found


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module or class, those inside of if, try and with,
    and what methods assign to ``self``."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _statements(node)
        elif isinstance(scope, ast.ClassDef) and isinstance(node, ast.FunctionDef):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, (ast.Assign, ast.AnnAssign)))


def _bound_names(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    flat = [leaf for target in targets for leaf in (target.elts if isinstance(target, ast.Tuple) else [target])]
    own = {leaf.id for leaf in flat if isinstance(leaf, ast.Name)}
    return own | {leaf.attr for leaf in flat if isinstance(leaf, ast.Attribute) and isinstance(leaf.value, ast.Name)}


def _why_refused(arguments: ast.arguments, bound: bool, row: str) -> str:
    """Bind the row's arguments to the definition's; "" where they fit."""
    given = [part.strip() for part in row.partition("(")[2].rstrip(")").split(",") if part.strip()]
    positional = [part for part in given if not part.endswith("=")]
    named = [part.rstrip("=") for part in given if part.endswith("=")]
    accept = _signature(arguments, bound).bind
    try:
        accept(*positional, **dict.fromkeys(named))
    except TypeError as error:
        return str(error)
    return ""


def _signature(arguments: ast.arguments, bound: bool) -> inspect.Signature:
    plain = [*arguments.posonlyargs, *arguments.args]
    optional = len(plain) - len(arguments.defaults)
    kind = inspect.Parameter
    defaults = [kind.empty if i < optional else None for i in range(len(plain))]
    positional = zip(plain, defaults, strict=True)
    parameters = [kind(a.arg, kind.POSITIONAL_OR_KEYWORD, default=default) for a, default in positional]
    parameters += [kind(arguments.vararg.arg, kind.VAR_POSITIONAL)] if arguments.vararg else []
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters += [
        kind(a.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None) for a, default in pairs
    ]
    parameters += [kind(arguments.kwarg.arg, kind.VAR_KEYWORD)] if arguments.kwarg else []
    return inspect.Signature(parameters[1:] if bound else parameters)
