"""ComfyUI's EasyCache while a call is repeated: it keeps what each call gave, to use it in place of a later call."""

import copy


class StepCache:
    """The cache of a model, if it has one, as it was before a call.

    The cache resets itself when the dtype of its input changes, and ComfyUI's reset leaves it in a state in which all later
    steps are skipped. So it is made to forget what dtype it saw wherever a repeat may change it.
    """

    def __init__(self, transformer_options: dict):
        self._cache = transformer_options.get("easycache")
        self._before = None if self._cache is None else _copied(vars(self._cache))

    def put_back(self) -> None:
        """As it was before the call; for a call in another dtype too."""
        if self._cache is not None:
            vars(self._cache).update(_copied(self._before))
            self.forget_dtype()

    def forget_dtype(self) -> None:
        """The next call may be in another dtype."""
        if self._cache is not None:
            self._cache.state_metadata = None


def _copied(values: dict) -> dict:
    return {name: copy.copy(value) if isinstance(value, (dict, list)) else value for name, value in values.items()}
