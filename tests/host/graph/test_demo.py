"""The page that `scripts/demo.py --serve` leaves open: its templates run as they are."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from urllib.parse import quote

import demo
import pytest
from setup.comfyui_server import PACK_NAME, Server, make_base_directory
from setup.environment import Environment
from setup.workflow import substitute_files, to_prompt

ROOT = Path(__file__).absolute().parents[3]


@pytest.fixture(scope="module")
def stage(comfyui_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """A running demo, up to where its page is left open; that one is seen as a user who ends it at once sees it."""
    environment = Environment(Path(sys.executable), comfyui_dir)
    base = make_base_directory(tmp_path_factory.mktemp("demo"), ROOT, copied=True)
    files = demo._provide_models(environment, base, dict.fromkeys(demo.MODELS))
    with Server(comfyui_dir, base) as server:
        stage = demo.Stage(server, environment, argparse.Namespace(model=None, prompt=None), files)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.process, "wait", lambda: None)
            demo._serve(stage, base)
        yield stage


def served(stage: demo.Stage, name: str) -> dict:
    return json.loads(stage.server.get(f"/api/workflow_templates/{PACK_NAME}/{quote(name)}.json"))


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "workflows").glob("Halfsafe [0-9]*.json")))
def test_every_template_names_files_that_are_there(stage: demo.Stage, name: str) -> None:
    info = stage.server.object_info()
    prompt = to_prompt(served(stage, name), info)
    assert substitute_files(prompt, info, lambda *_: None) == prompt
    assert any("blue star" in str(node["inputs"].get("text")) for node in prompt.values())
    shipped = json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
    assert "wan2.1" in json.dumps(shipped["nodes"][1:]) and "wan2.1" not in json.dumps([node["inputs"] for node in prompt.values()])


def test_a_template_runs_as_it_is(stage: demo.Stage) -> None:
    prompt = to_prompt(served(stage, "Halfsafe 3 - Half the memory"), stage.server.object_info())
    assert any("images" in output for output in stage.server.prompt(prompt).values())
