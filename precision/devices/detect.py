"""The device of this machine, or the profile asked for, and its capabilities, confirmed by
probes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ..base.errors import UnknownProfile
from ..base.message import Message, ended
from ..formats.registry import fp8_dtypes
from .hardware import default_device, hardware_name, profile_of
from .probes import Probe, run_probes, why_dtype_not_held
from .profiles import CAPABILITIES, OCP_FP8, DeviceProfile, profile_named

PROFILE_VARIABLE = "HALFSAFE_DEVICE_PROFILE"


@dataclass(frozen=True)
class Device:
    """A real device and the profile every decision follows.

    Args:
        name: the hardware's own name, also when another profile is simulated.
        simulated: the profile was asked for; nothing was probed.
        capabilities: capability -> table and probes together.
        reasons: capability -> one sentence.
    """

    torch_device: torch.device
    name: str
    profile: DeviceProfile
    simulated: bool = False
    probes: tuple[Probe, ...] = ()
    capabilities: Mapping[str, bool] = field(default_factory=dict, compare=False)
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        """Return the common name of this kind of device."""
        return self.profile.label

    def reason(self, capability: str) -> str:
        """Return why a capability is on or off."""
        return self.reasons[capability]

    def refuses(self, storage: str) -> str:
        """Return why the device cannot hold weights in a storage; "" if it can.

        Apple's GPUs hold fp8 weights, and cast no fp8 scales of blocks below torch 2.15. DirectML
        has no bf16 (microsoft/DirectML #688).
        """
        if storage == "bf16":
            error = "" if self.simulated else why_dtype_not_held(self.torch_device, storage)
            return error and Message("{0} cannot hold bf16 ({1})", self.name, error)
        dtypes, why = fp8_dtypes(storage), ""
        if dtypes and not self.capabilities["fp8_storage"]:
            why = self.reason("fp8_storage")
        elif not self.simulated:
            of_blocks = not storage.startswith("fp8")
            errors = ((name, why_dtype_not_held(self.torch_device, name, of_blocks)) for name in dtypes)
            found = next(((name, error) for name, error in errors if error), ())
            if found and of_blocks:
                why = Message("torch does not cast the {0} scales of blocks there ({1}).", *found)
            elif found:
                why = Message("It does not support {0} ({1}).", *found)
        return why and Message("not on {0}: {1}", self.label, why)

    def without(self, capability: str, reason: str) -> "Device":
        """Return the device without a capability and without those that need it. ``reason``: known
        to the caller, not to the table or the probes."""
        off = [name for name, (_, _, *needs) in CAPABILITIES.items() if capability in (name, *needs)]
        reasons = {**self.reasons, **dict.fromkeys(off, reason)}
        return replace(self, capabilities={**self.capabilities, **dict.fromkeys(off, False)}, reasons=reasons)


def detect(device: torch.device | None = None, profile: str | None = None) -> Device:
    """Detect a device, its profile and its probed capabilities.

    ``device``: by default the accelerator, else the CPU. ``profile``: by default
    ``HALFSAFE_DEVICE_PROFILE``.

    Raises:
        UnknownProfile: no such profile; names the environment variable when it came from there.

    Example:
        >>> from halfsafe.precision.devices.detect import detect
        >>> card = detect(profile="sm_86")
        >>> card.label, card.capabilities["fp8_matmul"]
        ('RTX 30xx (Ampere)', False)
        >>> card.reason("fp8_matmul")
        'No fp8 matmul units; fp8 weights are widened to 16 bit before the matmul.'
    """
    device = _indexed(device or default_device())
    if requested := profile_named(profile) if profile else requested_profile():
        return _confirmed(device, requested, simulated=True)
    row = profile_of(device)
    probes = run_probes(device, row.fp8_formats[0] if row.fp8_formats else OCP_FP8[0])
    return _confirmed(device, row, probes)


def _indexed(device: torch.device) -> torch.device:
    """Return the same device with its index, so that ``cuda`` and ``cuda:0`` are probed once."""
    device = torch.device(device)
    if device.index is not None or device.type not in ("cuda", "xpu"):
        return device
    return torch.device(device.type, getattr(torch, device.type).current_device())


def requested_profile() -> DeviceProfile | None:
    """Read the profile that ``HALFSAFE_DEVICE_PROFILE`` asks for; None when it is not set."""
    name = os.environ.get(PROFILE_VARIABLE, "").strip()
    if not name:
        return None
    try:
        return profile_named(name)
    except UnknownProfile as error:
        raise UnknownProfile(Message("{0}={1}: {2}", PROFILE_VARIABLE, name, error.problem), error.advice) from None


def drop_wrong_profile() -> str | None:
    """Unset ``HALFSAFE_DEVICE_PROFILE`` where it names no device, and say so; None where it is
    right or not set."""
    try:
        requested_profile()
    except UnknownProfile as error:
        del os.environ[PROFILE_VARIABLE]
        return Message("{0} The variable is ignored.", error)
    return None


def _confirmed(
    device: torch.device, profile: DeviceProfile, probes: tuple[Probe, ...] = (), simulated: bool = False
) -> Device:
    capabilities = profile.capabilities
    reasons = {capability: profile.reason(capability) for capability in capabilities}
    failed = {probe.name: ended(probe.detail) for probe in probes if probe.ok is False}
    for capability in (name for name, on in capabilities.items() if on):
        if probe := next((name for name in failed if name in CAPABILITIES[capability][2:]), ""):
            capabilities[capability] = False
            reasons[capability] = Message("Expected here, but the probe {0} failed: {1}", probe, failed[probe])
    return Device(device, hardware_name(device), profile, simulated, probes, capabilities, reasons)
