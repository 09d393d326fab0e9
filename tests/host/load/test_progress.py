"""What ComfyUI logs while it builds a model for us to look at is dropped; nothing else is."""

import logging
import threading

import pytest


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_only_what_comfyui_says_in_this_thread_is_dropped(comfy, said, caplog):
    from halfsafe.nodes.host.load.progress import quiet

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
