"""The README is one screen, what it left out is one link away, and no link leads nowhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).absolute().parents[3]
WORDS_BEFORE_DETAILS, WORDS_IN_ALL = 500, 700
CHARACTERS = {"README.zh.md": 1800}
DETAILS = ("## Read on", "## 继续阅读")
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("README*.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/README.md")
    for path in ROOT.glob(pattern)
)
RAW = "https://raw.githubusercontent.com/halfsafe/halfsafe/main/"
PAGE = "https://github.com/halfsafe/halfsafe/blob/main/"
LINK = re.compile(r"\]\(<?([^)>#]+?)>?(?:#[^)]*)?\)")
SYMPTOMS = {
    "README.md": ("black", "out of memory", "slow", "precision"),
    "README.zh.md": ("黑图", "显存不足", "慢", "精度"),
}


def prose(text: str) -> str:
    """A text without the addresses of its links and pictures and without table rules."""
    return re.sub(r"\]\([^)]*\)|^\|[-|]+\|$|[|*`#!\[]", " ", text, flags=re.MULTILINE)


@pytest.mark.parametrize("readme", SYMPTOMS)
def test_the_readme_is_one_screen(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    (details,) = [heading for heading in DETAILS if heading in text]
    if readme in CHARACTERS:
        assert len(re.sub(r"\s", "", prose(text))) <= CHARACTERS[readme]
        return
    assert len(prose(text.split(details)[0]).split()) <= WORDS_BEFORE_DETAILS
    assert len(prose(text).split()) <= WORDS_IN_ALL


@pytest.mark.parametrize("readme", SYMPTOMS)
def test_it_begins_with_a_picture_the_symptoms_and_how_to_install(readme: str) -> None:
    first, symptoms, install, *_ = re.split(r"^## .*$", (ROOT / readme).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert "docs/images/rescue.jpg" in first
    rows = [row for row in symptoms.splitlines() if row.startswith("| **")]
    assert len(rows) == len(SYMPTOMS[readme])
    assert all(word in row.lower() for word, row in zip(SYMPTOMS[readme], rows, strict=True))
    assert "comfy node install halfsafe" in install


def test_no_link_leads_nowhere() -> None:
    links = [
        (document, link)
        for document in DOCUMENTS
        for link in LINK.findall((ROOT / document).read_text(encoding="utf-8"))
    ]
    local = [(document, link) for document, link in links if not link.startswith(("http://", "https://"))]
    assert [
        (str(document), link) for document, link in local if not (ROOT / document).parent.joinpath(link).exists()
    ] == []


@pytest.mark.parametrize("readme", SYMPTOMS)
def test_the_registrys_page_finds_each_picture_of_the_readme(readme: str) -> None:
    """That page has the text alone: a picture is found by its whole address, which is that of a file of the repository."""
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / readme).read_text(encoding="utf-8"))
    assert (
        pictures
        and [
            address
            for address in pictures
            if not address.startswith(RAW) or not (ROOT / address.removeprefix(RAW)).is_file()
        ]
        == []
    )


@pytest.mark.parametrize("readme", SYMPTOMS)
def test_the_registrys_page_follows_each_link_of_the_readme(readme: str) -> None:
    """A link of the text alone leads nowhere there: each has its whole address, those of the repository of a file that it has."""
    links = LINK.findall((ROOT / readme).read_text(encoding="utf-8"))
    assert [link for link in links if not link.startswith("https://")] == []
    assert [link for link in links if link.startswith(PAGE) and not (ROOT / link.removeprefix(PAGE)).is_file()] == []


def test_the_readme_leads_to_every_page_of_docs() -> None:
    assert {path.name for path in ROOT.glob("docs/internals/*.md")} == {
        "asked.md",
        "calibration.md",
        "decisions.md",
        "drift.md",
        "eight-bits.md",
        "failure-classes.md",
        "how-a-call-runs.md",
        "scaling.md",
    }
    for readme in SYMPTOMS:
        led = {link.removeprefix(PAGE) for link in LINK.findall((ROOT / readme).read_text(encoding="utf-8"))}
        pages = {re.sub(r"(\.zh)?\.md$", "", link) for link in led if link.startswith("docs/") and link.endswith(".md")}
        assert {re.sub(r"(\.zh)?\.md$", "", f"docs/{path.name}") for path in ROOT.glob("docs/*.md")} <= pages


@pytest.mark.parametrize("page", ["docs/nodes.md", "docs/nodes.zh.md"])
def test_every_workflow_and_block_is_listed(page: str) -> None:
    linked = {
        Path(link).stem for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")) if link.endswith(".json")
    }
    assert linked == {path.stem for folder in ("workflows", "subgraphs") for path in (ROOT / folder).glob("*.json")}


@pytest.mark.parametrize("readme", SYMPTOMS)
def test_it_is_tried_by_two_commands_whose_cost_is_told_first(readme: str) -> None:
    (tried,) = [
        part
        for part in re.split(r"^## .*$", (ROOT / readme).read_text(encoding="utf-8"), flags=re.MULTILINE)
        if "scripts/demo.py" in part
    ]
    assert {"python scripts/demo.py", "python scripts/test.py"} <= set(tried.splitlines())
    assert all(word in tried for word in ("3 GB", "6 GB", "--serve", "CPU")) and "GPU" in tried.strip().splitlines()[-1]


NEVER_ON_A_GPU = re.compile(
    r"(?i)no gpu has|(not|yet) (yet )?(been )?(measured|run) on (a|any|one) GPU|(not|nothing)( was)? measured on a GPU|have not run on one|no figure .{0,30} of a GPU|没有任何 GPU|没有一个是在 GPU|尚待测量"
)
GPU_MEASURED = ("H200", "580.159.04", "2.11.0+cu130")


def test_what_a_gpu_measured_stands_with_its_conditions() -> None:
    pages = [*DOCUMENTS, *(path.relative_to(ROOT) for path in ROOT.glob("web/docs/**/*.md"))]
    texts = {str(page): (ROOT / page).read_text(encoding="utf-8") for page in pages}
    assert {page: found for page, text in texts.items() if (found := NEVER_ON_A_GPU.findall(text))} == {}
    told = [page for page, text in texts.items() if all(condition in text for condition in GPU_MEASURED)]
    assert sorted(told) == [
        "benchmarks/README.md",
        "docs/devices.md",
        "docs/devices.zh.md",
        "docs/numbers.md",
        "docs/numbers.zh.md",
    ]
    assert all("H200" in texts[readme] for readme in SYMPTOMS)


@pytest.mark.parametrize("page", ["docs/devices.md", "docs/devices.zh.md"])
def test_the_table_of_measured_cards_leads_to_a_form_for_more(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    told = (ROOT / "benchmarks" / "results" / "gpu_h200_measure_my_card.txt").read_text(encoding="utf-8")
    measured = re.findall(r"^\d (\S+).*?  +([\d.]+)  +([\d.]+ GiB)  +[\d.]+ GiB  +([\d.]+)", told, flags=re.MULTILINE)
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| NVIDIA H200 |")
    ]
    assert [tuple(row[4:]) for row in rows] == measured and len(measured) == 7
    (form,) = re.findall(r"issues/new\?template=([\w.-]+)\)", text)
    asked = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / form).read_text(encoding="utf-8"))
    assert (
        asked["name"]
        and asked["description"]
        and asked["body"][0]["id"] == "row"
        and all(field["type"] in ("input", "textarea") and field["attributes"]["label"] for field in asked["body"])
    )


def test_the_figures_of_the_h200_are_those_of_its_files() -> None:
    """Each ratio in devices.md is the median that a row of the raw files has, rounded."""
    rows: dict[str, dict] = {}
    for name in ("gpu_h200", "gpu_h200_dynamic_vram"):
        found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        rows |= {row["row"]: row for row in found if "seconds_to_core" in row}
    parts = ("SDXL", "SDXL, dynamic VRAM", "Flux, dynamic VRAM", "Wan 1.3B, video")
    settings = ("auto", "auto, guard", "fp16_safe", "fp16_safe, guard", "fp8", "fp8 products", "int8")
    measured = [
        [f"{rows[name]['seconds_to_core']:.2f}" if (name := f"{part}: {setting}") in rows else "-" for part in parts]
        for setting in settings
    ]
    for page in ("docs/devices.md", "docs/devices.zh.md"):
        cells = [
            [cell.strip() for cell in line.split("|")[2:-1]]
            for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
            if line.startswith("|")
        ]
        assert [row for row in cells if len(row) == 4 and re.fullmatch(r"\d\.\d\d", row[0])] == measured, page
