"""The pack inside a running ComfyUI."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from setup.comfyui_server import Server, ServerError
from setup.workflow import node
from support import control_files

ROOT = Path(__file__).absolute().parents[3]


def stock_graph() -> dict:
    """A text-to-image prompt of stock nodes alone."""
    sampled = {
        "model": ["1", 0],
        "positive": ["4", 0],
        "negative": ["4", 0],
        "latent_image": ["5", 0],
        "seed": 1,
        "steps": 2,
        "cfg": 3.0,
    }
    return {
        "1": node("UNETLoader", unet_name="wan.safetensors", weight_dtype="default"),
        "2": node("CLIPLoader", clip_name="clip_l.safetensors", type="sd3"),
        "3": node("VAELoader", vae_name="wan_vae.safetensors"),
        "4": node("CLIPTextEncode", clip=["2", 0], text="a lighthouse"),
        "5": node("EmptyHunyuanLatentVideo", width=64, height=64, length=1, batch_size=1),
        "6": node("KSampler", **sampled, sampler_name="euler", scheduler="simple", denoise=1.0),
        "7": node("VAEDecode", samples=["6", 0], vae=["3", 0]),
        "8": node("SaveImage", images=["7", 0], filename_prefix="stock"),
    }


def test_the_pack_imports_without_a_failure(server: Server) -> None:
    log, ready, _ = server.log().partition("To see the GUI go to")
    assert ready and "Halfsafe-Pack" in log, "ComfyUI did not see the pack"
    assert not re.search(r"IMPORT FAILED|Cannot import|Traceback", log), log


def test_workflows_are_served_as_templates(server):
    """ComfyUI serves one folder of a pack: with one named `example` or `examples` beside it, it would not be `workflows`."""
    (pack, names), *_ = [
        item for item in json.loads(server.get("/workflow_templates")).items() if "Halfsafe" in item[0]
    ]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    for name in names:
        assert "nodes" in json.loads(server.get(f"/api/workflow_templates/{pack}/{quote(name)}.json"))
        assert server.get(f"/api/workflow_templates/{pack}/{quote(name)}.jpg")[:2] == b"\xff\xd8"


def test_the_block_is_listed_by_comfyui_and_its_nodes_and_links_are_valid(server: Server) -> None:
    """A block of `subgraphs/` is what the page's node library offers; each of its nodes is one that ComfyUI has, each link joins two slots of one type."""
    info = server.object_info()
    listed = {
        key: entry
        for key, entry in json.loads(server.get("/global_subgraphs")).items()
        if "Halfsafe" in entry["info"]["node_pack"]
    }
    assert {entry["name"] for entry in listed.values()} == {
        path.stem for path in (ROOT / "subgraphs").glob("*.json")
    } and listed
    for key in listed:
        data = json.loads(json.loads(server.get(f"/global_subgraphs/{key}"))["data"])
        (shown,), (inner,) = data["nodes"], data["definitions"]["subgraphs"]
        nodes = {node["id"]: node for node in inner["nodes"]}
        assert shown["type"] == inner["id"]
        assert [[port["name"], port["type"]] for port in shown["inputs"]] == [
            [port["name"], port["type"]] for port in inner["inputs"]
        ]
        assert [[port["name"], port["type"]] for port in shown["outputs"]] == [
            [port["name"], port["type"]] for port in inner["outputs"]
        ]
        for entry in nodes.values():
            declared = {**info[entry["type"]]["input"]["required"], **info[entry["type"]]["input"].get("optional", {})}
            assert {end["name"]: end["type"] for end in entry["inputs"]}.items() <= {
                name: kinds[0] for name, kinds in declared.items()
            }.items()
            assert [end["type"] for end in entry["outputs"]] == info[entry["type"]]["output"]
            slots = {end["name"] for end in entry["inputs"] if "widget" not in end}
            widgets = [name for name in declared if name not in slots]
            options = {
                name: declared[name][1].get("options", declared[name][0]) for name in widgets if name != "model_name"
            }
            assert [
                name
                for name, value in zip(widgets, entry["widgets_values"], strict=False)
                if name in options and value not in options[name]
            ] == []
        assert "proxyWidgets" not in shown["properties"], "a page that gives the nodes inside other ids finds no widget"
        for link in inner["links"]:
            begin = inner["inputs"] if link["origin_id"] == -10 else nodes[link["origin_id"]]["outputs"]
            end = inner["outputs"] if link["target_id"] == -20 else nodes[link["target_id"]]["inputs"]
            one, other = begin[link["origin_slot"]], end[link["target_slot"]]
            assert one["type"] == other["type"] == link["type"]
            assert link["id"] in (one.get("links") or one.get("linkIds")) and link["id"] in (
                other.get("linkIds") or [other.get("link")]
            )
        assert [end["name"] for entry in nodes.values() for end in entry["inputs"] if end["link"] is None] == [
            "rules",
            "rules",
        ]


def reported(outputs: dict) -> dict:
    return json.loads(outputs["10"]["halfsafe_report"][0])


def test_a_check_finds_a_stale_step_cache_and_a_cached_prompt_still_tells_it(server: Server) -> None:
    graph = stock_graph()
    graph["20"] = node(
        "EasyCache", model=["1", 0], reuse_threshold=3.0, start_percent=0.0, end_percent=1.0, verbose=False
    )
    graph["9"] = node("HalfsafeNaNGuard", model=["20", 0], on_nan="retry_higher", max_retries=8, check="every 5th step")
    graph["10"] = node("HalfsafeReport", model=["9", 0], after=["6", 0])
    graph["6"]["inputs"] |= {"model": ["9", 0], "steps": 12, "seed": 3}
    before = len(server.log())
    guard = reported(server.prompt(graph))["guard"]
    assert [(check["step"], check["arithmetic"] == "step cache") for check in guard["checks"]] == [
        (0, False),
        (5, True),
        (10, True),
    ]
    assert [(event["kind"], event["step"], event["op"]) for event in guard["events"]] == [
        ("drift", 5, "step cache"),
        ("drift", 10, "step cache"),
    ]
    assert (guard["verdict"], guard["extra_calls"]) == ("clean", 3)
    log = server.log()[before:]
    assert log.count("Halfsafe check: step") == 3 and log.count("finite, but off") == 2
    assert reported(server.prompt(graph))["guard"] == guard
    assert server.log()[before:].count("Halfsafe check:") == 3, "nothing ran again"
    graph["9"]["inputs"]["check"] = "every step"
    with pytest.raises(ServerError, match="check: 'every step' not in"):
        server.prompt(graph)


def cached_nodes(server: Server, graph: dict) -> set[str]:
    """Run a prompt, and return the nodes whose results were kept from before."""
    status = server.wait(server.queue(graph))["status"]
    assert status["status_str"] == "success", server.log_tail()
    return {node for kind, data in status["messages"] if kind == "execution_cached" for node in data["nodes"]}


def test_a_calibration_is_kept_until_one_of_its_inputs_changes(server: Server) -> None:
    graph = {name: found for name, found in stock_graph().items() if name in "1245"}
    graph["5"]["inputs"] |= {"width": 128, "height": 128}
    graph["11"] = node("HalfsafeCalibrate", model=["1", 0], positive=["4", 0], latent_image=["5", 0], seed=1)
    graph["12"] = node(
        "HalfsafeSaveModel", model=["1", 0], filename_prefix="kept", storage="int8", calibration=["11", 0]
    )
    before = len(server.log())
    assert "11" not in cached_nodes(server, graph)
    assert {"11", "12"} <= cached_nodes(server, graph)
    graph["12"]["inputs"]["storage"] = "fp8_e4m3fn"
    assert {"11", "12"} & cached_nodes(server, graph) == {"11"}
    assert server.log()[before:].count(" layers rounded with the calibration: output error 0.") == 2
    graph["11"]["inputs"]["seed"] = 2
    assert not {"11", "12"} & cached_nodes(server, graph)


def test_a_queued_prompt_without_the_input_writes_a_card_and_one_that_switches_it_off_none(server: Server) -> None:
    graph = {"1": node("UNETLoader", unet_name="wan.safetensors", weight_dtype="default")}
    graph["2"] = node("HalfsafeSaveModel", model=["1", 0], filename_prefix="cards/queued", storage="int8")
    output = server.base / "output" / "cards"
    server.prompt(graph)
    (card,) = output.glob("*.md")
    text = card.read_text(encoding="utf-8")
    assert card.with_suffix(".safetensors").exists() and "made from `wan.safetensors`" in text
    assert str(server.base) not in text
    graph["2"]["inputs"] |= {"card": False}
    server.prompt(graph)
    assert len([*output.glob("*.safetensors")]) == 2 and [*output.glob("*.md")] == [card]


@pytest.fixture
def control_net(small_models: Path) -> Path:
    return control_files.sd15(small_models / "controlnet" / "control.safetensors")


def controlled_graph(storage: str) -> dict:
    """An SD 1.5 prompt with a ControlNet on a grey picture beside a guarded model."""
    graph = stock_graph()
    widths = {"width": 64, "height": 64, "batch_size": 1}
    graph["1"] = node("CheckpointLoaderSimple", ckpt_name="sd15_checkpoint.safetensors")
    graph["4"]["inputs"]["clip"], graph["7"]["inputs"]["vae"] = ["1", 1], ["1", 2]
    graph["5"] = node("EmptyLatentImage", **widths)
    graph["9"] = node("HalfsafeNaNGuard", model=["1", 0], on_nan="stop", max_retries=8)
    graph["12"] = node("EmptyImage", **widths, color=8421504)
    graph["13"] = node(
        "HalfsafeLoadControlNet", control_net_name="control.safetensors", storage=storage, compute="fp16_safe"
    )
    prompts = {"positive": ["4", 0], "negative": ["4", 0]}
    graph["14"] = node(
        "ControlNetApplyAdvanced",
        **prompts,
        control_net=["13", 0],
        image=["12", 0],
        strength=1.0,
        start_percent=0.0,
        end_percent=1.0,
    )
    graph["6"]["inputs"] |= {"model": ["9", 0], "positive": ["14", 0], "negative": ["14", 1]}
    graph["10"] = node("HalfsafeReport", model=["9", 0], after=["6", 0])
    del graph["2"], graph["3"]
    return graph


def test_a_control_net_beside_a_guard_is_loaded_anew_once_its_file_changes(server: Server, control_net: Path) -> None:
    pixels = []
    graph = controlled_graph("fp8_e4m3fn")
    for factor in (1, 3):
        tensors = load_file(control_net)
        save_file(
            {name: value * factor if name.startswith("zero_convs") else value for name, value in tensors.items()},
            control_net,
        )
        before = len(server.log())
        for _ in range(2):
            outputs = server.prompt(graph)
            report = reported(outputs)
            (control,) = report["control_nets"]
            assert (control["file"], control["calls"], control["decisions"]["compute"]) == (
                "control.safetensors",
                2,
                "fp16_safe",
            )
            modes = {layer["mode"] for layer in control["layers"] if layer["storage"] == "fp8_e4m3fn"}
            assert modes and modes <= {"fp16", "fp16_wide"} and report["guard"]["verdict"] == "clean"
        assert server.log()[before:].count("control.safetensors: storage fp8_e4m3fn; compute fp16_safe") == 1
        pixels.append(Image.open(io.BytesIO(server.view(outputs["8"]["images"][0]))).tobytes())
    assert pixels[0] != pixels[1]
