"""The package metadata, and the pack as an installed library."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from support.shipped import ROOT, tracked_files

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ACCELERATORS = {
    "Environment :: GPU :: NVIDIA CUDA",
    "Environment :: GPU :: AMD ROCm",
    "Environment :: GPU :: Intel Arc",
    "Environment :: NPU :: Huawei Ascend",
    "Environment :: GPU :: Apple Metal",
}


@pytest.fixture(scope="module")
def metadata() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_registry_takes_the_metadata(metadata: dict) -> None:
    project, comfy = metadata["project"], metadata["tool"]["comfy"]
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]{0,98}", project["name"]) and "comfyui" not in project["name"].lower()
    named = {c for c in project["classifiers"] if c.startswith("Environment ::")}
    assert named and named <= ACCELERATORS
    assert all(
        re.fullmatch(r"(>=|<=|>|<|==|~=|!=)\d+\.\d+\.\d+", bound.strip())
        for bound in comfy["requires-comfyui"].split(",")
    )
    assert {"Homepage", "Documentation", "Repository", "Issues"} <= set(project["urls"])
    assert re.fullmatch(r"[a-z][a-z0-9-]*", comfy["PublisherId"]) and comfy["DisplayName"] and "web" not in comfy
    base = project["urls"]["Repository"].replace("https://github.com/", "https://raw.githubusercontent.com/") + "/main/"
    assert all(
        comfy[picture].startswith(base) and (ROOT / comfy[picture].removeprefix(base)).is_file()
        for picture in ("Icon", "Banner")
    )
    width, height = Image.open(ROOT / comfy["Banner"].removeprefix(base)).size
    assert 9 * width == 21 * height, "the registry shows a banner 21 wide and 9 high"


def test_version_has_three_numbers_and_a_changelog_entry(metadata: dict) -> None:
    version = metadata["project"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version) and f"## {version}" in (ROOT / "CHANGELOG.md").read_text(
        encoding="utf-8"
    )


def test_the_page_signs_nodes_with_the_id_and_version_of_the_pack(metadata: dict) -> None:
    """By which a page without the pack offers it."""
    project = metadata["project"]
    signed = f'PACK = {{ cnr_id: "{project["name"]}", ver: "{project["version"]}" }};'
    assert signed in (ROOT / "web" / "graph.mjs").read_text(encoding="utf-8")


def test_the_page_exchanges_nothing_that_all_packs_share() -> None:
    """An exchanged ``api.fetchApi``, a write to ``window`` and the like may undo another pack's, as `comfy-test lint` says."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "web").rglob("*.*js"))
    assert "promptQueueing" in code and not re.findall(
        r"\b(?:api|app|window|LiteGraph|LGraph\w*)\.[\w.]+ = .*|document\.(?:head|body)\..*", code
    )


def test_pack_adds_no_requirement(metadata: dict) -> None:
    assert metadata["project"]["dependencies"] == [] and not (ROOT / "requirements.txt").exists()


def test_every_package_folder_is_listed(metadata: dict) -> None:
    folders = {path.parent for path in tracked_files() if path.suffix == ".py"}
    shipped = {f for f in folders if f.parts[:1] not in (("tests",), ("scripts",), ("benchmarks",), ("docs",))}
    listed = set(metadata["tool"]["setuptools"]["packages"])
    assert {".".join(("halfsafe", *folder.parts)) for folder in shipped} == listed


def test_tests_import_the_pack_without_running_it() -> None:
    assert Path(importlib.util.find_spec("halfsafe.precision").submodule_search_locations[0]) == ROOT / "precision"
    assert "nodes" not in sys.modules or not Path(str(sys.modules["nodes"].__file__)).is_relative_to(ROOT)
    assert str(ROOT) not in sys.path


def test_every_file_of_the_packs_folders_is_package_data(metadata: dict) -> None:
    """What `pip install` copies beside the code; before a release it is installed and run."""
    patterns = metadata["tool"]["setuptools"]["package-data"]["halfsafe"]
    copied = {path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    folders = {pattern.partition("/")[0] for pattern in patterns}
    needed = {path for path in tracked_files() if path.parts[0] in folders and path.suffix != ".py"}
    assert folders == {"web", "workflows", "subgraphs", "locales", "builtin_model"} and needed <= copied


@pytest.mark.release
def test_installed_package_runs_doctor(tmp_path: Path) -> None:
    source, target = tmp_path / "My Halfsafe-Pack", tmp_path / "site"
    for path in tracked_files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    built = subprocess.run([*pip, "--target", str(target), str(source)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    doctor = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(target)!r}); import runpy; "]
    doctor[-1] += "sys.argv = ['halfsafe', 'doctor', '--json']; runpy.run_module('halfsafe', run_name='__main__')"
    done = subprocess.run(doctor, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert (
        list((target / "halfsafe" / "web").glob("docs/*.md"))
        and list((target / "halfsafe" / "workflows").glob("*.json"))
        and list((target / "halfsafe" / "subgraphs").glob("*.json"))
    )


def functions_for_others() -> list[str]:
    """The functions that the documentation offers for import."""
    return re.findall(
        r"^\| `(halfsafe\.[\w.]+)` \|", (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8"), re.MULTILINE
    )


def test_ten_functions_are_offered_for_import() -> None:
    assert len(functions_for_others()) == 10


@pytest.mark.parametrize("name", functions_for_others())
def test_a_function_that_others_import_has_an_example_that_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, function = name.rpartition(".")
    shutil.copyfile(ROOT / "tests" / "assets" / "shapes.safetensors", tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    code = importlib.import_module(module)
    (example,) = doctest.DocTestFinder(recurse=False).find(
        getattr(code, function), function, module=code, globs={**vars(code)}
    )
    said: list[str] = []
    outcome = doctest.DocTestRunner().run(example, out=said.append)
    assert example.examples and outcome.failed == 0, "".join(said)
