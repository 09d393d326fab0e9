"""A pack with a route that tells what ComfyUI's own check of prompts says of each, and runs none."""

import execution
from aiohttp import web
from server import PromptServer

NODE_CLASS_MAPPINGS: dict = {}


@PromptServer.instance.routes.post("/prompt_checks")
async def check_prompts(request: web.Request) -> web.Response:
    return web.json_response({"errors": [await _errors_of(prompt) for prompt in await request.json()]})


async def _errors_of(prompt: dict) -> dict[str, list[str]]:
    """Return what is wrong with each node of a prompt."""
    _, error, _, nodes = await execution.validate_prompt("checked", prompt, None)
    found = {node: [f"{one['type']}: {one['details']}" for one in told["errors"]] for node, told in nodes.items()}
    return found or ({"": [error["message"]]} if error else {})
