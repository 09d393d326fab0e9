"""The scripts that set up, start and drive ComfyUI, without one."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from halfsafe.benchmarks import files
from setup import environment
from setup.comfyui_server import Server, ServerError, error_text, link_pack, make_base_directory
from setup.workflow import WorkflowError, shrink, small_file, substitute_files, to_prompt, written_back

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


def test_failed_stage_shows_what_the_command_said() -> None:
    with pytest.raises(environment.SetupError, match=r"(?s)Breaking failed:.*no such package"):
        environment.run_step("Breaking", [sys.executable, "-c", "print('no such package'); raise SystemExit(1)"])


def test_interrupted_or_foreign_stamp_is_not_a_finished_one(tmp_path: Path) -> None:
    assert environment._stamp(tmp_path) == {}
    (tmp_path / "halfsafe.json").write_text("{", encoding="utf-8")
    assert environment._stamp(tmp_path) == {}


def test_broken_interpreter_is_not_usable(tmp_path: Path) -> None:
    assert environment._is_usable(Path(sys.executable), imports=True)
    assert not environment._is_usable(tmp_path / "absent", imports=False)


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


def test_pack_is_linked_into_an_otherwise_empty_base(tmp_path: Path) -> None:
    base = make_base_directory(tmp_path / "base", ROOT)
    assert [path.name for path in (base / "custom_nodes").iterdir()] == ["Halfsafe-Pack"]
    assert (base / "custom_nodes" / "Halfsafe-Pack" / "pyproject.toml").samefile(ROOT / "pyproject.toml")


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


def test_failed_prompt_names_its_node() -> None:
    detail = {"node_type": "KSampler", "exception_message": "out of memory", "traceback": ["line 1"]}
    entry = {"status": {"status_str": "error", "messages": [["execution_error", detail]]}}
    assert error_text(entry).startswith("KSampler: out of memory")


def test_seed_control_value_is_not_taken_for_an_input() -> None:
    info = {
        "Sampler": {
            "input": {
                "required": {
                    "seed": ["INT", {"default": 0, "control_after_generate": True}],
                    "steps": ["INT", {"default": 20}],
                    "name": [["euler", "heun"]],
                    "model": ["MODEL"],
                },
                "optional": {"late": ["FLOAT", {"default": 0.5}]},
            }
        }
    }
    node = {"id": 4, "type": "Sampler", "widgets_values": [7, "randomize", 12, "heun"], "inputs": []}
    prompt = to_prompt({"nodes": [node], "links": []}, info)
    assert prompt["4"]["inputs"] == {"seed": 7, "steps": 12, "name": "heun", "late": 0.5}


def test_a_changed_prompt_is_written_back_where_the_page_reads_it() -> None:
    fields = {"seed": ["INT", {"control_after_generate": True}], "steps": ["INT", {}], "name": [["a", "b"]], "model": ["MODEL"]}
    info = {"Sampler": {"input": {"required": fields}}}
    sampler = {"id": 4, "type": "Sampler", "widgets_values": [7, "randomize", 12, "a"], "inputs": [{"name": "model", "link": 1}]}
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


def test_clip_l_stand_in_is_loaded_as_sd3() -> None:
    info = {"Load": {"input": {"required": {"clip_name1": [["clip_l.safetensors"]], "type": [["wan", "sd3"]]}}}}
    prompt = {"1": {"class_type": "Load", "inputs": {"clip_name1": "umt5.safetensors", "type": "wan"}}}
    inputs = substitute_files(prompt, info, small_file)["1"]["inputs"]
    assert inputs == {"clip_name1": "clip_l.safetensors", "type": "sd3"}


def test_shrinking_lowers_sizes_and_nothing_else() -> None:
    prompt = {"1": {"class_type": "Latent", "inputs": {"width": 832, "steps": 1, "cfg": 6.0, "length": True}}}
    inputs = shrink(prompt, width=256)["1"]["inputs"]
    assert inputs == {"width": 256, "steps": 1, "cfg": 6.0, "length": True}


def test_int8_is_compared_with_fp8_and_with_the_other() -> None:
    runs = {
        side: [{"seconds": seconds * factor, "cpu_seconds": seconds, "anonymous_bytes": 100, "weight_bytes": 100} for factor in (1.0, 1.1, 3.0)]
        for side, seconds in (("halfsafe", 2.0), ("int8", 5.0), ("other", 1.0))
    }
    summary = {side: files._summary(taken) for side, taken in runs.items()}
    assert summary["int8"]["seconds"] == 5.5, "the median, which one disturbed run does not move"
    assert files._ratios(runs, summary, "int8", "other") == {"seconds": 5.0, "cpu_seconds": 5.0, "anonymous_bytes": 1.0, "weight_bytes": 1.0, "best_seconds": 5.0}
    found = files._targets("load", summary)
    assert found["int8_to_fp8"] == {"limit": 2.0, "measured": 2.5, "met": False} and found["int8_memory_to_weights"]["met"]
