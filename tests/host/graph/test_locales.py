"""Names and help: every node, input and output has its words in each language, and English says what the schema says."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[3]
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


def test_english_names_the_settings_of_the_page():
    words = json.loads((ROOT / "locales" / "en" / "settings.json").read_text(encoding="utf-8"))
    page = (ROOT / "web" / "main.js").read_text(encoding="utf-8")
    assert words and all(key.replace("_", ".") in page for key in words)


def test_every_node_has_a_help_page_that_names_its_inputs_and_aliases_people_type(comfy):
    for node_id, node in comfy.nodes.items():
        page = (ROOT / "web" / "docs" / f"{node_id}.md").read_text(encoding="utf-8")
        schema = node.GET_SCHEMA()
        assert all(item.id in page for item in schema.inputs), node_id
        assert all(item.tooltip for item in schema.inputs), node_id
        assert len(schema.search_aliases) >= 4, node_id
