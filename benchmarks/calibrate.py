"""The trained shapes model saved with a calibration, against the same model rounded to nearest: errors of the final latent.

The model is calibrated by the node with three prompts and tested on others, without guidance, with weights as they were
saved and products in fp32.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from . import reporting
from .host import load_comfy

STORAGES = ("int8", "fp8_e4m3fn")
PROMPTS, TESTED = 3, 4
SHARE = 0.7
"""How much of the error of rounding to nearest a calibrated model may have."""


def main() -> int:
    args = reporting.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    comfy = load_comfy(args)
    with torch.inference_mode():
        rows = list(_rows(comfy))
    found = {row["storage"]: reporting.target(row["share"], SHARE) for row in rows}
    result = {"benchmark": "calibrate", "rows": rows, "targets": found}
    if args.save:
        reporting.save(result)
    for row in rows:
        print(
            "{storage}: nearest {nearest:.5f}, calibrated {calibrated:.5f} ({share:.2f}), {seconds:.0f} s to save".format(
                **row
            )
        )
    return reporting.exit_code(result)


def _rows(comfy) -> Iterator[dict]:
    from support import families, shapes

    shutil.copy(shapes.MODEL, comfy.folder)
    model = families.load(comfy, comfy.folder / shapes.MODEL.name, "as_file", "fp32")
    every = shapes.all_shapes()
    conds = [shapes.conditioning(comfy.folder, shape) for shape in every[:: len(every) // (PROMPTS + TESTED)]][
        : PROMPTS + TESTED
    ]
    calibration, latent = None, {"samples": torch.zeros_like(families.noise(model, size=shapes.SIZE // 8))}
    for seed, cond in enumerate(conds[:PROMPTS]):
        inputs = {"positive": cond, "latent_image": latent, "seed": seed, "previous": calibration}
        calibration = comfy.run("HalfsafeCalibrate", model=model, **inputs)[0]
    exact = [_sampled(model, cond) for cond in conds[PROMPTS:]]
    for storage in STORAGES:
        errors = {}
        for name, given in (("nearest", None), ("calibrated", calibration)):
            began = time.process_time()
            saved = families.load(comfy, _saved(comfy, model, storage, given), "as_file", "fp32")
            seconds = time.process_time() - began
            made = [_sampled(saved, cond) for cond in conds[PROMPTS:]]
            errors[name] = sum(float((b - a).norm() / a.norm()) for a, b in zip(exact, made, strict=True)) / len(made)
        yield {"storage": storage, **errors, "share": errors["calibrated"] / errors["nearest"], "seconds": seconds}


def _saved(comfy, model, storage: str, calibration):
    import folder_paths
    from halfsafe.nodes.host.load.save import save_model
    from halfsafe.precision.plan.rules import rules_from

    name = save_model(model, "calibrate", storage, rules_from(), None, None, calibration).name
    return Path(shutil.move(f"{folder_paths.get_output_directory()}/{name}", comfy.folder / name))


def _sampled(model, cond) -> torch.Tensor:
    import comfy.sample
    from support import families, shapes

    noise = families.noise(model, size=shapes.SIZE // 8)
    return comfy.sample.sample(
        model, noise, 8, 1.0, "euler", "simple", cond, cond, torch.zeros_like(noise), seed=1, disable_pbar=True
    )


if __name__ == "__main__":
    sys.exit(main())
