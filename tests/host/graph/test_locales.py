"""Names and help: every node, input and output has its words in each language, and English says what the schema says."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[3]
TOOLTIP = 160
LANGUAGES = sorted(path.name for path in (ROOT / "locales").iterdir())


def schema_words(node):
    schema = node.GET_SCHEMA()
    return {
        "display_name": schema.display_name,
        "description": schema.description,
        "inputs": {item.id: {"name": item.display_name or item.id, "tooltip": item.tooltip} for item in schema.inputs},
        "outputs": {str(i): {"name": o.display_name or o.get_io_type()} for i, o in enumerate(schema.outputs)},
    }


def shape(words):
    return {key: shape(value) for key, value in words.items()} if isinstance(words, dict) else bool(words)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_word_is_there(comfy, language):
    words = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    expected = {node_id: schema_words(node) for node_id, node in comfy.nodes.items()}
    assert shape(words) == shape(expected)
    if language == "en":
        assert words == expected


def test_a_tooltip_is_short(comfy):
    """What is longer belongs on the help page: 160 characters are eight lines in Nodes 2.0."""
    for language in LANGUAGES:
        words = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
        inputs = [
            (node, name, found["tooltip"]) for node, entry in words.items() for name, found in entry["inputs"].items()
        ]
        assert [(node, name, len(text)) for node, name, text in inputs if len(text) > TOOLTIP] == [], language


def test_fp8_finds_what_makes_it_and_nothing_else(comfy):
    schemas = [node.GET_SCHEMA() for node in comfy.nodes.values()]
    found = {
        schema.node_id
        for schema in schemas
        if any("fp8" in text for text in (schema.display_name, *schema.search_aliases))
    }
    makes = {
        schema.node_id for schema in schemas if any(item.id in ("storage", "clip_storage") for item in schema.inputs)
    }
    assert found == makes
    first = next(schema for schema in schemas if schema.node_id == "HalfsafeLoadDiffusionModel")
    assert {"oom", "out of memory", "fp8 loader"} <= {*first.search_aliases}


def test_english_names_the_settings_of_the_page():
    words = json.loads((ROOT / "locales" / "en" / "settings.json").read_text(encoding="utf-8"))
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "web").glob("*.*js"))
    assert words and all(key.replace("_", ".") in page for key in words)


def test_every_node_has_a_help_page_that_names_its_inputs_and_aliases_people_type(comfy):
    for node_id, node in comfy.nodes.items():
        page = (ROOT / "web" / "docs" / f"{node_id}.md").read_text(encoding="utf-8")
        schema = node.GET_SCHEMA()
        assert all(item.id in page for item in schema.inputs), node_id
        assert all(item.tooltip for item in schema.inputs), node_id
        assert len(schema.search_aliases) >= 4, node_id
