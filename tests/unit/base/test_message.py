"""A message is a text that keeps what it is made of, for a page that words it in its own language."""

import copy
import json
import pickle

import pytest
from halfsafe.precision.base.errors import CheckpointError, HalfsafeError
from halfsafe.precision.base.message import Message, ended, joined, messages_in

INNER = Message("in {0}", "fp32")
WHOLE = Message("{0} runs {1}", "blocks.0", INNER)


def test_a_message_is_its_text_wherever_a_text_is_taken():
    assert WHOLE == "blocks.0 runs in fp32" and hash(WHOLE) == hash("blocks.0 runs in fp32")
    assert json.loads(json.dumps({WHOLE: [WHOLE]})) == {"blocks.0 runs in fp32": ["blocks.0 runs in fp32"]}
    assert f"{WHOLE}." == "blocks.0 runs in fp32."


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, str, lambda message: pickle.loads(pickle.dumps(message))])
def test_a_copy_keeps_the_template(copied):
    message = copied(Message("'{0}' in {place}", "{a}", place="{b}"))
    assert message == "'{a}' in {b}" and message.template == "'{0}' in {place}"


def test_the_text_of_an_error_keeps_the_template():
    error = CheckpointError("a.safetensors", Message("only {0} bytes long", 3), "w", "Check the path.")
    assert str(error) == "a.safetensors: tensor 'w': only 3 bytes long. Check the path."
    found = messages_in(str(error))
    assert found["only 3 bytes long"] == {"template": "only {0} bytes long", "values": {"0": 3}}
    problem = "a.safetensors: tensor 'w': only 3 bytes long."
    assert found[str(error)]["values"] == {"problem": problem, "advice": "Check the path."}
    assert found[problem]["values"]["file"] == "a.safetensors"
    assert str(Message("{0}, but {1}", "int8", ValueError(INNER))) == "int8, but in fp32"
    assert INNER in messages_in([Message("{0}, but {1}", "int8", ValueError(INNER))])
    assert str(HalfsafeError("No model.")) == "No model."


def test_the_messages_of_nested_data_are_found_with_those_they_are_made_of():
    data = {"layers": [{"reason": WHOLE, "name": "blocks.0"}], "notes": (INNER,), "calls": 3, "none": None}
    assert messages_in(data) == {
        "blocks.0 runs in fp32": {"template": "{0} runs {1}", "values": {"0": "blocks.0", "1": "in fp32"}},
        "in fp32": {"template": "in {0}", "values": {"0": "fp32"}},
    }


def test_texts_are_joined_without_the_empty_ones():
    assert joined([]) == joined(["", ""]) == "" and joined(["", WHOLE]) is WHOLE
    text = joined(["a", "", INNER, "b"], "; ")
    assert text == "a; in fp32; b" and messages_in(text)["a; in fp32"]["template"] == "{0}; {1}"


def test_joined_sentences_are_known_apart():
    """The page shows the first ones large: it does not look for where a sentence ends."""
    first, whole = Message("{0} layers.", 3), "Version 2.0 has it, e.g. ComfyUI 0.30. Update!"
    told = joined([joined(["", first]), joined([whole, "Then run."]), Message("{0}.", INNER)])
    assert told.sentences == (first, whole, "Then run.", "in fp32.")
    assert messages_in(told)[told]["sentences"] == [*told.sentences]
    assert "sentences" not in messages_in(first)[first] and joined([first]) is first
    assert not joined(["a", "b"], ", ").sentences and joined(["a.", "b."], "\n").sentences == ("a.", "b.")
    assert pickle.loads(pickle.dumps(told)).sentences == copy.deepcopy(told).sentences == told.sentences


def test_what_an_empty_value_leaves_at_an_end_is_removed():
    assert Message("{0} {1}", "", "b") == "b" and Message("{0} {1}", "a", "") == "a"


@pytest.mark.parametrize("value", ["No model.", Message("No {0}.", "model")])
def test_a_message_that_is_one_of_its_values_is_not_made_of_itself(value):
    """The page words what a message is made of: it would never end."""
    found = messages_in([str(HalfsafeError(value)), Message("{0} {1}", "", value)])
    assert all(text not in message["values"].values() for text, message in found.items())
    assert found == messages_in(value)


def test_a_sentence_ends_once():
    assert ended("No model.") == "No model." and messages_in(ended("No model.")) == {}
    assert ended(INNER) == "in fp32." and messages_in(ended(INNER))["in fp32."] == {
        "template": "{0}.",
        "values": {"0": "in fp32"},
    }
