"""Schemas of nodes with their English words, inputs that several nodes have, and the socket types of rules."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..precision.base.errors import HalfsafeError
from ..precision.base.message import Message
from ..precision.base.options import COMPUTE_OPTIONS, STORAGE_OPTIONS
from ..precision.check.drift import CHECKS
from ..precision.guard.policy import ON_NAN
from ..precision.make.calibration import CalibrationData
from ..precision.plan.rules import Rules
from .host.comfyui.page import refusal

CATEGORY = "precision"
LOAD = f"{CATEGORY}/load"
GUARD = f"{CATEGORY}/guard"
MEASURE = f"{CATEGORY}/measure"
EXPERT = f"{CATEGORY}/expert"
RulesType = io.Custom("HALFSAFE_RULES")
CalibrationType = io.Custom("HALFSAFE_CALIBRATION")
WORDS = json.loads((Path(__file__).parents[1] / "locales/en/nodeDefs.json").read_text(encoding="utf-8"))


def schema(node_id: str, category: str, **parts: Any) -> io.Schema:
    """Make the schema of a node, with the English names, description and tooltips of ``locales/en/nodeDefs.json``."""
    words = WORDS[node_id]
    for given in parts["inputs"]:
        given.tooltip = words["inputs"][given.id]["tooltip"]
    for place, output in enumerate(parts["outputs"]):
        output.display_name = words["outputs"][str(place)]["name"]
    return io.Schema(node_id, words["display_name"], category, description=words["description"], **parts)


def storage_input(name: str = "storage", default: str = "auto") -> io.Combo.Input:
    return io.Combo.Input(name, options=list(STORAGE_OPTIONS), default=default)


def compute_input() -> io.Combo.Input:
    return io.Combo.Input("compute", options=list(COMPUTE_OPTIONS), default="auto")


def rules_input() -> io.Input:
    return RulesType.Input("rules", optional=True)


def on_nan_input(name: str = "on_nan", options: tuple[str, ...] = ON_NAN, optional: bool = False) -> io.Combo.Input:
    return io.Combo.Input(name, options=list(options), default="retry_higher", optional=optional)


def seed_input() -> io.Int.Input:
    return io.Int.Input("seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=False)


def check_input() -> io.Combo.Input:
    return io.Combo.Input("check", options=list(CHECKS), default="off", optional=True)


def node_id_of(cls: type[io.ComfyNode]) -> str | None:
    """Return the id of the node that is executed; None outside of a prompt."""
    return cls.hidden.unique_id if cls.hidden else None


def validated(read: Callable[[str], object], text: str) -> bool | str:
    """Return True if a node's text can be read; else the message of its first mistake, as ``validate_inputs`` does."""
    try:
        read(text)
    except HalfsafeError as error:
        return refusal(error)
    return True


def checked_rules(rules: object, name: str = "rules") -> Rules | None:
    """Return the value of an input of rules; None if nothing is connected."""
    given = type(rules).__name__
    problem = Message("The input '{0}' takes the output of Layer Rules (Halfsafe), not a {1}.", name, given)
    return _checked(rules, Rules, problem, "Connect a Layer Rules node and write the rules into its text box.")


def checked_calibration(calibration: object) -> CalibrationData | None:
    """Return the value of an input of a calibration; None if nothing is connected."""
    problem = Message("This takes the output of Calibrate (Halfsafe), not a {0}.", type(calibration).__name__)
    advice = "Connect a Calibrate node; a saved calibration file is for convert --calibration."
    return _checked(calibration, CalibrationData, problem, advice)


def _checked(value, cls: type, problem: str, advice: str):
    """Return a value of a socket of ours, or raise: ComfyUI's API lets other types through."""
    if value is None or isinstance(value, cls):
        return value
    raise HalfsafeError(problem, advice)
