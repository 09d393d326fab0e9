"""Choose the arithmetic of a model that is loaded already."""

from comfy_api.latest import io

from ..precision.base.options import GOALS
from ..precision.guard.policy import OFF, ON_NAN
from ..precision.plan.goal import NO_RULES
from ..precision.plan.rules import Rules, rules_from
from .host.check.drift import checking
from .host.guard import planned
from .host.guard.encoders import guard_clip, guard_vae
from .host.guard.model import MAX_RETRIES, with_guard
from .host.load.at_hand import AS_LOADED, STORAGES_AT_HAND, held_on_device, offered_in_int8, quantized_at_hand
from .host.reporting.badge import model_ui, with_live_report
from .host.reporting.halved import storage_ui
from .inputs import (
    CATEGORY,
    EXPERT,
    check_input,
    checked_rules,
    compute_input,
    node_id_of,
    on_nan_input,
    rules_input,
    schema,
)


class ComputeDtype(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeComputeDtype",
            EXPERT,
            search_aliases=[
                "bf16",
                "fp16 safe",
                "black image",
                "old gpu",
                "manual cast",
                "compute dtype",
                "fp16",
                "precision",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model"),
                compute_input(),
                rules_input(),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, compute, rules=None) -> io.NodeOutput:
        model = held_on_device(model)
        model = planned.with_compute(model, compute, checked_rules(rules) or Rules())
        return io.NodeOutput(model, ui=model_ui(model))


class AutoPrecision(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeAutoPrecision",
            CATEGORY,
            search_aliases=[
                "black image",
                "nan",
                "auto precision",
                "auto dtype",
                "halfsafe",
                "best precision",
                "noise",
                "fp8",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("goal", options=list(GOALS), default="balanced"),
                io.Clip.Input("clip", optional=True),
                io.Vae.Input("vae", optional=True),
                rules_input(),
                on_nan_input("guard", (*ON_NAN, OFF), optional=True),
                check_input(),
                io.Combo.Input("storage", options=list(STORAGES_AT_HAND), default=AS_LOADED, optional=True),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Model.Output(),
                io.Clip.Output(),
                io.Vae.Output(),
                io.String.Output(),
            ],
        )

    @classmethod
    def execute(
        cls, model, goal, rules=None, guard="retry_higher", check=OFF, storage=AS_LOADED, **encoders
    ) -> io.NodeOutput:
        # What a loader did not find is None; an input without a link is not given at all.
        node_id = node_id_of(cls)
        clip = encoders.get("clip")
        vae = encoders.get("vae")
        given = checked_rules(rules)
        model = held_on_device(model)
        stored = ""
        told = {}
        if storage != AS_LOADED:
            loaded = model
            model, stored = quantized_at_hand(loaded, storage, given or rules_from())
            told = storage_ui(loaded, model, stored)
        elif goal == "speed":
            told = offered_in_int8(model, given or rules_from())
        model, vae, why = planned.with_goal(model, goal, clip, vae, given or NO_RULES, encoders)
        why = "\n".join(filter(None, (why, stored and f"storage: {stored}")))
        if guard != OFF:
            model = with_guard(model, guard, MAX_RETRIES, node_id, checking(check, model, node_id))
            clip = guard_clip(clip, guard, node_id) if "clip" in encoders else None
            vae = guard_vae(vae, guard, node_id) if "vae" in encoders else None
        model, shown = with_live_report(model, node_id)
        words = model_ui(model, "guarded" if guard != OFF else None)
        return io.NodeOutput(model, clip, vae, why, ui=words | shown | told)


NODES = [ComputeDtype, AutoPrecision]
