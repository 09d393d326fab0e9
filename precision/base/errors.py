"""Typed errors. Each message says what was wrong with which file, tensor, layer or setting, and what to do about it."""

from .message import Message


class HalfsafeError(Exception):
    """Base of every error this package raises on purpose. Its message is made of ``problem`` and ``advice``, which the
    page reads by these names.

    Args:
        problem: what is wrong, naming the file, tensor, layer or setting.
        advice: what the reader can do about it.
    """

    __module__ = "halfsafe"

    def __init_subclass__(cls) -> None:
        """Name a subclass as the pack's: ComfyUI shows an error with the path of its class before the message."""
        cls.__module__ = HalfsafeError.__module__

    def __init__(self, problem: str, advice: str = ""):
        super().__init__(Message("{problem} {advice}", problem=problem, advice=advice))
        self.problem = problem
        self.advice = advice


class CheckpointError(HalfsafeError):
    """A model file that cannot be read as what it claims to be. The page reads ``file`` in its problem, to leave out
    the folders.

    Args:
        path: the file.
        problem: what is wrong with it.
        tensor: the tensor concerned, if one is.
        advice: what to do.
    """

    def __init__(self, path, problem: str, tensor: str | None = None, advice: str = ""):
        found = Message("tensor '{0}': {1}.", tensor, problem) if tensor else Message("{0}.", problem)
        super().__init__(Message("{file}: {found}", file=path, found=found), advice)
        self.found = found
        self.path = str(path)
        self.tensor = tensor


class NonFiniteWeight(CheckpointError):
    """A weight or scale holds NaN or Inf."""


class StorageNotHeld(HalfsafeError):
    """This ComfyUI, or its device, cannot hold weights in a storage that is asked for."""


class MemoryShortage(HalfsafeError):
    """The work needs more memory than the machine, or its cgroup, has left."""


class RuleError(HalfsafeError):
    """A line of the rules text cannot be read.

    Args:
        line: its number, from 1.
        mistake: what is wrong in it.
        advice: what would be right.
    """

    def __init__(self, line: int, mistake: str, advice: str = ""):
        super().__init__(Message("Rules, line {0}: {1}.", line, mistake), advice)
        self.line = line
        self.mistake = mistake


class UnknownProfile(HalfsafeError):
    """No device profile has that name."""


class TrainingRefused(HalfsafeError):
    """What a call puts on layers would be missing where the backward pass of a training runs them again."""
