"""Settings to try on a model: pairs of a storage and a compute option, as text, and which of them a device can do."""

from collections.abc import Container
from dataclasses import dataclass

from ..devices.detect import Device, why_no_fp8
from ..dtypes import COMPUTE_OPTIONS, QUANTIZED_NAMES, STORAGE_OPTIONS
from ..errors import CandidateError, HalfsafeError
from ..plan.compute import SAFE
from ..plan.rules import numbered_lines
from ..plan.weights import why_not_held

DEFAULT_SETTINGS = """\
auto/auto
auto/fp16_safe
as_file/bf16
as_file/fp16
int8/auto
fp8_e4m3fn/auto
fp8_e4m3fn/fp8"""
FORM = "Write: <storage>/<compute>, e.g. int8/auto."


@dataclass(frozen=True)
class Setting:
    """A loader's two options: what weights are stored in, and what is computed in."""

    storage: str
    compute: str

    def __str__(self) -> str:
        return f"{self.storage}/{self.compute}"


def settings_from(text: str) -> list[Setting]:
    """Read settings, one ``storage/compute`` per line, each once. Empty lines and ``#`` comments are skipped.

    Raises:
        CandidateError: a line cannot be read; it carries the line's number.
        HalfsafeError: there is no setting.
    """
    lines = ((number, line.partition("#")[0].strip()) for number, line in numbered_lines(text))
    found = list(dict.fromkeys(_setting(number, line) for number, line in lines if line))
    if not found:
        raise HalfsafeError("There is no candidate to measure.", FORM)
    return found


def _setting(number: int, line: str) -> Setting:
    parts = [part.strip().lower() for part in line.split("/")]
    if len(parts) != 2:
        raise CandidateError(number, f"'{line}' is not a storage and a compute dtype", FORM)
    for value, options, kind in zip(parts, (STORAGE_OPTIONS, COMPUTE_OPTIONS), ("storage", "compute"), strict=True):
        if value not in options:
            raise CandidateError(number, f"'{value}' is not a {kind} option", f"Use one of: {', '.join(options)}.")
    return Setting(*parts)


def why_not(setting: Setting, device: Device, formats: Container[str] = QUANTIZED_NAMES) -> str:
    """Say why a device, or a ComfyUI with these formats, cannot do what a setting asks for; empty where it can.

    A CPU emulates 16 bit, slowly: there it is measured all the same.
    """
    needed = {"fp8": "fp8_matmul", "int8": "int8_matmul"}.get(setting.compute, "")
    if setting.compute in ("fp16", "bf16", SAFE) and device.profile.type != "cpu":
        needed = setting.compute.removesuffix("_safe")
    missing = needed if needed and not device.capabilities[needed] else ""
    if missing:
        return f"not on {device.label}: {device.reason(missing)}"
    return why_no_fp8(setting.storage, device) or why_not_held(setting.storage, formats)
