"""Print the table of failure classes, measured now: `python scripts/assets/failure_classes.py --comfyui DIR > docs/failure-classes.md`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support.failure_classes import Measured, table  # noqa: E402

HEAD = """# Failures that users report, and what the guard does about them

Each class is made to happen in a real ComfyUI with small models of random weights, on a CPU. Errors are relative to the same
model in fp32 ("no result": the run ended with an error, as it should). "extra calls": how often the model ran again. Classes that
no test makes say why. Measured with torch {torch} on {machine} by `scripts/assets/failure_classes.py`; the tests are in
`tests/host/guard/test_failure_classes.py`, which fail when a verdict or an error bound no longer holds.

"simulated": what a device or another pack would do is imitated, so the row shows what the guard does, not that the device does so.
"clean" with a large error: nothing is NaN or Inf, so the guard's watch on each call cannot see it. Its input `check` compares a call
with itself in fp32 and finds most of these; [drift.md](drift.md) has what it found, what it named, and the figures of clean runs.

"""

FOOT = """
## What a verdict rests on

A verdict is given after its evidence, which each event names in its field `evidence` and in its message. A repeat begins with the
random numbers of the call. Where the repeats that the evidence needs are not allowed (`max_retries`) or find no memory, the verdict
is `stopped`, and the advice says which of the two it is. The tests that try to provoke a verdict falsely are in
`tests/host/guard/test_failure_evidence.py`.

| verdict | given when | not given when |
|---|---|---|
| `recovered` | the call was NaN or Inf, and finite at a higher precision | |
| `bad_input` | the input holds NaN, in the rows that are lost; or it holds Inf, and in fp32 the call is NaN or Inf with it and finite with a zero for each; or in fp32 the call is NaN or Inf with the functions that nodes put into its blocks (GLIGEN, IP-Adapter), and finite without them | it holds Inf on purpose, such as a mask; NaN is in other rows than the failure |
| `bad_weights` | the first operation that fails reads a weight or LoRA with NaN; or in fp32 the call is NaN or Inf, and finite with a zero for each NaN and Inf of the weights | no call reads it: a LoRA at strength 0, an unused buffer, a mask of -Inf among the buffers |
| `device_fault` | the same call in the same arithmetic, not watched, is finite the second time; or the compiled call fails again and the eager one does not; or a test product is wrong; or a weight that is finite in memory is NaN or Inf as the device multiplies by it | only watching it makes it finite; it draws random numbers |
| `not_precision` | the call is NaN or Inf in fp32 too, attention included, its weights are no cause, and a test product in fp32 is right; or sigmas hold NaN; or every result of the model was finite and NaN arose between its calls | fp32 was not tried |
| `stopped` | none of them was shown | |

An image of a batch that is lost stays so; the others go on, and are repeated where that cures them.

## Work outside of the model's calls

Where ComfyUI 0.30 runs weights during sampling other than in a call of the diffusion model:

| what | where | guard | compute plan |
|---|---|---|---|
| text adapters: Anima's `llm_adapter`, LTX-AV's connectors, MiniMax's `condition_proj` and `token_refiner` | `extra_conds` in `comfy/model_base.py` | checked, located, repeated in fp32 | yes; their attention runs in the dtype of the values between layers |
| noise augmentation of unCLIP, SDXL refiner and Stable Audio's time embedders | `encode_adm`, `extra_conds` | no: they run in fp32, outside of the diffusion model; the call's evidence names what they give | no |
| ControlNet, T2I adapter | `get_control` in `comfy/controlnet.py` | what they give is checked; the report says that one ran | that of Load ControlNet; none for others |
| model patches: DiffSynth, Fun and Uni3C control, USO, Anima LLLite | inside of the call, as `patches` | checked and repeated with the call, in fp32 where the values between layers are; the report names them, and the verdict where only they make it NaN | no |
| GLIGEN's position net | `comfy/samplers.py`, before the call | no: the call is checked with what it gives; where that makes it NaN, it is named | no |
| masks, latents and images given as conditioning | `concat_cond`, `extra_conds` | no weights run; what is NaN is named at the call | no |
| CLIP vision, style models, VAE, text encoders | their own nodes | Guard VAE, Guard CLIP; Check Finite behind the others | no |
"""


def measure(comfyui: Path) -> list[Measured]:
    """The rows the tests keep.

    Raises:
        SystemExit: a test failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        test = "tests/host/guard/test_failure_classes.py"
        command = [sys.executable, "-m", "pytest", "-q", test, f"--junitxml={results}"]
        environ = {**os.environ, "COMFYUI_DIR": str(comfyui), "HALFSAFE_STRICT": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout)
        found = ElementTree.parse(results).iter("property")
        return [_row(entry.get("value")) for entry in found if entry.get("name") == "failure_class"]


def _row(text: str) -> Measured:
    return Measured(**json.loads(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comfyui", type=Path, default=os.environ.get("COMFYUI_DIR"), help="a ComfyUI folder")
    comfyui = parser.parse_args().comfyui
    if comfyui is None:
        parser.error("name a ComfyUI with --comfyui or COMFYUI_DIR")
    rows = measure(comfyui)
    print(HEAD.format(torch=version("torch"), machine=platform.machine()) + table(rows) + "\n" + FOOT, end="")


if __name__ == "__main__":
    main()
