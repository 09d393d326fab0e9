"""What the nodes share: their category and the socket type of rules."""

from comfy_api.latest import io

CATEGORY = "precision"
RulesType = io.Custom("HALFSAFE_RULES")
