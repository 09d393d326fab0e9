"""What LoRAs beside 8-bit weights cost in a call, and what is left of that where those that outweigh a layer are merged.

Counted on fake CUDA tensors: the kernels of a bf16 call of ComfyUI's own model, and those that the pack's own code runs beside each
Linear of its blocks. Times are estimated as in cost.py; a product in 8 bits is taken to run at twice the speed of one in 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

from .cost import Counted, _base_model, _costs, _executed, _marked_attention
from .cost_cards import CARDS, Kernel
from .large_models import BUILD

MODELS = ("Flux", "Qwen-Image", "Wan 14B", "SDXL")
SHOWN = ("4090", "H100")
COUNTS, RANKS = (1, 4, 8), (16, 64, 128, 256)
OUTSIDE_OF_BLOCKS = ("img_in", "txt_in", "time", "guidance", "vector", "final_layer", "proj_out", "norm_out", "head", "patch", "text_embedding", "label_emb", "emb_layers", "mod", "adaln")  # fmt: skip


def counted_rows() -> list[dict]:
    """A row for each model and rank: kernels and estimated seconds beside, and as chosen, to those without LoRAs."""
    return [row for name in MODELS for row in _rows_of(name)]


def _rows_of(name: str) -> Iterator[dict]:
    from halfsafe.precision.arithmetic.merging import outweighs

    plain, shapes = _plain(name)
    for summed in sorted({count * rank for count in COUNTS for rank in RANKS}):
        beside = {layer: _beside(layer, summed, *shape) for layer, shape in shapes.items()}
        left = {layer: kernels for layer, kernels in beside.items() if not outweighs(summed, shapes[layer][:2])}
        row = {"model": name, "rank": summed, "layers": len(shapes), "merged": len(shapes) - len(left)}
        row["kernels_a_layer"] = max(map(len, beside.values()))
        row["factors_to_weights"] = round(_numbers(summed, shapes) * 2 / sum(n * k for n, k, _ in shapes.values()), 2)
        for product in ("16 bit", "8 bit"):
            kernels = [_in_8_bits(kernel, shapes) if product == "8 bit" else kernel for kernel in plain]
            base = Counted(kernels, 0)
            for way, found in (("beside", beside), ("chosen", left)):
                added = Counted([*kernels, *(one for own in found.values() for one in own)], 0)
                row[f"{way}, {product}"] = {card: round(added.seconds(CARDS[card]) / base.seconds(CARDS[card]), 3) for card in SHOWN}
                row[f"kernels, {way}"] = len(added.kernels) - len(plain)
        yield row


def _numbers(rank: int, shapes: dict) -> int:
    return sum(rank * (outputs + inputs) for outputs, inputs, _ in shapes.values())


def _in_8_bits(kernel: Kernel, shapes: dict) -> Kernel:
    return replace(kernel, flops=kernel.flops // 2) if kernel.kind == "product" and kernel.layer in shapes else kernel


def _plain(name: str) -> tuple[list[Kernel], dict[str, tuple[int, int, int]]]:
    """A call without LoRAs: its kernels, and (outputs, inputs, rows of the input) of each Linear in its blocks."""
    import torch
    from support.fake_cuda import AnsweredReads, attention_of_a_gpu
    from torch._subclasses.fake_tensor import FakeTensorMode

    from .cost_kernels import rope_in_one_kernel

    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes, attention_of_a_gpu(), _marked_attention(), rope_in_one_kernel(), AnsweredReads(1.0), torch.no_grad():
        import comfy.ops

        with torch.device("cuda"):
            inner, x, given = BUILD[name](device="cuda", dtype=torch.float16, operations=comfy.ops.manual_cast)
        run = _executed(_base_model(inner), "fp16")
        given = {key: value.to(torch.float16) for key, value in given.items()}
        with _costs(inner).watching() as costs:
            run(x.to(torch.float16), torch.empty(x.shape[0], device="cuda"), **given)
        linear = {layer: module for layer, module in inner.named_modules() if isinstance(module, torch.nn.Linear) and layer in costs.inputs}
    inside = {layer: module for layer, module in linear.items() if not any(part in layer for part in OUTSIDE_OF_BLOCKS)}
    return costs.seen, {layer: (*module.weight.shape, costs.inputs[layer] // module.in_features) for layer, module in inside.items()}


_known: dict[tuple, list[Kernel]] = {}


def _beside(layer: str, rank: int, outputs: int, inputs: int, rows: int) -> list[Kernel]:
    """The kernels that the pack's code runs beside one layer."""
    shape = rank, outputs, inputs, rows
    if shape not in _known:
        _known[shape] = _run_beside(*shape)
    return [replace(kernel, layer=layer) for kernel in _known[shape]]


def _run_beside(rank: int, outputs: int, inputs: int, rows: int) -> list[Kernel]:
    import torch
    from halfsafe.nodes.host.lora.low_rank import LowRankLayer, _linear
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), torch.no_grad():
        made = LowRankLayer(SimpleNamespace(weight=torch.empty(outputs, inputs), forward=None), [])
        made.down, made.up = (_linear(torch.empty(shape, dtype=torch.bfloat16)) for shape in ((rank, inputs), (outputs, rank)))
        made.hold(torch.empty(rank), torch.empty(rank), torch.empty(()))
        x, result = (torch.empty(rows, width, dtype=torch.bfloat16) for width in (inputs, outputs))
        costs = _costs(torch.nn.Module())
        with costs.watching():
            made(x, result)
    return costs.seen


def markdown(rows: list[dict]) -> str:
    """The rows as a table, for the cards shown."""
    cards = " / ".join(SHOWN)
    lines = [
        f"| model | summed rank | merged | kernels beside, chosen | factors to weights | 16-bit products: beside | chosen | 8-bit products: beside ({cards}) | chosen |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = " | ".join(" / ".join(f"{row[f'{way}, {product}'][card]:.2f}" for card in SHOWN) for product in ("16 bit", "8 bit") for way in ("beside", "chosen"))
        kernels = f"{row['kernels, beside']}, {row['kernels, chosen']}"
        lines.append(f"| {row['model']} | {row['rank']} | {row['merged']} of {row['layers']} | {kernels} | {row['factors_to_weights']} | {times} |")
    return "\n".join(lines)
