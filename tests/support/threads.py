"""Calls from several threads that are switched as often as Python can."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


def in_threads(call: Callable[[], Any], threads: int = 4, times: int = 30) -> list:
    """Return what each call gave or raised."""
    found: list = []

    def run():
        for _ in range(times):
            try:
                found.append(call())
            except Exception as error:
                found.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    running = [threading.Thread(target=run) for _ in range(threads)]
    try:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    return found
