"""Compare two images, such as those of two precisions."""

from comfy_api.latest import io

from ..precision.report.images import compare, difference_image, result_of_images
from .inputs import MEASURE, schema


class CompareImages(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeCompareImages",
            MEASURE,
            is_output_node=True,
            search_aliases=[
                "psnr",
                "ssim",
                "image difference",
                "compare precision",
                "before and after",
                "a/b",
                "diff",
                "quality",
            ],
            inputs=[io.Image.Input("reference"), io.Image.Input("candidate")],
            outputs=[io.String.Output(), io.Image.Output()],
        )

    @classmethod
    def execute(cls, reference, candidate) -> io.NodeOutput:
        differences = compare(reference, candidate)
        picture, gain = difference_image(reference, candidate)
        result = result_of_images(differences, gain)
        return io.NodeOutput(result.text, picture, ui=result.ui())


NODES = [CompareImages]
