"""Rules: patterns over layers that set storage, compute, accumulation and stream. Text in, object out, text again."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property

from ..dtypes import COMPUTE_OPTIONS, STORAGE_OPTIONS
from ..errors import HalfsafeError, RuleError
from .presets import DEFAULT_PRESET, PRESETS, TEXT_ENCODER

VALUES = {
    "storage": STORAGE_OPTIONS[1:],
    "compute": COMPUTE_OPTIONS[1:],
    "accumulation": ("fp32", "fp16"),
    "stream": ("fp32", "same"),
}


@dataclass(frozen=True)
class Rule:
    """One line: which layers (``pattern``), what to set, and the trailing comment as its reason."""

    pattern: str
    settings: tuple[tuple[str, str], ...]
    reason: str = ""
    preset: str = ""

    @cached_property
    def _matcher(self) -> Callable[[str, str], object]:
        return compile_pattern(self.pattern)

    @cached_property
    def _beginning(self) -> str:
        """What a layer's name begins with where the pattern can match: it spares compiling most patterns of long lists."""
        return "" if self.pattern.startswith(("re:", "class:")) else re.split(r"[*?\[]", self.pattern, maxsplit=1)[0]

    def matches(self, name: str, cls: str) -> bool:
        """Tell whether the pattern matches the layer ``name`` (inside the diffusion model) of module class ``cls``."""
        return name.startswith(self._beginning) and bool(self._matcher(name, cls))

    def __str__(self) -> str:
        settings = " ".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.pattern} {settings}" + (f"  # {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Rules:
    """Presets first, then the user's own lines; among those that match a layer and set a key, the last one wins."""

    presets: tuple[Rule, ...] = ()
    own: tuple[Rule, ...] = ()
    names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def all(self) -> tuple[Rule, ...]:
        return self.presets + self.own

    def setting(self, key: str, name: str, cls: str) -> tuple[str, Rule] | None:
        """Look up the value of ``key`` for a layer and the rule that sets it; None where no rule does."""
        for rule in reversed(self._matching(name, cls)):
            value = dict(rule.settings).get(key)
            if value is not None:
                return value, rule
        return None

    def _matching(self, name: str, cls: str) -> tuple[Rule, ...]:
        layer = name, cls
        if layer not in self._known:
            self._known[layer] = tuple(rule for rule in self.all if rule.matches(name, cls))
        return self._known[layer]

    @cached_property
    def _known(self) -> dict[tuple[str, str], tuple[Rule, ...]]:
        """(Layer name, class) -> the rules that match it, of the layers asked for so far."""
        return {}

    def without_match(self, layers: Iterable[tuple[str, str]]) -> list[Rule]:
        """List the user's own rules that match none of the ``(name, class)`` pairs."""
        matching = {id(rule) for layer in layers for rule in self._matching(*layer)}
        return [rule for rule in self.own if id(rule) not in matching]

    def to_text(self) -> str:
        """Write the rules as text that :func:`parse` reads back as the same rules."""
        return "\n".join(str(rule) for rule in self.all)


def rules_from(text: str = "", preset: str = DEFAULT_PRESET, previous: Rules | None = None) -> Rules:
    """Read rules from text, on top of a preset and of ``previous`` rules.

    Raises:
        RuleError: a line cannot be read; it carries the line's number.
        HalfsafeError: no preset has that name.
    """
    previous = previous or Rules()
    presets = previous.presets + tuple(rule for rule in preset_rules(preset) if rule not in previous.presets)
    return Rules(presets, previous.own + tuple(parse(text)), (*previous.names, preset))


def preset_rules(preset: str) -> list[Rule]:
    """Return the rules of a preset; each keeps a layer in the dtype of the file."""
    if preset not in PRESETS:
        raise HalfsafeError(f"'{preset}' is not a rules preset.", f"Use one of: {', '.join(PRESETS)}.")
    return _keep_rules(PRESETS[preset], preset)


def _keep_rules(patterns: Iterable[tuple[str, str]], preset: str) -> list[Rule]:
    return [Rule(pattern, (("storage", "as_file"),), role, preset) for pattern, role in patterns]


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Split a text as editors do, and number its lines from 1: ``str.splitlines`` also splits where none counts a line."""
    return enumerate(re.split("\r\n|\r|\n", text), 1)


def parse(text: str) -> list[Rule]:
    """Read rules, one per line: ``<pattern> <key>=<value> ...  # reason``. Empty lines and comments are skipped.

    Raises:
        RuleError: a line cannot be read.
    """
    rules = []
    for number, line in numbered_lines(text):
        line, _, comment = re.sub(r"(^|\s)#", "\0", line, count=1).partition("\0")
        if line.strip():
            rules.append(_parse_line(number, re.sub(r"\s*=\s*", "=", line).split(), comment.strip()))
    return rules


def _parse_line(number: int, words: list[str], reason: str) -> Rule:
    pattern, *settings = words
    if not settings:
        raise RuleError(number, f"'{pattern}' sets nothing", "Write: <pattern> <key>=<value>, e.g. blocks.0.* storage=bf16.")
    if "=" in pattern and not pattern.startswith("re:"):
        raise RuleError(number, f"'{pattern}' stands where the pattern should be", "Write: <pattern> <key>=<value>.")
    try:
        if pattern.startswith("re:"):
            compile_pattern(pattern)
    except re.error as error:
        raise RuleError(number, f"'{pattern}' is not a regular expression ({error})") from None
    return Rule(pattern, tuple(_parse_setting(number, setting) for setting in settings), reason)


def _parse_setting(number: int, setting: str) -> tuple[str, str]:
    key, _, value = setting.lower().partition("=")
    if key not in VALUES:
        raise RuleError(number, f"'{setting}' sets no known key", f"Keys are: {', '.join(VALUES)}.")
    if value not in VALUES[key]:
        raise RuleError(number, f"'{value}' is not a valid value for {key}", f"Use one of: {', '.join(VALUES[key])}.")
    return key, value


def compile_pattern(pattern: str) -> Callable[[str, str], object]:
    """Compile a test on (layer name, module class) from a glob, ``re:<regex>`` (searched) or ``class:<glob over classes>``."""
    if pattern.startswith("re:"):
        search = re.compile(pattern[3:]).search
        return lambda name, cls: search(name)
    if pattern.startswith("class:"):
        match = re.compile(translate(pattern[6:])).match
        return lambda name, cls: match(cls)
    match = re.compile(translate(pattern)).match
    return lambda name, cls: match(name)


TEXT_ENCODER_RULES = tuple(_keep_rules(TEXT_ENCODER, "text encoder"))
