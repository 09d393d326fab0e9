"""Importing the pack into ComfyUI imports nothing else, writes nothing, starts nothing, asks no network, and works from a read-only folder."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from setup.environment import clean_environ
from support.shipped import ROOT, shipped_files

CODE = """
import asyncio, json, os, sys
sys.path.insert(0, {comfyui!r})
sys.argv = ["main.py", "--cpu", "--base-directory", {base!r}, "--database-url", "sqlite:///:memory:"]
import comfy.options
comfy.options.enable_args_parsing()
import folder_paths, nodes, comfy_api.latest, comfy.sd, comfy_config.config_parser, server
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
seen = []
def hook(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & WRITING:
        seen.append([event, str(args[0])])
    elif event.split(".")[0] in ("socket", "subprocess", "shutil") or event in ("os.mkdir", "os.remove", "os.rename", "os.system"):
        seen.append([event, str(args)[:200]])
threads = {{t.name for t in __import__("threading").enumerate()}}
sys.addaudithook(hook)
imported = set(sys.modules)
import inspect
searches = []
find_module = inspect.getmodule
inspect.getmodule = lambda *args, **kwargs: searches.append(str(args)[:200]) or find_module(*args, **kwargs)
loaded = asyncio.run(nodes.load_custom_node({pack!r}, module_parent="custom_nodes"))
names = {{name.partition(".")[0] for name in set(sys.modules) - imported if {pack!r} not in name}}
ours = sorted(name for name in nodes.NODE_CLASS_MAPPINGS if name.startswith("Halfsafe"))
started = sorted({{t.name for t in __import__("threading").enumerate()}} - threads)
asyncio_own = ("socket.__new__", "socket.bind") if os.name == "nt" else ("socket.__new__",)
seen = [entry for entry in seen if entry[0] not in asyncio_own]
with open(os.path.join({base!r}, "probe"), "w"):
    pass
commands = sorted(name for name in set(sys.modules) - imported if ".precision.commands." in name)
print(json.dumps({{"searches": searches, "commands": [name.rpartition(".")[2] for name in commands], "loaded": loaded, "nodes": ours, "seen": seen, "threads": started, "others": sorted(names - set(sys.stdlib_module_names) - {{"custom_nodes"}})}}))
"""


def test_import_from_a_read_only_folder_imports_writes_and_starts_nothing(comfyui_dir, tmp_path):
    base, pack = tmp_path / "base", tmp_path / "base" / "custom_nodes" / "Halfsafe-Pack"
    for path in shipped_files():
        (pack / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, pack / path)
    before = _files(pack)
    try:
        _set_writable(pack, False)
        code = CODE.format(comfyui=str(comfyui_dir), base=str(base), pack=str(pack))
        environ = clean_environ(PYTHONDONTWRITEBYTECODE="1")
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=comfyui_dir, env=environ
        )
    finally:
        _set_writable(pack, True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    golden = json.loads((ROOT / "tests" / "golden" / "object_info.json").read_text(encoding="utf-8"))
    assert result["loaded"] and result["nodes"] == sorted(golden)
    assert result["searches"] == [], (
        "inspect looks through every module that was ever imported: seconds, in a ComfyUI with many packs"
    )
    assert result["commands"] == [], "what the command line alone runs is imported there"
    assert result["seen"] == [["open", str(base / "probe")]], "what is not the probe came from the import"
    assert result["threads"] == []
    assert result["others"] == [], "packages that ComfyUI had not imported slow its start"
    assert _files(pack) == before


def _files(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def _set_writable(folder: Path, on: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        os.chmod(path, mode | stat.S_IWUSR if on else mode & ~0o222)
