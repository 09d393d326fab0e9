"""What the page shows below a text of rules while it is written: the lines that cannot be read."""

from aiohttp import web
from server import PromptServer

from ...precision.plan.rules import read

ROUTE = "/halfsafe/rules"


def serve_rules() -> None:
    """Let ComfyUI's server read a text of rules for the page."""
    if server := getattr(PromptServer, "instance", None):
        server.routes.post(ROUTE)(_answer)


async def _answer(request: web.Request) -> web.Response:
    rules, wrong = read(await request.text())
    mistakes = [{"line": error.line, "mistake": error.mistake, "advice": error.advice} for error in wrong]
    return web.json_response({"count": len(rules), "mistakes": mistakes})
