"""The guard in a running ComfyUI: prompts that fail or are rescued, and what the page is told meanwhile."""

from __future__ import annotations

import json

from halfsafe.precision.guard.verdicts import VERDICTS
from safetensors.torch import load_file, save_file
from setup.comfyui_server import Server, error_text
from setup.workflow import node
from support import tiny_models
from support.guarded_runs import brightness, graph, picture, told


def test_without_the_guard_the_picture_is_black(running: Server) -> None:
    prompt = graph("retry_higher")
    prompt["6"]["inputs"]["model"] = prompt["10"]["inputs"]["model"] = ["1", 0]
    del prompt["9"]
    events, entry = told(running, prompt)
    assert not events
    assert max(brightness(picture(running, entry))) <= 4, "nothing but PNG's row filters"


def test_retry_higher_gives_the_picture_and_tells_the_page(running: Server) -> None:
    events, entry = told(running, graph("retry_higher"))
    assert max(brightness(picture(running, entry))) > 4
    assert [event["kind"] for event in events] == ["event", "verdict"]
    first, last = events
    assert first["node_id"] == last["node_id"] == "9"
    assert first["prompt_id"] == last["prompt_id"]
    assert first["verdict"] == last["verdict"] == "recovered"
    assert first["event"]["layer"] == "blocks.0.ffn.2" and first["event"]["to"] == "fp16_wide"
    assert "blocks.0.ffn.2" in first["message"] and last["event"] is None
    (report,) = entry["outputs"]["10"]["halfsafe_report"]
    assert json.loads(report)["guard"]["verdict"] == "recovered"


def test_the_next_prompt_starts_wide_and_says_so(running: Server) -> None:
    told(running, graph("retry_higher"))
    events, entry = told(running, graph("retry_higher", seed=2))
    (event,) = events
    assert (event["kind"], event["verdict"]) == ("verdict", "clean")
    assert event["message"] == "Started as the last repair ended, with these in a higher precision: residual stream."
    assert max(brightness(picture(running, entry))) > 4


def test_stop_ends_the_prompt_with_the_layer_and_the_next_prompt_runs(running: Server) -> None:
    events, entry = told(running, graph("stop", seed=3))
    assert entry["status"]["status_str"] == "error"
    text = error_text(entry)
    assert text.startswith("KSampler: Step 0")
    for part in ("blocks.0.ffn.2", "fp16", "Verdict: stopped", "retry_higher"):
        assert part in text
    assert [(event["kind"], event["verdict"]) for event in events] == [("event", "stopped"), ("verdict", "stopped")]
    assert max(brightness(picture(running, told(running, graph("retry_higher", seed=4))[1]))) > 4


def test_a_clean_model_is_not_mentioned(running: Server) -> None:
    events, entry = told(running, graph("stop", model="wan.safetensors"))
    assert not events
    assert max(brightness(picture(running, entry))) > 4


def test_the_report_tells_what_the_guard_of_the_vae_saw_in_its_prompt(running: Server, small_models) -> None:
    path = tiny_models.wan_vae(small_models / "vae" / "overflowing_vae.safetensors")
    tensors = load_file(str(path))
    tensors["decoder.middle.0.residual.6.weight"] *= 2e5
    save_file(tensors, str(path))
    prompt = graph("retry_higher", seed=7)
    prompt["3"] = node("HalfsafeLoadVAE", vae_name=path.name, dtype="fp16")
    prompt["11"] = node("HalfsafeGuardVAE", vae=["3", 0], on_nan="retry_higher")
    prompt["7"]["inputs"]["vae"] = ["11", 0]
    prompt["10"]["inputs"]["after"] = ["7", 0]
    for seed in (7, 8):
        prompt["6"]["inputs"]["seed"] = seed
        events, entry = told(running, prompt)
        (report,) = entry["outputs"]["10"]["halfsafe_report"]
        (encoder,) = json.loads(report)["encoders"]
        for judged in (*events, encoder, json.loads(report)["guard"]):
            assert judged["about"] == VERDICTS[judged["verdict"]].shown(), "what the page decides by comes along"
        assert (encoder["node"], encoder["kind"], encoder["verdict"]) == ("11", "VAE", "recovered")
        assert len(encoder["messages"]) == 1 and "VAE decode" in encoder["messages"][0], "of this prompt alone"
    prompt["3"]["inputs"]["dtype"] = "fp32"
    _, entry = told(running, prompt)
    (report,) = entry["outputs"]["10"]["halfsafe_report"]
    (encoder,) = json.loads(report)["encoders"]
    assert encoder == {
        "node": "11",
        "kind": "VAE",
        "verdict": "clean",
        "messages": [],
        "advice": "",
        "calls": 1,
        "about": VERDICTS["clean"].shown(),
    }
