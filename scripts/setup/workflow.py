"""Turn a saved workflow into the prompt ComfyUI's HTTP API takes, and make it small enough for a CPU."""

from __future__ import annotations

from collections.abc import Callable

WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
NOT_EXECUTED = {"Note", "MarkdownNote"}
MUTED, BYPASSED = 2, 4
CONTROL_VALUES = {"fixed", "increment", "decrement", "randomize"}
SMALL = {"width": 64, "height": 64, "length": 1, "batch_size": 1, "steps": 2}


class WorkflowError(Exception):
    """The workflow uses a node or a value this ComfyUI does not have."""


def to_prompt(workflow: dict, object_info: dict) -> dict:
    """Convert a workflow as the page saves it to an API prompt.

    Args:
        workflow: the parsed JSON of a workflow file without subgraphs.
        object_info: the answer of ComfyUI's `/object_info`.

    Raises:
        WorkflowError: a node type is unknown, or a reroute leads nowhere.
    """
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: (link[1], link[2]) for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in NOT_EXECUTED or node["type"] == "Reroute" or node.get("mode") in (MUTED, BYPASSED):
            continue
        definition = object_info.get(node["type"])
        if definition is None:
            raise WorkflowError(f"This ComfyUI has no node {node['type']}.")
        inputs = _widget_values(node, definition) | _linked_inputs(node, links, nodes)
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def node(class_type: str, **inputs: object) -> dict:
    """One node of an API prompt."""
    return {"class_type": class_type, "inputs": inputs}


def written_back(workflow: dict, object_info: dict, prompt: dict) -> dict:
    """The workflow as the page saves it, with the values that its prompt has."""
    return {
        **workflow,
        "nodes": [_with_values(node, object_info, prompt.get(str(node["id"]))) for node in workflow["nodes"]],
    }


def _with_values(node: dict, object_info: dict, prompted: dict | None) -> dict:
    if prompted is None or not isinstance(node.get("widgets_values"), list):
        return node
    values = list(node["widgets_values"])
    for name, position in _widget_positions(node, object_info[node["type"]]).items():
        value = prompted["inputs"].get(name)
        if value is not None and not isinstance(value, list):
            values[position] = value
    return {**node, "widgets_values": values}


def bypass(workflow: dict, types: tuple[str, ...]) -> dict:
    """The workflow with the nodes of these types bypassed, as Ctrl+B does on the page."""
    nodes = [{**node, "mode": BYPASSED} if node["type"] in types else node for node in workflow["nodes"]]
    return {**workflow, "nodes": nodes}


def substitute_files(prompt: dict, object_info: dict, choose: Callable[[str, str], str | None]) -> dict:
    """Replace file names this ComfyUI does not have. `choose(input name, wanted file)` returns one it has, or None.

    A text encoder that is replaced by CLIP-L is loaded as type sd3, which pads it to the 4096 columns of T5, unless the
    model is the one of `tests/assets`, trained on CLIP-L's own 768.
    """
    replaced = {}
    for node_id, node in prompt.items():
        options = _combo_options(object_info[node["class_type"]])
        inputs = dict(node["inputs"])
        for name, value in node["inputs"].items():
            if name in options and isinstance(value, str) and value not in options[name]:
                inputs[name] = _chosen(node["class_type"], name, value, options[name], choose)
        replaced[node_id] = {**node, "inputs": inputs}
    models = (str(node["inputs"].get(name, "")) for node in replaced.values() for name in ("model_name", "unet_name"))
    if not any(model.startswith("shapes") for model in models):
        _pad_clip_l(replaced)
    return replaced


def _pad_clip_l(prompt: dict) -> None:
    for node in prompt.values():
        inputs = node["inputs"]
        if "clip_l" in str(inputs.get("clip_name1", inputs.get("clip_name"))) and inputs.get("type") == "wan":
            inputs["type"] = "sd3"


def small_file(name: str, wanted: str) -> str | None:
    """The small model that can stand in for a file, by input name and family: of `tests/assets` for Wan, else random."""
    if name in ("model_name", "unet_name"):
        families = ("flux", "hunyuan_video", "ltxv", "sd3", "sdxl", "qwen_image", "z_image")
        return f"{next((f for f in families if f in wanted.lower()), 'shapes')}.safetensors"
    stand_ins = {
        "ckpt_name": "sd15_checkpoint",
        "clip_name": "clip_l",
        "clip_name1": "clip_l",
        "vae_name": "shapes_vae",
    }
    return f"{stand_ins[name]}.safetensors" if name in stand_ins else None


def ask_for(prompt: dict, text: str, cfg: float = 3.0) -> dict:
    """Change what every sampler is asked for: a prompt and an empty negative prompt of plain text encoders, and cfg."""
    wanted = {}
    for node in prompt.values():
        if "cfg" in node["inputs"]:
            wanted |= {node["inputs"]["positive"][0]: text, node["inputs"]["negative"][0]: ""}
    return {
        node_id: {**node, "inputs": _asked(node["inputs"], wanted.get(node_id), cfg)}
        for node_id, node in prompt.items()
    }


def _asked(inputs: dict, text: str | None, cfg: float) -> dict:
    changes = {"cfg": cfg} if "cfg" in inputs else {}
    return inputs | changes | ({} if text is None else {"text": text})


def shrink(prompt: dict, **limits: int) -> dict:
    """Lower sizes and step counts to what a CPU does in seconds."""
    limits = SMALL | limits
    small = {}
    for node_id, node in prompt.items():
        inputs = {
            k: min(v, limits[k]) if k in limits and isinstance(v, int) and not isinstance(v, bool) else v
            for k, v in node["inputs"].items()
        }
        small[node_id] = {**node, "inputs": inputs}
    return small


def _chosen(node: str, name: str, value: str, options: list, choose: Callable[[str, str], str | None]) -> str:
    found = choose(name, value)
    if found not in options:
        raise WorkflowError(f"{node}.{name}: {value!r} is not one of {options}")
    return found


def _declared_inputs(definition: dict) -> list[tuple[str, object, dict]]:
    declared = []
    for group in ("required", "optional"):
        fields = definition["input"].get(group, {})
        order = definition.get("input_order", {}).get(group, list(fields))
        for name in order:
            kind, *options = fields[name]
            declared.append((name, kind, options[0] if options else {}))
    return declared


def _is_widget(kind: object, options: dict) -> bool:
    return (isinstance(kind, list) or kind in WIDGET_TYPES) and not options.get("forceInput")


def _widget_values(node: dict, definition: dict) -> dict:
    saved = node.get("widgets_values") or []
    if isinstance(saved, dict):
        return dict(saved)
    declared = [(name, options) for name, kind, options in _declared_inputs(definition) if _is_widget(kind, options)]
    values = {name: options["default"] for name, options in declared if "default" in options}
    values |= {name: saved[position] for name, position in _widget_positions(node, definition).items()}
    return {name: value for name, value in values.items() if value is not None}


def _widget_positions(node: dict, definition: dict) -> dict[str, int]:
    """Where in a node's saved list each input's value is."""
    saved = node.get("widgets_values") or []
    positions: dict[str, int] = {}
    position = 0
    for name, kind, options in _declared_inputs(definition):
        if not _is_widget(kind, options) or position >= len(saved):
            continue
        positions[name] = position
        position += 1
        if _has_control(name, kind, options) and position < len(saved) and saved[position] in CONTROL_VALUES:
            position += 1
        if options.get("image_upload") and position < len(saved) and saved[position] == "image":
            position += 1
    return positions


def _has_control(name: str, kind: object, options: dict) -> bool:
    return kind == "INT" and (options.get("control_after_generate", False) or name in ("seed", "noise_seed"))


def _linked_inputs(node: dict, links: dict, nodes: dict) -> dict:
    inputs = {}
    for slot in node.get("inputs", []):
        source = _source(slot.get("link"), links, nodes, slot.get("type"))
        if source is not None:
            inputs[slot["name"]] = source
    return inputs


def _source(link: int | None, links: dict, nodes: dict, kind: object) -> list | None:
    while link is not None:
        origin, slot = links[link]
        node = nodes[origin]
        if node.get("mode") == MUTED:
            return None
        if node["type"] != "Reroute" and node.get("mode") != BYPASSED:
            return [str(origin), slot]
        inputs = node.get("inputs", [])
        matching = inputs if node["type"] == "Reroute" else [i for i in inputs if i.get("type") == kind]
        link = matching[0].get("link") if matching else None
    return None


def _combo_options(definition: dict) -> dict[str, list]:
    options = {}
    for name, kind, extra in _declared_inputs(definition):
        if isinstance(kind, list):
            options[name] = kind
        elif kind == "COMBO":
            options[name] = extra.get("options", [])
    return options
