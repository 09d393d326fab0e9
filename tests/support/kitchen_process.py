"""comfy-kitchen's own 4- and 6-bit codes, made in a process of its own: one process holds one comfy-kitchen.

It is the installed one where that makes 6 bits, else the one that `scripts/test.py` puts into the cache.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from setup.environment import ROOT, clean_environ, kitchen_folder

LEAVES = ("weight", "weight_s_rel", "weight_s_channel")
WITHOUT_OFFSETS, GROUP = None, 16


def run_with_kitchen(tasks: Path, made: Path) -> None:
    """Quantize the weights in one file into another; skip without such a comfy-kitchen, but fail where HALFSAFE_STRICT is set."""
    folder = _installed_with_6_bits() or kitchen_folder()
    if not folder.exists():
        (pytest.fail if os.environ.get("HALFSAFE_STRICT") else pytest.skip)(f"run scripts/test.py, which puts {folder.name} into its cache")
    environ = clean_environ(PYTHONPATH=os.pathsep.join((str(folder), str(ROOT / "scripts"))))
    subprocess.run([sys.executable, __file__, str(tasks), str(made)], check=True, env=environ)


def _installed_with_6_bits() -> Path | None:
    spec = importlib.util.find_spec("comfy_kitchen")
    package = Path(spec.origin).parent if spec else Path()
    source = package / "backends" / "eager" / "w4a8_int8.py"
    return package.parent if source.exists() and "def _w4a8_geometry" in source.read_text(encoding="utf-8") else None


def _quantized(weight: torch.Tensor, bits: int, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from comfy_kitchen.backends.eager import w4a8_int8 as kitchen

    options = {} if bits == 4 else {"bits": bits}
    *tensors, _, codebook = kitchen.quantize_w4a8_int8_weight(weight, convrot_groupsize=group, **options)
    restored = kitchen.dequantize_w4a8_int8_weight(*tensors, codebook, WITHOUT_OFFSETS, GROUP, group, torch.float32)
    return dict(zip(LEAVES, tensors, strict=True)) | ({} if codebook is None else {"weight_codebook": codebook}), restored


if __name__ == "__main__":
    torch.save({name: _quantized(*task) for name, task in torch.load(sys.argv[1]).items()}, sys.argv[2])
