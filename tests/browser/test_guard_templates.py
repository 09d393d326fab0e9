"""Guard this workflow and Measure my card on ComfyUI's own workflow templates: one with each kind of link, undrawn, and some where nodes are drawn as elements."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage
from browser.graph_walk import WALK, faults_of
from browser.templates import each_kind, links_in, templates
from setup.comfyui_server import Server

DRAWN = (
    "01_get_started_text_to_image", "3d_hunyuan3d_multiview_to_model", "audio_ace_step1_5_xl_turbo", "audio_stable_audio_3_medium", "flux_redux_model_example",
    "hidream_e1_1", "image_flux2_klein_9b_kv_image_edit", "image_flux2_klein_image_edit_9b_base", "image_lens_t2i", "image_netayume_lumina_t2i",
    "image_qwen_image_edit_2511", "image_z_image_turbo_int8", "llm_qwen3_5_text_gen", "sd3.5_large_depth", "sdxl_simple_example", "templates-6-key-frames",
    "video_hunyuan_video_1.5_720p_t2v", "video_minimax_h3_t2v", "video_wan2_2_14B_fun_camera", "video_ltx2_t2v",
)  # fmt: skip
"""Templates of each family and kind of sampler; among them those that had a lost link, a node on another or where nothing runs, and the VAE of sound guarded alone."""
AT_ONCE = 20
EACH_TIME = 40
"""How many of the templates that have each kind of link are tried each time: those with most kinds for their size. Before a release all are."""
NO_OUTPUTS = {"": ["Prompt has no outputs"]}


def check(found: dict[str, dict], server: Server, info: dict) -> None:
    """Hold what was found in templates to the rules, and each prompt to ComfyUI's own check: it finds nothing that it did not find before."""
    faults = {name: list(faults_of(one, info)) for name, one in found.items()}
    for start in range(0, len(found), AT_ONCE):
        part = dict(list(found.items())[start : start + AT_ONCE])
        before, *others = (
            server.post("/prompt_checks", [one[kind] for one in part.values()])["errors"]
            for kind in ("before", "guarded", "measured")
        )
        for errors in others:
            for name, was, now in zip(part, before, errors, strict=True):
                faults[name] += [f"refused: {now}"] if now != was != NO_OUTPUTS else []
    assert {name: wrong for name, wrong in faults.items() if wrong} == {}


@pytest.mark.parametrize(("server", "vue"), [("pinned", "canvas")], indirect=True)
def test_templates_with_each_kind_of_link_are_guarded_and_measured(unseen: ComfyPage, info: dict) -> None:
    every = templates(info)
    chosen = dict(list(each_kind(every, links_in).items())[: None if os.environ.get("HALFSAFE_RELEASE") else EACH_TIME])
    linked = {link for workflow in chosen.values() for link in links_in(workflow)}
    assert len(every) > 200 and len({link for workflow in every.values() for link in links_in(workflow)}) > 200
    found = {name: unseen.evaluate(WALK, workflow) for name, workflow in chosen.items()}
    assert unseen.problems == []
    check(found, unseen.server, info)
    assert len(linked) > 0.8 * len({link for workflow in every.values() for link in links_in(workflow)}), len(linked)
    assert sum(bool(one["guards"]) for one in found.values()) > 0.98 * len(found)
    assert sum(bool(one["measures"]) for one in found.values()) > 0.8 * len(found), (
        "the others sample nothing: of text, masks and poses"
    )


@pytest.mark.parametrize(
    ("server", "vue", "part"),
    [
        ("pinned", "nodes2", 0),
        ("newest", "nodes2", 1),
        pytest.param("pinned", "nodes2", 2, marks=pytest.mark.release),
        pytest.param("newest", "nodes2", 3, marks=pytest.mark.release),
    ],
    indirect=["server", "vue"],
)
def test_templates_are_guarded_and_measured_where_they_are_drawn(
    comfy: ComfyPage, info: dict, part: int, pictures: Path, cell: str
) -> None:
    """A quarter of the templates in each page, and before a release all of them."""
    chosen = templates(info)
    found = {name: comfy.evaluate(WALK, chosen[name]) for name in DRAWN[part::4]}
    check(found, comfy.server, info)
    for name in ("guard", "measure"):
        comfy.evaluate(
            "(name) => import(`/extensions/Halfsafe-Pack/${name}.mjs`).then((made) => made[`${name}Workflow`](app))",
            name,
        )
        comfy.screenshot(pictures, f"template-{name}-{cell}")
