"""Tables of the documents that repeat a list of the code: devices, presets, rule keys, verdicts and modes, in every language."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from assets.devices_table import measurement_rows
from halfsafe.precision.base.modes import MODES
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.devices.profiles import ROWS
from halfsafe.precision.formats import families as read_families
from halfsafe.precision.guard import verdicts
from halfsafe.precision.plan.auto import auto_compute
from halfsafe.precision.plan.presets import PRESETS
from halfsafe.precision.plan.rules import VALUES
from support.shipped import ROOT

DEVICES = ["docs/devices.md", "docs/devices.zh.md"]
BLACK_IMAGES = ["docs/black-images.md", "docs/black-images.zh.md"]
FAMILIES = (("Wan", "SDXL"), ("Flux",), ("Qwen-Image", "Z-Image, Ming-Image or Lumina 2"))  # of the columns for compute
CODE = re.compile(r"\(`(\w+)`\)$")
YES, NO = ("yes", "有"), ("no", "无")
GAIN = {True: ("faster", "更快"), False: ("not faster", "不更快"), None: ("not measured", "未实测")}


def pages(node: str) -> list[str]:
    return [
        f"web/docs/{node}.md",
        *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "web/docs" / node).glob("*.md"))),
    ]


def rows(document: str) -> list[list[str]]:
    """The cells of all rows of a document's tables."""
    lines = (ROOT / document).read_text("utf-8").splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]


def first_cells(document: str) -> list[str]:
    return [row[0].strip("`") for row in rows(document)]


@pytest.mark.parametrize("document", DEVICES)
def test_the_table_of_devices_is_the_codes(document):
    devices = {match[1]: row for row in rows(document) if (match := CODE.search(row[0]))}
    assert list(devices) == [profile.name for profile in ROWS]
    for profile in ROWS:
        device, (_, bf16, fp8, int8, *computes) = detect(profile=profile.name), devices[profile.name]
        assert bf16.startswith(YES if profile.bf16 else NO), profile.name
        # a measured gain, a measured or known lack of it, or nothing known
        for said, setting in ((fp8, "fp8"), (int8, "int8")):
            known = NO if not getattr(profile, f"{setting}_matmul") else GAIN[profile.gain(setting)]
            assert said.startswith(known), (profile.name, setting)
        for said, families in zip(computes, FAMILIES, strict=True):
            supported = (family.supported for family in read_families.FAMILIES if family.name in families)
            chosen = {auto_compute(device, each, "bf16")[0] for each in supported}
            assert {re.match(r"\w+", said, re.ASCII)[0]} == chosen, profile.name


@pytest.mark.parametrize("document", DEVICES)
def test_the_documents_show_every_measurement(document):
    assert "\n".join(measurement_rows()) in (ROOT / document).read_text("utf-8")


@pytest.mark.parametrize("page", pages("HalfsafeLayerRules"))
def test_the_help_on_rules_has_every_preset_and_key(page):
    cells = rows(page)
    named = [name for row in cells for name in row[0].split(", ")]
    assert {name for name in named if name in PRESETS} == set(PRESETS) - {"none"}
    told = {row[0]: tuple(re.findall(r"\w+", row[1], re.ASCII)) for row in cells if row[0] in VALUES}
    assert told == {key: tuple(values) for key, values in VALUES.items()}


@pytest.mark.parametrize("document", [*BLACK_IMAGES, *pages("HalfsafeNaNGuard")])
def test_every_verdict_is_explained(document):
    names = {*verdicts.VERDICTS}
    assert [cell for cell in first_cells(document) if cell in names].count("clean") == 1
    assert names <= {*first_cells(document)}


@pytest.mark.parametrize("page", pages("HalfsafeReport"))
def test_every_mode_is_explained(page):
    named = {name for cell in first_cells(page) for name in cell.split(", ")}
    assert set(MODES) <= named


HOLDERS = {
    "WeakKeyDictionary",
    "WeakSet",
    "WeakIdKeyDictionary",
    "local",
    "ContextVar",
    "SharedScope",
    "Turns",
    "dict",
    "set",
    "list",
}
"""What makes state that a module keeps."""


def kept_by_modules() -> Iterator[tuple[str, str]]:
    """(file, name) of the state at the top of the product's files: empty containers, and what makes such state."""
    for path in [*(ROOT / "precision").rglob("*.py"), *(ROOT / "nodes").rglob("*.py")]:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                if any(map(is_state, values)):
                    names = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
                    yield from (("/".join(path.parts[-2:]), name.id) for name in names)


def is_state(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in HOLDERS and not (
            isinstance(value.func, ast.Name) and value.func.id in ("dict", "set", "list") and value.args
        )
    return ast.unparse(value) in ("{}", "[]")


def test_state_outside_of_calls_is_listed() -> None:
    listed = {
        (row[0], row[1].strip("`"))
        for row in rows("docs/internals/how-a-call-runs.md")
        if len(row) == 4 and row[0].endswith(".py")
    }
    found = {*kept_by_modules()}
    assert len(found) > 20 and found == listed, f"missing: {sorted(found - listed)}; gone: {sorted(listed - found)}"


OWNERS = {
    "attachments": {"record_of", "_stage_of", "take_stages"},
    "set_attachments": {"keep_record", "put_stage"},
    "get_wrappers": {"on"},
    "add_wrapper_with_key": {"_wrap", "_sampled", "watch_sampling"},
    "remove_wrappers_with_key": {"_wrap", "bare_clone"},
    "set_injections": {"keep_low_rank_unmerged"},
    "add_callback_with_key": {"vae_in"},
    "add_object_patch": {"ask_for_plain_products", "vae_in"},
    "add_weight_wrapper": {"ask_for_plain_products", "zeroed"},
    "set_model_compute_dtype": {"_planned", "_run_clip", "vae_in"},
    "__class__": {"keep_low_rank_unmerged", "clone", "load_onto"},
    "cached_patcher_init": {"load_diffusion_model", "_loaded", "load_vae", "quantized_at_hand", "held_on_device"},
    "patches_uuid": {"keep_low_rank_unmerged"},
}
"""What sets a state of a patcher, or reads an attachment or a wrapper -> the functions that do; attributes without a call are assigned."""
ASSIGNED = {"__class__", "cached_patcher_init", "patches_uuid"}


def touching_patchers() -> Iterator[tuple[str, str]]:
    """(attribute, function or method) of ``OWNERS`` in the product."""
    for path in (ROOT / "nodes").rglob("*.py"):
        body = ast.parse(path.read_text("utf-8")).body
        body += [each for node in body if isinstance(node, ast.ClassDef) for each in node.body]
        for function in (node for node in body if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(function):
                is_touched = isinstance(node, ast.Attribute) and node.attr in OWNERS
                if is_touched and (node.attr not in ASSIGNED or isinstance(node.ctx, ast.Store)):
                    yield node.attr, function.name


def test_each_state_of_a_patcher_has_its_owner_in_the_table() -> None:
    found = {attribute: set() for attribute in OWNERS}
    for attribute, function in touching_patchers():
        found[attribute].add(function)
    assert found == OWNERS
    cells = [row for row in rows("docs/internals/how-a-call-runs.md") if len(row) == 5]
    named = {name for row in cells for cell in row[2:] for name in re.findall(r"`(\w+)`", cell)}
    assert sorted(set().union(*OWNERS.values()) - named) == []
    product = "\n".join(path.read_text("utf-8") for path in (ROOT / "nodes").rglob("*.py"))
    assert sorted(name for name in named if f"def {name}(" not in product) == []
