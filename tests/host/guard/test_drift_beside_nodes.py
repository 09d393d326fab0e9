"""The check and the guard beside nodes of ComfyUI that change or record attention, and beside an IP-Adapter's kind of patch."""

import pytest
import torch
from halfsafe.nodes.host.facts.layers import activation_dtype
from support import families
from support.guarding import core, guarded, is_finite, loaded_once, report_of
from support.measures import relative_error

STEPS = 2
MIDDLE = ("middle", 0, 0)


@pytest.fixture(scope="module")
def models(comfy, models_dir):
    return loaded_once(comfy, families.files_in(models_dir / "diffusion_models", "beside"))


def node(module: str, name: str, model, *args, **kwargs):
    """The model that a node of ComfyUI's gives."""
    return getattr(core(f"comfy_extras.{module}"), name).execute(model, *args, **kwargs)[0]


class Adapter:
    """A patch as IP-Adapters have: layers in the model's dtype beside a block's own, a weight that falls with each call,
    and what it made last."""

    def __init__(self, dtype):
        self.image = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(6)).to(dtype)
        self.weights = {}
        self.calls, self.last = 0, None

    def layer(self, name, width):
        if name not in self.weights:
            weight = torch.randn(width, 32, generator=torch.Generator().manual_seed(7)) / 6
            self.weights[name] = weight.to(self.image.dtype)
        return torch.nn.functional.linear(self.image, self.weights[name])

    def __call__(self, q, k, v, extra_options):
        attention = core("comfy.ldm.modules.attention").optimized_attention
        result = attention(q, k, v, extra_options["n_heads"])
        image_k, image_v = (self.layer(name, k.shape[-1]).repeat(len(q), 1, 1) for name in "kv")
        self.calls += 1
        self.last = attention(q, image_k, image_v, extra_options["n_heads"])
        return result + self.last / self.calls


def adapted(model):
    clone = model.clone()
    clone.set_model_attn2_replace(Adapter(activation_dtype(model)), *MIDDLE)
    return clone


NODES = {
    "Self-Attention Guidance": ("sdxl", lambda model: node("nodes_sag", "SelfAttentionGuidance", model, 0.8, 2.0)),
    "Perturbed-Attention Guidance": ("sdxl", lambda model: node("nodes_pag", "PerturbedAttentionGuidance", model, 2.0)),
    "IP-Adapter": ("sdxl", adapted),
    "Reference Latent": ("flux", lambda model: model),
    "Context Windows": (
        "wan",
        lambda model: node(
            "nodes_context_windows", "WanContextWindowsManualNode", model, 9, 4, "standard_static", 1, False, "pyramid", True
        ),
    ),
}  # fmt: skip
SIZES = {"wan": {"frames": 5}}


def sampled(name, model):
    """A latent with guidance, so that there are two conditionings, of which Self-Attention Guidance records one."""
    family, patch = NODES[name]
    conds = [families.conditioning(family, seed=seed) for seed in (1, 2)]
    if name == "Reference Latent":
        latent = {"samples": families.noise(model, seed=8)}
        conds = [core("comfy_extras.nodes_edit_model").ReferenceLatent.execute(cond, latent)[0] for cond in conds]
    start = families.noise(model, **SIZES.get(family, {}))
    run = core("comfy.sample").sample
    return run(patch(model), start, STEPS, 3.0, "euler", "simple", *conds, torch.zeros_like(start), seed=1)


@pytest.mark.parametrize("name", NODES)
def test_no_check_shows_in_the_picture(comfy, models, name):
    plain = models(NODES[name][0], None, "bf16")
    latents, checks = [sampled(name, plain)], []
    for check in ("off", "first step"):
        model = guarded(comfy, plain, check=check)
        latents.append(sampled(name, model))
        checks += report_of(model).checks
    print(name, [(one.snr_db, one.left_out) for one in checks])
    assert torch.equal(latents[0], latents[1]) and torch.equal(latents[0], latents[2])
    (one,) = checks
    assert one.left_out == "" and one.snr_db > 25


def test_self_attention_guidance_is_given_the_scores_of_the_call_itself(comfy, models, monkeypatch):
    """And not those of the call in fp32, which its patch records too."""
    module, seen = core("comfy_extras.nodes_sag"), []
    own = module.create_blur_map

    def spied(latent, scores, *args):
        seen.append(scores.clone())
        return own(latent, scores, *args)

    monkeypatch.setattr(module, "create_blur_map", spied)
    name, plain = "Self-Attention Guidance", models("sdxl", None, "bf16")
    for check in ("off", "first step"):
        sampled(name, guarded(comfy, plain, check=check))
    assert len(seen) == 2 * STEPS and all(map(torch.equal, seen[:STEPS], seen[STEPS:]))


@pytest.mark.parametrize("name", NODES)
def test_an_overflow_is_cured_with_the_nodes_patches_in_the_repeat(comfy, models, name):
    reference, plain = (models(NODES[name][0], "ffn", dtype) for dtype in ("fp32", "fp16"))
    expected = sampled(name, reference)
    assert not relative_error(expected, sampled(name, plain)) < 0.1
    model = guarded(comfy, plain)
    found = sampled(name, model)
    report = report_of(model)
    print(name, relative_error(expected, found), report.verdict, [event.layer for event in report.events])
    assert is_finite(found) and relative_error(expected, found) < 0.05
    assert report.verdict == "recovered"
