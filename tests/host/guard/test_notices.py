"""What a guard sends the page: fields that the page draws without reading the sentences in them."""

import pytest
from halfsafe.nodes.host.guard import notices
from halfsafe.precision.base.message import Message, joined
from halfsafe.precision.check import drift
from halfsafe.precision.guard.verdicts import COMPILED, ENCODERS, NAN_GUARD, OTHERWISE, VERDICTS

LINES = [
    (VERDICTS["bad_weights"].advice, "Remove the file or download it again."),
    (VERDICTS["not_precision"].advice, "Try another sampler, more steps or a lower cfg."),
    (ENCODERS["VAE"].advice["not_precision"], "Try another file, or run it on the CPU."),
    (ENCODERS["Text encoder"].advice["device_fault"], "Try another driver or torch."),
    (ENCODERS["VAE"].broken_off, "Instead, load the VAE with dtype bf16 or fp32."),
    (COMPILED, "Remove the compile node, or compile with another backend."),
    (OTHERWISE, ""),
    (Message(drift.ADVICE["fp8"], block="blocks.0."), ""),
    (joined([Message("Use {0}.", "fp32"), "Or version 2.0 of it."]), "Use fp32."),
    ("", ""),
]
"""Advice -> what the card says of it in a line: all of it is behind Why."""


@pytest.mark.parametrize(("advice", "line"), LINES)
def test_advice_is_sent_with_its_line(comfy, monkeypatch, advice: str, line: str) -> None:
    sent = []
    monkeypatch.setattr(notices, "send", lambda event, data: sent.append(data))
    notices.guard_log("retry_higher", "1").notify("verdict", "stopped", "It failed.", NAN_GUARD.worded(advice))
    assert [(data["advice"], data["line"]) for data in sent] == [(advice, line)]
