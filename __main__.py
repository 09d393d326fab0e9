"""Start the command line: ``python -m halfsafe COMMAND``, or ``python path/to/halfsafe``. ComfyUI never imports this
file."""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

NEEDED = ("torch", "numpy", "safetensors")


def _start() -> int:
    """Import the commands and run the command asked for, whatever name the folder has."""
    global __package__
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        install = f"Run it with the Python of your ComfyUI, or: {sys.executable} -m pip install {' '.join(missing)}"
        print(f"halfsafe: {', '.join(missing)} cannot be imported by {sys.executable}. {install}", file=sys.stderr)
        return 2
    if not __package__:
        folder = Path(__file__).absolute().parent
        spec = spec_from_file_location("halfsafe", folder / "__init__.py", submodule_search_locations=[str(folder)])
        # mypy: the spec of a file that exists is not None.
        sys.modules["halfsafe"] = module_from_spec(spec)  # type: ignore[arg-type]
        __package__ = "halfsafe"
    try:
        from .precision.commands.cli import main

        return main()
    except KeyboardInterrupt:
        print("halfsafe: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(_start())
