"""The two nodes of Qwen-Image 2.1 as their ComfyUI (0.37.2) declares them, for one that has not got them: a page and its check of prompts need no more.

ComfyUI leaves a pack's node out where it has one of that name itself.
"""

from comfy_api.latest import ComfyExtension, io

NAMES = [f"image_{number}" for number in range(1, 17)]


class TextEncodeQwenImage21(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TextEncodeQwenImage21",
            display_name="Text Encode Qwen Image 2.1",
            inputs=[
                io.Clip.Input("clip"),
                io.String.Input("prompt", multiline=True, dynamic_prompts=True),
                io.String.Input("negative_prompt", multiline=True, dynamic_prompts=True),
                io.Vae.Input("vae", optional=True),
                io.Int.Input("resolution", default=1024, min=0, max=4096, step=32),
                io.Autogrow.Input(
                    "images", template=io.Autogrow.TemplateNames(io.Image.Input("image"), names=NAMES, min=0)
                ),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
                io.Latent.Output(display_name="latent"),
            ],
        )

    @classmethod
    def execute(cls, **_: object) -> io.NodeOutput:
        raise NotImplementedError


class QwenImage21Cache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QwenImage21Cache",
            display_name="Qwen Image 2.1 Cache",
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input("device", options=["auto", "gpu", "cpu", "off"], default="auto"),
                io.Combo.Input("dtype", options=["default", "int8", "int4"], default="default"),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, **_: object) -> io.NodeOutput:
        raise NotImplementedError


class Nodes(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TextEncodeQwenImage21, QwenImage21Cache]


async def comfy_entrypoint() -> Nodes:
    return Nodes()
