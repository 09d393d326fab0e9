"""One call of the denoiser, to be made as often as need be: each time with all that the call before it changed put back."""

import copy
from collections.abc import Callable

import torch


class Call:
    """What ComfyUI gives an APPLY_MODEL wrapper. ``options``: its ``transformer_options``.

    ComfyUI's EasyCache keeps what each call gave, to use it in place of a later one: a repeat finds it as the first call did.
    """

    def __init__(self, executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **extra):
        self.executor: Callable = executor
        self.x: torch.Tensor = x
        self.t: torch.Tensor = t
        self.c_concat: torch.Tensor | None = c_concat
        self.c_crossattn: torch.Tensor | None = c_crossattn
        self.control: dict | None = control
        self.options: dict = transformer_options or {}
        self.extra: dict = extra
        self._made = False
        self._cache = self.options.get("easycache")
        self._before = None if self._cache is None else _copied(vars(self._cache))

    def __call__(self) -> torch.Tensor:
        if self._made and self._cache is not None:
            vars(self._cache).update(_copied(self._before))
            self.forget_dtype()
        self._made = True
        arguments = (self.x, self.t, self.c_concat, self.c_crossattn, _fresh(self.control), dict(self.options))
        return self.executor(*arguments, **self.extra)

    def forget_dtype(self) -> None:
        """The next call may be in another dtype.

        The cache resets itself when the dtype of its input changes, and ComfyUI's reset leaves it in a state in which all
        later steps are skipped. So it is made to forget what dtype it saw.
        """
        if self._cache is not None:
            self._cache.state_metadata = None


def _fresh(control: dict | None) -> dict | None:
    """A ControlNet's outputs for one more call: a UNet takes them out of their lists one by one."""
    if control is None:
        return None
    return {name: list(values) if isinstance(values, list) else values for name, values in control.items()}


def _copied(values: dict) -> dict:
    return {name: copy.copy(value) if isinstance(value, (dict, list)) else value for name, value in values.items()}
