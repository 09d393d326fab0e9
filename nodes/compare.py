"""Compare two images, such as those of two precisions."""

from comfy_api.latest import io

from ..precision.report.images import compare, compare_text, difference_image, result_of_images
from .inputs import MEASURE


class CompareImages(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeCompareImages",
            display_name="Compare Images (Halfsafe)",
            category=MEASURE,
            description=(
                "PSNR, largest error and SSIM of two images of the same size, and their difference as a picture."
            ),
            is_output_node=True,
            search_aliases=[
                "psnr", "ssim", "image difference", "compare precision", "before and after", "a/b", "diff", "quality",
            ],
            inputs=[
                io.Image.Input(
                    "reference",
                    tooltip="The image to compare with, for example from bf16. One image, or as many as candidates.",
                ),
                io.Image.Input(
                    "candidate", tooltip="The image to judge, of the same size, made with the same seed and settings."
                ),
            ],
            outputs=[io.String.Output(display_name="text"), io.Image.Output(display_name="difference")],
        )

    @classmethod
    def execute(cls, reference, candidate) -> io.NodeOutput:
        differences = compare(reference, candidate)
        picture, gain = difference_image(reference, candidate)
        text = compare_text(differences, gain)
        return io.NodeOutput(text, picture, ui=result_of_images(differences, text).ui())


NODES = [CompareImages]
