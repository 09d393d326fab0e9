"""Guards that the page's setting puts into every prompt: what they do, and what stays as it was."""

from __future__ import annotations

import io
import json

import pytest
from comfy_execution.graph import DynamicPrompt
from execution import PromptExecutor
from halfsafe.nodes.host.guard import watch
from halfsafe.nodes.host.guard.watch import ASKED_BY, watched
from PIL import Image
from setup.comfyui_server import Server
from support.guarded_runs import brightness, graph, picture, told
from support.measures import functions_run


@pytest.fixture(autouse=True)
def own_prompts(monkeypatch) -> None:
    """What the first guarded prompt replaces in ComfyUI's prompts is put back after a test."""
    monkeypatch.setattr(DynamicPrompt, "get_original_prompt", DynamicPrompt.get_original_prompt)


def with_guards(prompt: dict) -> dict:
    return watched({"prompt": prompt, "extra_data": {ASKED_BY: "report"}})["prompt"]


def as_asked(prompt: dict) -> dict:
    return DynamicPrompt(prompt).get_original_prompt()


def unguarded(seed: int = 1) -> dict:
    prompt = graph("retry_higher", seed=seed)
    prompt["6"]["inputs"]["model"] = ["1", 0]
    del prompt["9"], prompt["10"]
    return prompt


def metadata(png: bytes) -> dict:
    """The nodes in a picture, without what ComfyUI's own executor writes into them: a node's fingerprint."""
    nodes = json.loads(Image.open(io.BytesIO(png)).text["prompt"])
    for held in nodes.values():
        held.pop("is_changed", None)
    return nodes


def test_every_run_is_guarded_and_pictures_are_as_asked(running: Server) -> None:
    prompt = unguarded(seed=41)
    events, entry = told(running, prompt, {ASKED_BY: "retry_higher"})
    assert [event["kind"] for event in events] == ["event", "verdict"] and events[0]["verdict"] == "recovered"
    png = picture(running, entry)
    assert max(brightness(png)) > 4
    assert metadata(png) == prompt
    assert {"halfsafe_1_0", "halfsafe_3_0"} < {*entry["prompt"][2]}, "the history tells what ran"


def test_the_setting_of_an_open_page_guards_what_that_page_queues(running: Server) -> None:
    for page, setting, seed, guarded in (
        ("page", "report", 45, True),
        ("another", "off", 46, True),
        ("page", "off", 47, False),
    ):
        events, _ = told(running, unguarded(seed=seed), settings={page: setting})
        assert bool(events) is guarded


def test_what_ran_already_is_cached_and_off_leaves_the_prompt_alone(running: Server) -> None:
    for _ in range(2):
        _, again = told(running, unguarded(seed=42), {ASKED_BY: "retry_higher"})
    cached = next(detail["nodes"] for name, detail in again["status"]["messages"] if name == "execution_cached")
    assert {"1", "6", "7", "8", "halfsafe_1_0"} <= {*cached}
    prompt = unguarded(seed=43)
    events, entry = told(running, prompt)
    png = picture(running, entry)
    assert not events and max(brightness(png)) <= 4
    assert metadata(png) == prompt


@pytest.mark.parametrize("asked", [{}, {ASKED_BY: "off"}, {ASKED_BY: "nonsense"}, {ASKED_BY: None}])
def test_a_prompt_that_asks_for_nothing_is_left_alone(comfy, asked: dict) -> None:
    before = PromptExecutor.execute_async, DynamicPrompt.get_original_prompt
    request = {"prompt": unguarded(), "client_id": "nobody", "extra_data": asked}
    assert watched(request) is request
    assert (PromptExecutor.execute_async, DynamicPrompt.get_original_prompt) == before
    assert {method.__module__ for method in before} == {"execution", "comfy_execution.graph"}


def test_a_node_that_is_called_as_a_guard_is_not_taken_for_one(comfy) -> None:
    prompt = unguarded()
    prompt["halfsafe_9_0"] = {"class_type": "HalfsafeNaNGuard", "inputs": {"model": ["1", 0]}}
    prompt["halfsafe_loader"] = {"class_type": "VAELoader", "inputs": {"vae_name": "a", "of": [["1", 0], 0]}}
    assert as_asked(with_guards(prompt)) == prompt != with_guards(prompt)
    assert as_asked(prompt) == prompt


@pytest.mark.parametrize("cls", ["KSampler", "HalfsafeNaNGuard", "HalfsafeReport"])
def test_a_node_of_the_users_is_never_replaced_because_of_its_id(comfy, cls: str) -> None:
    prompt = unguarded()
    own = {name: {"class_type": cls, "inputs": {"model": ["1", 0]}} for name in ("halfsafe_1_0", "halfsafe_1_00")}
    prompt["1"] = {"class_type": "UNETLoader", "inputs": {"unet_name": "a", "weight_dtype": "default"}}
    prompt["20"] = {"class_type": "KSampler", "inputs": {"model": ["1", 0]}}
    guarded = with_guards(prompt | own)
    assert {name: guarded[name]["class_type"] for name in own} == dict.fromkeys(own, cls)
    assert (
        guarded["20"]["inputs"]["model"] == ["halfsafe_1_000", 0]
        and guarded["halfsafe_1_000"]["class_type"] == "HalfsafeNaNGuard"
    )
    assert as_asked(guarded) == prompt | own


def test_report_only_tells(running: Server) -> None:
    events, entry = told(running, unguarded(seed=44), {ASKED_BY: "report"})
    assert events and max(brightness(picture(running, entry))) <= 4


def test_guards_stand_where_models_and_vaes_are_used_up_and_never_twice(comfy) -> None:
    prompt = unguarded()
    prompt["11"] = {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"model": ["1", 0], "lora_name": "a", "strength_model": 1.0},
    }
    prompt["6"]["inputs"]["model"] = ["11", 0]
    guarded = with_guards(prompt)
    assert guarded["6"]["inputs"]["model"] == ["halfsafe_11_0", 0] and guarded["11"] == prompt["11"]
    assert guarded["7"]["inputs"]["vae"] == ["halfsafe_3_0", 0]
    assert with_guards(guarded) == guarded


def merges(links) -> dict:
    """60 nodes that make a model of models, those the nodes that ``links`` gives for a number, and a sampler behind each."""
    prompt = {"0": {"class_type": "UNETLoader", "inputs": {"unet_name": "a", "weight_dtype": "default"}}}
    for number in range(1, 61):
        inputs = {f"model{place}": [str(node), 0] for place, node in enumerate(links(number), 1)}
        prompt[str(number)] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
        prompt[f"s{number}"] = {"class_type": "KSampler", "inputs": {"model": [str(number), 0]}}
    return prompt


@pytest.mark.parametrize(
    ("links", "reached"),
    [
        (lambda n: (n - 1, n - 1), True), (lambda n: (n - 1, max(0, n - 2)), True), (range, True),
        (lambda n: range(61), True), (lambda n: (n % 60 + 1, n), False),
    ],
    ids=["twice", "the two before", "all before", "all", "a circle"],
)  # fmt: skip
def test_a_graph_of_60_merges_with_any_links_is_looked_at_at_once(comfy, monkeypatch, links, reached: bool) -> None:
    monkeypatch.setitem(watch.nodes.NODE_CLASS_MAPPINGS, "HalfsafeNaNGuard", comfy.nodes["HalfsafeNaNGuard"])
    prompt = merges(links)
    guarded = {}
    run = functions_run(lambda: guarded.update(with_guards(prompt)))
    assert run.total() < 1_000_000, "2 to the 60 paths would be walked one by one"
    assert sum(name.startswith("halfsafe_") for name in guarded) == 60
    prompt["0"] = {"class_type": "HalfsafeNaNGuard", "inputs": {"model": ["60", 0]}}
    assert (with_guards(prompt) == prompt) is reached, "what comes after a guard is guarded"
