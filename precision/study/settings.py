"""Settings to try on a model: pairs of a storage and a compute option, as text, and which of them a device can do."""

from collections.abc import Container
from dataclasses import dataclass

from ..base.dtypes import COMPUTE_OPTIONS, QUANTIZED_NAMES, STORAGE_OPTIONS
from ..base.errors import HalfsafeError
from ..devices.detect import Device, why_no_fp8
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
        HalfsafeError: lines cannot be read, all of which it names, or there is none.
    """
    lines = ((number, line.partition("#")[0].strip()) for number, line in numbered_lines(text))
    found, problems, advice = [], [], []
    for number, line in ((number, line) for number, line in lines if line):
        storage, _, compute = (part.strip().lower() for part in line.partition("/"))
        found.append(Setting(storage, compute))
        for value, options, kind in ((storage, STORAGE_OPTIONS, "storage"), (compute, COMPUTE_OPTIONS, "compute")):
            if value not in options:
                problems.append(f"Candidates, line {number}, {line}: '{value}' is not a {kind} option.")
                advice.append(f"Use one of: {', '.join(options)} as {kind}.")
    if problems:
        raise HalfsafeError(" ".join(problems), " ".join(dict.fromkeys(advice)))
    if not found:
        raise HalfsafeError("There is no candidate to measure.", FORM)
    return list(dict.fromkeys(found))


def why_not(setting: Setting, device: Device, formats: Container[str] = QUANTIZED_NAMES) -> str:
    """Say why a device, or a ComfyUI with these formats, cannot run a setting; empty where the setting can run.

    A CPU emulates 16 bit, slowly, and is measured all the same.
    """
    needed = {"fp8": "fp8_matmul", "int8": "int8_matmul"}.get(setting.compute, "")
    if setting.compute in ("fp16", "bf16", SAFE) and device.profile.type != "cpu":
        needed = setting.compute.removesuffix("_safe")
    if needed and not device.capabilities[needed]:
        return f"not on {device.label}: {device.reason(needed)}"
    return why_no_fp8(setting.storage, device) or why_not_held(setting.storage, formats)
