"""This ComfyUI has every name that `nodes/` uses, and takes the arguments it is given."""

import ast
import logging

import pytest
from support.core_names import Use, all_uses, missing, uses_in


def test_this_comfyui_has_every_name_and_takes_what_it_is_given(comfy):
    assert len({use.name for use in all_uses()}) > 150 and missing(all_uses()) == {}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import comfy.ops\ncomfy.ops.gone", "there is no comfy.ops.gone"),
        ("from comfy.sd import VAE\ndef f(vae: VAE): vae.gone", "there is no comfy.sd.VAE.gone"),
        ("import comfy.ops\nhasattr(comfy.ops, 'gone')", "there is no comfy.ops.gone"),
        ("loaded.patcher.gone(1)", "there is no comfy.model_patcher.ModelPatcher.gone"),
        ("patcher.add_object_patch(1)", "missing a required argument: 'obj'"),
        ("import comfy.utils\ncomfy.utils.ProgressBar(1, parts=2)", "unexpected keyword argument 'parts'"),
    ],
)
def test_a_name_that_is_gone_or_takes_something_else_is_told(comfy, code, why):
    (reason,) = missing([*uses_in(ast.parse(code), "a.py")]).values()
    assert reason.startswith("a.py: ") and why in reason


def test_an_attribute_that_no_module_of_comfyuis_mentions_is_told(comfy):
    assert missing([Use("comfy.ops.*.gone", "core.py"), Use("comfy.ops.*.weight_function", "core.py")]) == {"comfy.ops.*.gone": "core.py: comfy.ops mentions no gone"}


def test_a_wrong_device_profile_is_told_at_start_up(pack, monkeypatch, caplog):
    import asyncio
    import os

    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "rtx 9999")
    with caplog.at_level(logging.ERROR):
        extension = asyncio.run(pack.comfy_entrypoint())
        asyncio.run(extension.on_load())
    assert "HALFSAFE_DEVICE_PROFILE=rtx 9999 is ignored" in caplog.text and "sm_86" in caplog.text
    assert "HALFSAFE_DEVICE_PROFILE" not in os.environ
