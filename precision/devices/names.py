"""Profile codes by the names that people know: ``rtx 3060`` is ``sm_86``."""

import os
import re

from ..base.errors import UnknownProfile
from .profiles import PROFILE_NAMES

_VENDORS = re.compile(
    r"nvidia|geforce|quadro|tesla|amd|radeon|instinct|intel|apple|graphics|laptop|gpu|pcie|sxm\d?|hbm\d?e?|"
    r"(workstation|server)?\s*edition|max-q|[^a-z0-9]"
)
_CALLED = (
    ("sm_61", r"gtx10[5-8]0(ti)?|titanx[mp]|p4|p40"),
    ("sm_70", r"titanv|v100s?|gv100"),
    ("sm_75", r"rtx20[5-8]0(super|ti)?|titanrtx|t4|rtx[3-8]000"),
    ("sm_80", r"a100|a800|a30"),
    ("sm_86", r"rtx30[5-9]0(super|ti)?|rtxa[2-6]\d00|a2|a10g?|a16|a40"),
    ("sm_89", r"rtx40[5-9]0(super|tisuper|ti|d)?|rtx[2-6]\d00ada(generation)?|l4|l40s?"),
    ("sm_90", r"h20|h100(nvl)?|h200(nvl)?|h800|gh200"),
    ("sm_100", r"g?b[123]00"),
    ("sm_120", r"rtx50[5-9]0(ti|d)?|rtxpro\d000(blackwell)?"),
    ("gfx90a", r"mi100|mi2[15]0x?"),
    ("gfx942", r"mi300[ax]?|mi325x"),
    ("gfx1100", r"rx7\d00(xtx|xt|gre)?|(pro)?w7\d00"),
    ("gfx1201", r"rx90[67]0(xt|gre)?|aipror9700"),
    ("mps_m1", r"m[12](pro|max|ultra)?"),
    ("mps_m3", r"m[3-9](pro|max|ultra)?"),
    ("xpu", r"arc([ab]\d\d0|prob\d\d)?|[ab](310|380|570|580|750|770)"),
)
EXAMPLES = "rtx 3060, rtx 4090, gtx 1080, t4, v100, a100, h100, rx 7900, arc b580, m2"
_MEMORY = re.compile(r"\b\d+ ?gi?b\b")


def code_of(name: str) -> str:
    """Find the profile code of a device's name, such as ``RTX 3060 12GB`` or ``sm_86``.

    Raises:
        UnknownProfile: no device of the table is called so; names the codes and some names.
    """
    if name.strip() in PROFILE_NAMES:
        return name.strip()
    plain = _VENDORS.sub("", _MEMORY.sub("", name.lower()))
    code = next((code for code, called in _CALLED if re.fullmatch(called, plain)), None)
    if code is None:
        advice = f"Use a code ({', '.join(PROFILE_NAMES)}) or a device's name, such as {EXAMPLES}."
        raise UnknownProfile(f"There is no device profile '{name}'.", advice)
    return code


def drop_wrong_name(variable: str) -> str | None:
    """Unset an environment variable that names no device and say so; None where it is right or not set."""
    name = os.environ.get(variable, "").strip()
    try:
        if name:
            code_of(name)
    except UnknownProfile as error:
        del os.environ[variable]
        return f"{variable}={name} is ignored. {error}"
    return None
