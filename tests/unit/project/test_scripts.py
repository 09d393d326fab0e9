"""The scripts that set up, start and drive ComfyUI, without one."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from setup import environment
from setup.comfyui_server import Server, ServerError, link_pack
from setup.workflow import WorkflowError, small_file, substitute_files, to_prompt, written_back

ROOT = Path(__file__).absolute().parents[3]


def make_comfyui(folder: Path) -> Path:
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    return folder


def test_explicit_comfyui_wins_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_DIR", str(make_comfyui(tmp_path / "from variable")))
    assert environment.find_comfyui(make_comfyui(tmp_path / "explicit")) == tmp_path / "explicit"
    assert environment.find_comfyui() == tmp_path / "from variable"


def test_folder_without_comfyui_is_refused(tmp_path: Path) -> None:
    with pytest.raises(environment.SetupError, match=r"not a ComfyUI folder"):
        environment.find_comfyui(tmp_path)


def test_comfyui_around_the_pack_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMFYUI_DIR", raising=False)
    host = make_comfyui(tmp_path / "ComfyUI")
    monkeypatch.setattr(environment, "ROOT", host / "custom_nodes" / "halfsafe")
    assert environment.find_comfyui() == host
    monkeypatch.setattr(environment, "ROOT", tmp_path / "halfsafe")
    assert environment.find_comfyui() is None


def test_only_the_vendored_comfyui_is_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "archive.tar.gz"
    names = ("pkg-1/vendor/ComfyUI/main.py", "pkg-1/setup.py", "pkg-1/vendor/ComfyUI/../../../escaped.py")
    with tarfile.open(archive, "w:gz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    unpacked = environment._unpack(archive, tmp_path / "out")
    files = [path for path in tmp_path.rglob("*.py") if path.is_file()]
    assert files == [unpacked / "main.py"]


def test_lock_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        f"import pathlib\nfrom setup import environment\nwith environment._locked(pathlib.Path({str(lock)!r})): print('in')"
    )
    with environment._locked(lock):
        waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=1.5)
    assert waiting.communicate(timeout=30)[0].strip() == b"in"


def test_pack_is_copied_where_links_are_not_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = tmp_path / "pack"
    (pack / ".venv").mkdir(parents=True)
    (pack / "__init__.py").touch()

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no privilege")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    link_pack(pack, tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["__init__.py"]


def test_server_listens_on_loopback_only(tmp_path: Path) -> None:
    command = Server(tmp_path, tmp_path).command(port=1)
    assert command[command.index("--listen") + 1] == "127.0.0.1"


def test_server_that_ends_at_once_reports_its_log(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("raise SystemExit('no torch here')", encoding="utf-8")
    with pytest.raises(ServerError, match="no torch here"):
        Server(tmp_path, tmp_path).start()


ANSWERING = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
print("begins")
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


def test_stop_ends_the_server_and_keeps_its_log(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(ANSWERING, encoding="utf-8")
    server = Server(tmp_path, tmp_path).start()
    assert server.get("/system_stats") == b"{}" and server.process.poll() is None
    server.stop()
    assert server.process.poll() is not None and server.log().startswith("begins")
    with pytest.raises(OSError):
        server.get("/system_stats")


def test_a_changed_prompt_is_written_back_where_the_page_reads_it() -> None:
    fields = {
        "seed": ["INT", {"control_after_generate": True}],
        "steps": ["INT", {}],
        "name": [["a", "b"]],
        "model": ["MODEL"],
    }
    info = {"Sampler": {"input": {"required": fields}}}
    sampler = {
        "id": 4,
        "type": "Sampler",
        "widgets_values": [7, "randomize", 12, "a"],
        "inputs": [{"name": "model", "link": 1}],
    }
    note = {"id": 5, "type": "Note", "widgets_values": ["read me"]}
    prompt = {"4": {"class_type": "Sampler", "inputs": {"seed": 7, "steps": 2, "name": "b", "model": ["3", 0]}}}
    nodes = written_back({"nodes": [sampler, note], "links": []}, info, prompt)["nodes"]
    assert [node["widgets_values"] for node in nodes] == [[7, "randomize", 2, "b"], ["read me"]]
    assert sampler["widgets_values"] == [7, "randomize", 12, "a"]


def test_links_pass_through_reroutes_and_bypassed_nodes() -> None:
    info = {name: {"input": {"required": {"model": ["MODEL"]}}} for name in ("Load", "Patch", "Use")}
    info["Load"]["input"]["required"] = {}
    slot = {"name": "model", "type": "MODEL"}
    nodes = [
        {"id": 1, "type": "Load"},
        {"id": 2, "type": "Patch", "mode": 4, "inputs": [{**slot, "link": 10}]},
        {"id": 3, "type": "Reroute", "inputs": [{"name": "", "type": "*", "link": 11}]},
        {"id": 4, "type": "Use", "inputs": [{**slot, "link": 12}]},
    ]
    links = [[10, 1, 0, 2, 0, "MODEL"], [11, 2, 0, 3, 0, "MODEL"], [12, 3, 0, 4, 0, "MODEL"]]
    assert to_prompt({"nodes": nodes, "links": links}, info)["4"]["inputs"] == {"model": ["1", 0]}


def test_unknown_node_and_file_are_named() -> None:
    with pytest.raises(WorkflowError, match="Absent"):
        to_prompt({"nodes": [{"id": 1, "type": "Absent"}], "links": []}, {})
    info = {"Load": {"input": {"required": {"odd_name": [["a.safetensors"]]}}}}
    prompt = {"1": {"class_type": "Load", "inputs": {"odd_name": "b.safetensors"}}}
    with pytest.raises(WorkflowError, match=r"b\.safetensors"):
        substitute_files(prompt, info, small_file)


@pytest.mark.skipif(os.name == "nt", reason="the packed machine is a Linux one")
def test_the_interpreter_of_a_gpu_machine_finds_what_was_unpacked(tmp_path: Path) -> None:
    for file in ("stubs/av/__init__.py", "site/only_unpacked.py", "site/pytest.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("here = True\n", encoding="utf-8")
    python = importlib.import_module("gpu").python_with(tmp_path)
    code = "import av, importlib.util, only_unpacked, pytest; print(av.here, only_unpacked.here, pytest.here, bool(importlib.util.find_spec('torch')))"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([str(python), "-c", code], env=environ, capture_output=True, text=True)
    assert ran.stdout.split() == ["True"] * 4, ran.stderr


def test_a_demo_with_what_is_installed_prepares_nothing_and_needs_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = importlib.import_module("demo")
    given, started = [], []

    class NoServer(Exception):
        pass

    def server(comfyui, base, extra_args=(), python="", cpu=True):
        started.append((comfyui, extra_args, python))
        raise NoServer

    monkeypatch.setattr(sys, "argv", ["demo.py", "--installed", "--comfyui", str(make_comfyui(tmp_path))])
    monkeypatch.setattr(demo, "prepare", lambda comfyui: given.append(comfyui))
    for name, answer in (("Server", server), ("_provide_models", lambda *_: {}), ("accelerator", lambda python: "cpu")):
        monkeypatch.setattr(demo, name, answer)
    with pytest.raises(NoServer):
        demo.main()
    ((comfyui, extra, python),) = started
    assert not given and (comfyui, python) == (tmp_path.resolve(), Path(sys.executable))
    assert extra[0] == "--front-end-root" and extra[1].endswith("input")
