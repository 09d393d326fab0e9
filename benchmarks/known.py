"""Which bounds known beforehand hold real weights within fp16: `python -m benchmarks known [--json] [--save]`.

Of a trained diffusion UNet (trained.py): each convolution behind a GroupNorm and a SiLU, its bound for latents of 128 x 128 beside what
is allowed. Of the project's own trained HunyuanVideo, in ComfyUI: what a later call of `fp16_safe` measures, with and without what is known.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

import torch

from . import reporting
from .host import conditions, load_comfy
from .onnx_graph import Graph, Node, read_onnx
from .trained import TERRAIN, _wheel

GROUPS, SIZE, STEPS = 32, 128, 4


def convolutions(graph: Graph) -> dict[str, tuple[torch.Tensor, ...]]:
    """Convolution -> its weight and bias, and gamma and beta of the GroupNorm before its SiLU, of those that have one."""
    made = {name: node for node in graph.nodes for name in node.outputs}
    found = {}
    for node in graph.nodes:
        gated = made.get(node.inputs[0]) if node.op == "Conv" else None
        shifted = _before_silu(gated, made) if gated and gated.op == "Mul" else None
        scaled = next((made[name] for name in shifted.inputs if name in made), None) if shifted else None
        if scaled is None or scaled.op != "Mul":
            continue
        parameters = [next((graph.weights[name] for name in each.inputs if name in graph.weights), None) for each in (scaled, shifted)]
        weight, bias = (graph.weights[name] for name in node.inputs[1:3])
        if all(one is not None and one.numel() == weight.shape[1] for one in parameters):
            found[node.inputs[1]] = (weight, bias, *(one.flatten() for one in parameters))
    return found


def _before_silu(gated: Node, made: dict[str, Node]) -> Node | None:
    """What a SiLU, ``x * sigmoid(x)``, is of, where that is a sum."""
    nodes = [made[name] for name in gated.inputs if name in made]
    sigmoid = next((node for node in nodes if node.op == "Sigmoid"), None)
    before = made.get(sigmoid.inputs[0]) if sigmoid else None
    return before if before is not None and before.op == "Add" else None


def unet() -> dict:
    """The bounds of the trained UNet's convolutions."""
    from halfsafe.precision.arithmetic.bounds.value_bounds import after_conv, after_group_norm
    from halfsafe.precision.arithmetic.linear import WINOGRAD
    from halfsafe.precision.arithmetic.result_bound import RESULT_MARGIN
    from halfsafe.precision.dtypes import FP16_MAX

    files = zipfile.ZipFile(_wheel(TERRAIN))
    with tempfile.TemporaryDirectory() as folder:
        graph = read_onnx(Path(files.extract(next(name for name in files.namelist() if name.endswith(".onnx")), folder)))
    reached = []
    for weight, bias, gamma, beta in convolutions(graph).values():
        operand = after_group_norm(GROUPS, torch.Size((weight.shape[1], SIZE, SIZE)), gamma, beta)
        reached.append(max(after_conv(weight, bias, operand, zeros_around=True).largest, WINOGRAD * operand.largest))
    limit = FP16_MAX / RESULT_MARGIN
    return {"convolutions": len(reached), "fit": sum(one <= limit for one in reached), "largest_bound": round(max(reached)), "limit": limit}


def shapes_model(comfy) -> dict:
    """What one call of the project's trained model measures, and the difference that what is known makes to its result: none."""
    import shutil

    from halfsafe.nodes.host.run.compute import compute_of
    from halfsafe.precision.arithmetic.amax_buffer import Entry, Recorder
    from halfsafe.precision.arithmetic.bounds.known_values import KnownValues
    from support import families, shapes

    shutil.copy(shapes.MODEL, comfy.folder)
    model = families.load(comfy, comfy.folder / shapes.MODEL.name, "as_file", "fp16_safe")
    given = shapes.conditioning(comfy.folder)
    with torch.inference_mode():
        sampled = lambda: families.sample(model, "hunyuan_video", STEPS, given, size=shapes.SIZE // 8)  # noqa: E731
        sampled()
        run = compute_of(model).runs.of(model.model)
        counts, results = [], []
        for known in (True, False):
            measured: list[int] = []
            spies = [mock.patch.object(owner, name, _counted(getattr(owner, name), measured)) for owner, name in ((Entry, "write_amax"), (Entry, "write_row_norm"), (Recorder, "record"))]  # fmt: skip
            blind = [] if known else [mock.patch.object(KnownValues, "covers", lambda *_: False), mock.patch.object(KnownValues, "of", lambda *_: None)]
            with _all(*spies, *blind):
                results.append(sampled())
            counts.append(len(measured) / STEPS)
        covered = sum(operation.scale.covered is not None for operation in run.layers.operations.values())
    return {
        "layers": len(run.layers.operations), "layers_known": covered, "attentions": len(run.attention.bounds),
        "measured": counts[0], "measured_without": counts[1], "same_bits": torch.equal(*results), "repeats": run.calibration.repeats,
    }  # fmt: skip


def _counted(own, measured: list[int]):
    return lambda self, x, *rest: (measured.append(x.numel()), own(self, x, *rest))[1]


def _all(*patches):
    from contextlib import ExitStack

    stack = ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def as_text(result: dict) -> str:
    """A line for each model."""
    u, s = result["unet"], result["shapes"]
    return (
        f"UNet: {u['fit']} of {u['convolutions']} convolutions fit, the largest bound {u['largest_bound']} of {u['limit']:.0f}\n"
        f"shapes: {s['layers_known']} of {s['layers']} layers are known, {s['measured']} measurements a call in place of {s['measured_without']}"
    )


def main() -> int:
    """Print both, and save them where asked."""
    parser = reporting.parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args: argparse.Namespace = parser.parse_args()
    comfy = load_comfy(args)
    found = {"unet": unet(), "shapes": shapes_model(comfy)}
    targets = {
        "convolutions that do not fit": reporting.target(found["unet"]["convolutions"] - found["unet"]["fit"], 0),
        "measurements to those without": reporting.target(round(found["shapes"]["measured"] / found["shapes"]["measured_without"], 3), 0.5),
    }
    return reporting.told(conditions(args) | {"benchmark": "known", **found, "targets": targets}, args, as_text)


if __name__ == "__main__":
    sys.exit(main())
