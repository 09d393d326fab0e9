"""Files whose embedders are packed, several values in a byte: ComfyUI tells a model by the shapes of those layers."""

import pytest
from halfsafe.nodes.host.comfyui.model_facts import held_storages
from halfsafe.precision.plan.choice import ATTACHMENT
from safetensors.torch import load_file, save_file
from support import dialects, families
from support.measures import relative_error

PACKED = ("nvfp4", "int4", "w4a8", "w6a8", "awq4")


def packed(path, target, storage, folder):
    """The file with every 2-D weight of 16 and more inputs packed, and the same with these unpacked."""
    tensors = load_file(path)
    weights = {
        name.removesuffix(".weight"): each
        for name, each in tensors.items()
        if name.endswith(".weight") and each.dim() == 2 and min(each.shape) >= 64 and each.shape[1] % 64 == 0
    }
    made = load_file(dialects.in_format(folder / "packed.safetensors", weights, {}, storage))
    save_file(
        {name: each for name, each in tensors.items() if name.removesuffix(".weight") not in weights} | made,
        target,
        families.metadata_of(path),
    )
    return target


@pytest.mark.parametrize("family", ["flux", "z_image", "wan"])
def test_the_model_is_told_by_true_shapes(comfy, models_dir, tmp_path, family):
    path, table, wrong = families.write_narrow(family, models_dir / "diffusion_models"), [""], 0
    for storage in [name for name in PACKED if name in held_storages()]:
        file = packed(path, path.with_name(f"{family}-packed-{storage}.safetensors"), storage, tmp_path)
        results = {}
        for asked in ("bf16", "as_file", "fp8_e4m3fn"):
            try:
                model = families.load(comfy, file, asked, "fp32")
                results[asked] = families.sample(model, family, steps=1)
                error = relative_error(results["bf16"], results[asked])
                unpacks = any(
                    "ComfyUI detects the architecture from their shapes" in note
                    for note in model.attachments[ATTACHMENT].notes
                )
                if unpacks != (family == "flux"):  # of a packed weight of the others, ComfyUI reads the rows alone
                    error = f"unpacks: {unpacks}"
            except Exception as failure:
                error = f"{failure!r}"[:120]
            good = isinstance(error, float) and error < 0.1
            wrong += not good
            table.append(
                f"{storage:8}{asked:12}{error if isinstance(error, str) else round(error, 4)}{'' if good else '  WRONG'}"
            )
    assert not wrong, "\n".join(table)
