"""This ComfyUI has every name that `nodes/host` uses, with the arguments it passes."""

import logging

from halfsafe.precision.commands import core_names, core_uses
from setup.environment import COMFYUI_VERSION
from setup.machine import comfyui_version
from support.shipped import ROOT

DOCUMENT = ROOT / "docs" / "comfyui-versions.md"


def test_this_comfyui_has_every_name(comfyui_dir):
    missing = {f"{found.name}: {found.why}": core_uses.used_names().get(found.name) for found in core_names.names_missing(comfyui_dir)}
    assert missing == {} and core_names.names_unread(comfyui_dir, core_names.used()) == [], f"change these files: {missing}"


def test_the_document_counts_the_names_of_this_comfyui(comfyui_dir):
    version, used = comfyui_version(comfyui_dir), len(core_names.used())
    if version == COMFYUI_VERSION:
        (row,) = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {version} |")]
        assert f"| {used - len(core_names.names_missing(comfyui_dir))} of {used} |" in row


def test_a_wrong_device_profile_is_told_at_start_up(pack, monkeypatch, caplog):
    import asyncio
    import os

    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "rtx 9999")
    with caplog.at_level(logging.ERROR):
        extension = asyncio.run(pack.comfy_entrypoint())
        asyncio.run(extension.on_load())
    assert "HALFSAFE_DEVICE_PROFILE=rtx 9999 is ignored" in caplog.text and "sm_86" in caplog.text
    assert "HALFSAFE_DEVICE_PROFILE" not in os.environ
