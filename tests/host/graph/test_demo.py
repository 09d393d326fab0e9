"""What `scripts/demo.py` prints, and the page that `--serve` leaves open: its templates run as they are."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from unittest.mock import MagicMock
from urllib.parse import quote

import demo
import pytest
from setup import progress
from setup.comfyui_server import PACK_NAME, Server, make_base_directory
from setup.environment import Environment
from setup.workflow import substitute_files, to_prompt

ROOT = Path(__file__).absolute().parents[3]


@pytest.fixture(scope="module")
def stage(comfyui_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """A running demo that has told its page's address and drawn nothing yet."""
    environment = Environment(Path(sys.executable), comfyui_dir)
    base = make_base_directory(tmp_path_factory.mktemp("demo"), ROOT, copied=True)
    files = demo._provide_models(environment, base, dict.fromkeys(demo.MODELS))
    with Server(comfyui_dir, base) as server:
        options = argparse.Namespace(
            model=None, prompt=None, installed=False, output=tmp_path_factory.mktemp("results")
        )
        stage = demo.Stage(server, environment, options, files)
        demo._open(stage, base)
        yield stage


def served(stage: demo.Stage, name: str) -> dict:
    return json.loads(stage.server.get(f"/api/workflow_templates/{PACK_NAME}/{quote(name)}.json"))


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "workflows").glob(demo.FILLED)))
def test_every_template_names_files_that_are_there(stage: demo.Stage, name: str) -> None:
    info = stage.server.object_info()
    prompt = to_prompt(served(stage, name), info)
    assert substitute_files(prompt, info, lambda *_: None) == prompt
    shipped = json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
    if "halfsafe_example" in json.dumps(shipped):
        assert to_prompt(shipped, info) == prompt
        return
    assert any("blue star" in str(node["inputs"].get("text")) for node in prompt.values())
    assert "wan2.1" in json.dumps(shipped["nodes"][1:]) and "wan2.1" not in json.dumps(
        [node["inputs"] for node in prompt.values()]
    )


def test_a_template_runs_as_it_is(stage: demo.Stage) -> None:
    prompt = to_prompt(served(stage, "Halfsafe 3 - Half the memory"), stage.server.object_info())
    assert any("images" in output for output in stage.server.prompt(prompt).values())


def test_the_result_is_said_first_and_the_layers_are_in_the_report_file(
    stage: demo.Stage, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.1)
    assert demo._show(stage)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ... ")
    ]  # those that time prints
    told = [line for line in lines if not line.startswith(("Running", "  done"))]
    assert [line.split()[:2] for line in told[1:6]] == [
        ["It", "works:"], ["picture.png", "a"], ["fp16.png", "black"], ["fp16_guarded.png", "a"], ["fp16_safe.png", "a"],
    ]  # fmt: skip
    assert len(lines) <= 20 and not any("double_blocks" in line for line in lines)
    assert "double_blocks" in (stage.options.output / "report.txt").read_text(encoding="utf-8")


def test_the_address_is_told_before_anything_is_drawn(
    monkeypatch: pytest.MonkeyPatch, stage: demo.Stage, tmp_path: Path
) -> None:
    done = []
    monkeypatch.setattr(demo, "_provide_models", lambda *_: stage.files)
    monkeypatch.setattr(demo, "accelerator", lambda _: "cpu")
    server = MagicMock()
    server.process.wait.side_effect = lambda: done.append("wait")
    monkeypatch.setattr(demo, "Server", lambda *_, **__: server)
    for name in ("_open", "_show"):
        monkeypatch.setattr(demo, name, lambda *_, name=name: done.append(name) or True)
    options = argparse.Namespace(model=None, clip=None, vae=None, serve=True, installed=False, output=tmp_path)
    assert demo._demo(options, stage.environment) == 0 and done == ["_open", "_show", "wait"]
