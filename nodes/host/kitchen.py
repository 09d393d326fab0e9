"""Let comfy-kitchen log once why a quantized product could not run as such, and not at every product."""

import logging

LOGGERS = ("comfy_kitchen.tensor.fp8", "comfy_kitchen.tensor.mxfp8", "comfy_kitchen.tensor.nvfp4")


class Once(logging.Filter):
    """Let each message through the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in self.seen
        self.seen.add(text)
        return new


_once = Once()


def warn_once() -> None:
    """Pass on the warnings of comfy-kitchen's ``scaled_mm`` fallbacks (``tensor/fp8.py`` and others) once each.

    It warns at every product: some hundred times a step where a profile of another device is simulated.
    """
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_once)
