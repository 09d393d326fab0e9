"""What ComfyUI logs while it builds a model for us to look at is dropped; nothing else is, and a refused product is told once."""

import logging
import threading

import pytest
from support import families


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_only_what_comfyui_says_in_this_thread_is_dropped(comfy, said, caplog):
    from halfsafe.nodes.host.load.detection import quiet

    caplog.clear()  # what the packages say that ComfyUI imports
    root, before = logging.getLogger(), (logging.getLogger().level, list(logging.getLogger().filters))
    with pytest.raises(KeyError), quiet():
        logging.info("model weight dtype")
        logging.warning("unet missing")
        logging.getLogger("another.pack").info("ours")
        thread = threading.Thread(target=logging.info, args=["a prompt of another user"])
        thread.start()
        thread.join()
        raise KeyError
    logging.info("loaded")
    assert said() == ["unet missing", "ours", "a prompt of another user", "loaded"]
    assert (root.level, root.filters) == before


def test_a_detected_model_is_built_in_silence_and_loaded_aloud(comfy, wan, said):
    comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage="as_file", compute="bf16")
    assert sum("model weight dtype" in message for message in said()) == 1


def test_a_product_that_cannot_run_in_fp8_is_told_once(comfy, wan, call, monkeypatch, caplog):
    import comfy_kitchen.tensor.fp8 as kitchen
    from halfsafe.nodes.host.comfyui.kernels import _warned
    from halfsafe.nodes.host.compute import fp8_product

    def refused(*args, **options):
        raise RuntimeError("no such product on this device")

    _warned.clear()
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(kitchen, "_fp8_scaled_mm", refused)
    monkeypatch.setattr(fp8_product, "scaled_mm_v2", refused)
    model = families.load(comfy, wan, "fp8_e4m3fn", "fp8")
    for _ in range(2):
        families.replay(model, call)
    assert sum("no such product" in record.getMessage() for record in caplog.records) == 1
