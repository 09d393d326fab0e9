"""A whole model of ComfyUI compiled on fake CUDA tensors, which need no GPU, with the options of ComfyUI's own node."""

import re
import types

import torch
from halfsafe.nodes.host.comfyui.layers import matrix_layers
from halfsafe.nodes.host.compute.attention import attending
from halfsafe.nodes.host.compute.executor import PlannedModel
from halfsafe.nodes.host.replay.call import Call
from halfsafe.precision.base.patching import patched
from halfsafe.precision.plan.choice import Choice
from halfsafe.precision.plan.compute import ComputeDecision, ComputePlan
from support.fake_tensors import fake_cuda_tensors
from support.guarding import core
from torch._dynamo.utils import counters

CONFIG = dict(patch_size=(1, 2, 2), in_dim=16, out_dim=16, dim=256, ffn_dim=512, num_heads=2, num_layers=2, text_dim=64)


def wan_on_cuda():
    """ComfyUI's Wan model with fp16 weights, the batch of a call, and the plan of all its layers."""
    model = torch.nn.Module()
    with torch.device("cuda"):
        build = core("comfy.ldm.wan.model").WanModel
        model.diffusion_model = build(**CONFIG, device="cuda", dtype=torch.float16, operations=core("comfy.ops").manual_cast)
        call = torch.empty(1, 16, 1, 8, 8), torch.empty(1), torch.empty(1, 16, 64)
    decisions = {name: ComputeDecision("fp16_wide", "fp32", "") for name, _ in matrix_layers(model)}
    return model, call, ComputePlan(Choice("fp16_safe", "fp16_safe"), decisions)


def seen(run, device):
    """What the first call would find, without numbers to find it from."""
    for proof in run.calibration.proofs.values():
        proof.recorder.device, proof.gain = device, 1.0
    run.attention.calls_in_fp32 = [False] * 4
    run.calibration._place(None)
    run.calibration.calibrating = False


def test_one_graph_whose_products_have_fp16_operands_and_fp32_results(comfy, one_graph):
    graphs = []

    def kept(graph, _):
        graphs.append(graph)
        return graph

    with fake_cuda_tensors(), torch.inference_mode():
        model, (x, t, text), plan = wan_on_cuda()
        run = PlannedModel(plan, model)
        seen(run, x.device)
        options = {"guard_filter_fn": core("comfy_extras.nodes_torch_compile").skip_torch_compile_dict}
        compiled = torch.compile(model.diffusion_model, backend=kept, options=options)
        re.purge()  # torch traces through it only where the pattern is in its cache
        executor = types.SimpleNamespace(class_obj=types.SimpleNamespace(diffusion_model=model.diffusion_model))
        call = Call(executor, x, t, transformer_options={"sigmas": t})
        with patched(run.patches), attending(call.model, call, run.attend):
            result = compiled(x, t, context=text, transformer_options=call.options)
    assert result.device.type == "cuda" and result.dtype == torch.float32
    assert len(graphs) == 1 and sum(counters["graph_break"].values()) == 0
    nodes = graphs[0].graph.nodes
    wide = [node for node in nodes if node.target is torch.mm and node.kwargs.get("out_dtype") == torch.float32]
    linear = [name for name, decision in plan.decisions.items() if "patch_embedding" not in name]
    assert len(wide) == len(linear)
    assert {argument.meta["example_value"].dtype for node in wide for argument in node.args} == {torch.float16}
    assert not any(node.target is torch.nn.functional.linear for node in nodes)
    attentions = [node for node in nodes if "scaled_dot_product_attention" in str(node.target)]
    assert len(attentions) == 4 and {node.args[0].meta["example_value"].dtype for node in attentions} == {torch.float16}
