"""What the registry would flag, or what must not leave this machine."""

from __future__ import annotations

import re
from pathlib import Path

from support.shipped import ROOT, is_ignored, read_patterns, shipped_files, tracked_files

TEXT = {".py", ".js", ".mjs", ".json", ".md", ".toml", ".css", ".txt", ".yml", ".yaml"}
FLAGGED = (
    r"\bsubprocess\b",
    r"\bos\.(system|popen|exec\w+|spawn\w+)\b",
    r"\.connect\(",
    r"\.bind\(",
    r"\.send\(",
    r"\.sendall\(",
    r"aiohttp\.ClientSession",
    r"\b(import|from) (requests|urllib|socket|http\.client)\b",
    r"\bXMLHttpRequest\b|\bWebSocket\(",
    r"\b__import__\(",
)
FLAGGED_PYTHON = (
    r"(?<![\w.])eval\(",
    r"(?<![\w.])exec\(",
    r"\.cuda\(",
    r"\.to\([\"']cuda",
    r"torch\.autocast\(",
    r"(?<!\.)\bnn\.(Linear|Conv[123]d|Embedding|LayerNorm)\(",
    r"torch\.load\(",
    r"torch\.cuda\.empty_cache\(",
    r"pickle\.load",
    r"[\"']pip[\"']|\bpip\.main\b|\bensurepip\b",
    r"\b(base64|marshal|codecs|zlib)\.(b64decode|loads|decode|decompress)\b",
    r"(?<![\w.])compile\(",
)
TOP_LEVEL = {
    "CHANGELOG.md", "LICENSE", "__init__.py", "__main__.py", "builtin_model", "locales", "nodes", "precision", "pyproject.toml", "subgraphs", "web", "workflows",
}  # fmt: skip
MACHINE_PATHS = re.compile(r"(?<![\w.])/(home|root|Users|tmp|opt|work|mnt)/\w|[A-Z]:\\\\?Users")
SHIPPED = shipped_files()
TRACKED_TEXT = [path for path in tracked_files() if path.suffix in TEXT or path.parts[0] == ".ci"]


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_archive_holds_the_pack_and_no_development_file() -> None:
    assert {Path("__init__.py"), Path("pyproject.toml"), Path("LICENSE"), Path("README.md")} <= set(SHIPPED)
    assert Path("web/docs/HalfsafeNaNGuard.md") in SHIPPED
    readmes = {path.parts[0] for path in SHIPPED if path.match("README*.md")}
    assert {path.parts[0] for path in SHIPPED} == TOP_LEVEL | readmes


def test_every_pattern_of_the_ignore_file_leaves_something_out() -> None:
    patterns = read_patterns(ROOT / ".comfyignore")
    assert [pattern for pattern in patterns if not any(is_ignored(path, [pattern]) for path in tracked_files())] == []


def test_the_archive_is_small() -> None:
    sizes = {path: (ROOT / path).stat().st_size for path in SHIPPED}
    models = sum(size for path, size in sizes.items() if path.parts[0] == "builtin_model")
    others = {path: size for path, size in sizes.items() if path.parts[0] != "builtin_model"}
    assert len(sizes) < 400 and sum(others.values()) < 2_500_000
    assert {path: size for path, size in others.items() if size > 150_000} == {}, "a file that is no source"
    assert 0 < models < 7_000_000, "the model that the sidebar shows, which needs no download"


def flagged(path: Path) -> list[str]:
    patterns = FLAGGED + (FLAGGED_PYTHON if path.suffix == ".py" else ())
    return [match.group(0) for pattern in patterns for match in re.finditer(pattern, read(path))]


def test_shipped_text_has_no_flagged_token() -> None:
    assert [(str(path), found) for path in SHIPPED if path.suffix in TEXT and (found := flagged(path))] == []


def test_no_absolute_path_of_a_machine() -> None:
    assert len(TRACKED_TEXT) > 300 and [str(path) for path in TRACKED_TEXT if MACHINE_PATHS.search(read(path))] == []


def test_python_source_is_cp1252() -> None:
    assert [
        str(path)
        for path in SHIPPED
        if path.suffix == ".py" and "?" in read(path).replace("?", "").encode("cp1252", "replace").decode("cp1252")
    ] == []


def test_the_page_imports_no_script_but_main_js() -> None:
    assert {path for path in SHIPPED if path.suffix == ".js"} <= {Path("web/main.js")}


def test_contributing_names_files_and_folders_that_exist() -> None:
    named = re.findall(r"`([\w./-]+/[\w./-]*)`|python ([\w./-]+\.py)", read(Path("CONTRIBUTING.md")))
    assert (
        named
        and [
            name
            for pair in named
            if (name := "".join(pair)) and not name.startswith("/") and not (ROOT / name).exists()
        ]
        == []
    )
