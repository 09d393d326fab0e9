"""Rules: patterns over layers that set storage, compute, accumulation and stream, and over blocks,
that set attention.

Text in, object out, text again.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cached_property, lru_cache
from typing import Any, get_args

from ..base.errors import HalfsafeError, RuleError
from ..base.layer_names import by_pattern
from ..base.message import Message, joined
from ..base.options import RuledCompute, RuledStorage, RuledSums, Stream
from .choice import WithoutEffect
from .facts import LayerSpec
from .presets import DEFAULT_PRESET, PRESETS, TEXT_ENCODER
from .structure import ROLES, roles_of

ANYTHING = "(any layer)"
NO_LAYER = "the pattern matches no layer of this model"
KEEP = (("storage", "as_file"),)
MEASURED = "measured: "
"""What the comment of a rule begins with that *Measure my card* wrote, before the setting and its
figures."""
VALUES = {
    "storage": get_args(RuledStorage),
    "compute": get_args(RuledCompute),
    "accumulation": get_args(RuledSums),
    "stream": get_args(Stream),
    "attention": ("fp32",),
}


@dataclass(frozen=True)
class Rule:
    """One line: which layers (``pattern``), what to set, and the trailing comment as its reason."""

    pattern: str
    settings: tuple[tuple[str, str], ...]
    reason: str = ""
    preset: str = ""

    def matches(self, name: str, cls: str) -> bool:
        """True if the pattern matches a layer by its name inside the diffusion model or its
        class."""
        place, test = _test_of(self.pattern)
        return bool(test((name, cls, "")[place]))

    def matches_block(self, name: str, cls: str) -> bool:
        """True if the pattern, ``blocks.0`` or ``blocks.0.*``, matches a module of layers or all
        layers in it."""
        return self.matches(name, cls) or self.matches(f"{name}.{ANYTHING}", cls)

    def __str__(self) -> str:
        settings = " ".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.pattern} {settings}" + (f"  # {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Rules:
    """Presets first, then the user's own lines; among those that match a layer and set a key, the
    last one wins.

    Attributes:
        names: of the presets.
        roles: layer name -> its role in the model that the rules are asked about; see :meth:`on`.
        found: (layer name, class) -> the rules that match, of the layers looked up so far.
        models: a model's layers -> these rules with their roles, of the models looked up so far.
    """

    presets: tuple[Rule, ...] = ()
    own: tuple[Rule, ...] = ()
    names: tuple[str, ...] = field(default=(), compare=False)
    roles: Mapping[str, str] = field(default_factory=dict, compare=False)
    found: dict[tuple[str, str], tuple[Rule, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)
    models: dict[tuple[LayerSpec, ...], "Rules"] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def all(self) -> tuple[Rule, ...]:
        return self.presets + self.own

    def on(self, layers: Iterable[LayerSpec]) -> "Rules":
        """Return the rules with the roles of a model's layers, which the patterns ``role:...`` are
        about."""
        layers = tuple(layers)
        if layers not in self.models:
            asked = any(rule.pattern.startswith("role:") for rule in self.all)
            self.models[layers] = replace(self, roles=roles_of(layers)) if asked else self
        return self.models[layers]

    def setting(self, key: str, name: str, cls: str) -> tuple[Any, Rule] | None:
        """Look up the value of ``key``, one of its ``VALUES``, for a layer and its rule; None if no
        rule sets it."""
        for rule in reversed(self.matching(name, cls)):
            if value := dict(rule.settings).get(key):
                return value, rule
        return None

    def matching(self, name: str, cls: str) -> tuple[Rule, ...]:
        """List the rules that match a layer."""
        layer = name, cls
        if layer not in self.found:
            about = name, cls, self.roles.get(name, "")
            self.found[layer] = tuple(rule for rule, (place, test) in self._tests if test(about[place]))
        return self.found[layer]

    @cached_property
    def _tests(self) -> list[tuple[Rule, tuple[int, Callable[[str], object]]]]:
        return [(rule, _test_of(rule.pattern)) for rule in self.all]

    def without_match(self, layers: Iterable[tuple[str, str]]) -> list[Rule]:
        """List the user's own rules that match none of the ``(name, class)`` pairs."""
        matching = {id(rule) for layer in layers for rule in self.matching(*layer)}
        return [rule for rule in self.own if id(rule) not in matching]

    def without_effect(self, layers: Sequence[LayerSpec]) -> list[WithoutEffect]:
        """List the user's own rules that match none of these layers.

        What they set of attention is left out, as it is about blocks.
        """
        found = []
        for rule in self.on(layers).without_match((layer.name, layer.cls) for layer in layers):
            settings = tuple(setting for setting in rule.settings if setting[0] != "attention")
            if settings:
                found.append(WithoutEffect(str(replace(rule, settings=settings)), NO_LAYER, unmatched=True))
        return found

    def to_text(self) -> str:
        """Write the rules as text that :func:`rules_from` reads back as the same rules."""
        return "\n".join(str(rule) for rule in self.all)


def rules_from(text: str = "", preset: str = DEFAULT_PRESET, previous: Rules | None = None) -> Rules:
    """Read rules from text, on top of a preset and of ``previous`` rules.

    Raises:
        RuleError: a line cannot be read; it carries the line's number.
        HalfsafeError: no preset has that name.

    Example:
        >>> from halfsafe.precision.plan.rules import rules_from
        >>> rules_from("blocks.0.* compute=fp32").setting("compute", "blocks.0.ffn", "Linear")[0]
        'fp32'
    """
    if preset not in PRESETS:
        raise HalfsafeError(Message("'{0}' is not a rules preset.", preset), _one_of(PRESETS))
    previous = previous or Rules()
    added = (Rule(pattern, KEEP, role, preset) for pattern, role in PRESETS[preset])
    presets = previous.presets + tuple(rule for rule in added if rule not in previous.presets)
    return Rules(presets, previous.own + tuple(_parse(text)), (*previous.names, preset))


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Split a text as editors do, and number its lines from 1."""
    # str.splitlines also splits where no editor counts a line.
    return enumerate(re.split("\r\n|\r|\n", text), 1)


def _parse(text: str) -> list[Rule]:
    """Read rules, one per line: ``<pattern> <key>=<value> ...  # reason``. Empty lines and comments are skipped.

    Raises:
        RuleError: lines cannot be read; it is the first one's, and its text has all of them.
    """
    rules, wrong = read(text)
    if wrong:
        first, *others = wrong
        HalfsafeError.__init__(first, first.problem, joined([first.advice, *map(str, others)], "\n"))
        raise first
    return rules


def read(text: str) -> tuple[list[Rule], list[RuleError]]:
    """Read the rules of a text, and the mistake of each line without a rule; see :func:`rules_from`."""
    rules = []
    wrong = []
    for number, line in numbered_lines(text):
        line, _, comment = re.sub(r"(^|\s)#", "\0", line, count=1).partition("\0")
        if not line.strip():
            continue
        try:
            rules.append(_parse_line(number, re.sub(r"\s*=\s*", "=", line).split(), comment.strip()))
        except RuleError as error:
            wrong.append(error)
    return rules, wrong


def _parse_line(number: int, words: list[str], reason: str) -> Rule:
    pattern, *settings = words
    if not settings:
        advice = "Write: <pattern> <key>=<value>, e.g. blocks.0.* storage=bf16."
        raise RuleError(number, Message("'{0}' has no setting", pattern), advice)
    if "=" in pattern and not pattern.startswith("re:"):
        advice = "Write: <pattern> <key>=<value>."
        raise RuleError(number, Message("'{0}' is a setting, not a pattern", pattern), advice)
    if pattern.startswith("role:") and pattern[5:] not in ROLES:
        advice = Message("The known roles are: {0}.", ", ".join(ROLES))
        raise RuleError(number, Message("'{0}' is not a layer role", pattern[5:]), advice)
    try:
        if pattern.startswith("re:"):
            _test_of(pattern)
    except re.error as error:
        advice = "Write \\ before a literal character such as ( or [."
        raise RuleError(number, Message("'{0}' is not a regular expression ({1})", pattern, error), advice) from None
    return Rule(pattern, tuple(_parse_setting(number, setting) for setting in settings), reason)


def _parse_setting(number: int, setting: str) -> tuple[str, str]:
    key, _, value = setting.lower().partition("=")
    if key not in VALUES:
        advice = Message("The known keys are: {0}.", ", ".join(VALUES))
        raise RuleError(number, Message("'{0}' has an unknown key", setting), advice)
    if value not in VALUES[key]:
        problem = Message("'{0}' is not a valid value for '{1}'", value, key)
        raise RuleError(number, problem, _one_of(VALUES[key]))
    return key, value


def _one_of(names: Iterable[str]) -> str:
    return Message("Use one of: {0}.", ", ".join(names))


@lru_cache(4096)
def _test_of(pattern: str) -> tuple[int, Callable[[str], object]]:
    """Return the place of name, class or role that a pattern is about, and a test that runs no
    Python.

    A pattern is a glob over names, ``re:<regex>`` (searched in the name), ``class:<glob>`` or
    ``role:<role>``."""
    if pattern.startswith("re:"):
        return 0, re.compile(pattern[3:]).search
    if pattern.startswith("class:"):
        return 1, re.compile(translate(pattern[6:])).match
    return (2, pattern[5:].__eq__) if pattern.startswith("role:") else (0, re.compile(translate(pattern)).match)


def patterns(names: Iterable[str], others: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Find few patterns that match all ``names`` and none of ``others``: (pattern, its names)."""
    left = dict.fromkeys(names)
    others = list(others)
    found = []
    tried = sorted(_possible_patterns(left).items(), key=lambda item: -len(item[1]))
    for pattern, members in tried:
        _, matches = _test_of(pattern)
        members = [name for name in members if name in left]
        if len(members) > 1 and not any(map(matches, others)):
            found.append((pattern, members))
            for name in members:
                del left[name]
    return found + [(name, [name]) for name in left]


def _possible_patterns(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        words = name.split(".")
        for end in range(1, len(words)):
            groups[".".join([*words[:end], "*"])].append(name)
    numbered = by_pattern(names)
    groups |= {pattern: members for pattern, members in numbered.items() if "*" in pattern}
    for pattern, members in numbered.items():
        if pattern.count("*") == 1 and len(members) > 2:
            head, _, tail = pattern.partition("*")
            numbers = "|".join(name[len(head) : len(name) - len(tail)] for name in members)
            groups[f"re:^{re.escape(head)}({numbers}){re.escape(tail)}$"] = members
    return groups


TEXT_ENCODER_RULES = tuple(Rule(pattern, KEEP, role, "text encoder") for pattern, role in TEXT_ENCODER)
