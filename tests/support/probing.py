"""Probes are run once per process: what tests need to have them run again, and to hold a device to its profile."""

import importlib


def forget_probes() -> None:
    """Run the probes again at the next request."""
    probes = importlib.import_module("halfsafe.precision.devices.probes")
    probes._kept.clear()


def missed_expectations(device) -> list[str]:
    """A line for each failed probe of a capability that the device's profile has; ``Device.capabilities`` has lost it by then."""
    detect = importlib.import_module("halfsafe.precision.devices.detect").detect
    probes_of = importlib.import_module("halfsafe.precision.devices.profiles").CAPABILITIES
    found = detect(device)
    failed = {probe.name: probe.detail for probe in found.probes if probe.ok is False}
    expected = [name for name, on in found.profile.capabilities.items() if on]
    return [
        f"{name}: {probe}: {failed[probe]}" for name in expected for probe in probes_of[name][2:] if probe in failed
    ]
