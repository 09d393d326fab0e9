"""Messages: English text that keeps its template and values, so that a page can word it in another language."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping


class Message(str):
    """The text of a template and values: a ``str``, equal to the same text and written to JSON and logs as one.

    Operations of ``str``, such as ``+`` and f-strings, return text without a template: join messages with
    :func:`joined`.

    Args:
        template: English, with ``{0}`` or ``{name}`` for each value, as for ``str.format``.
        values, named: what is filled in: messages, errors, names and numbers. Spaces that empty values leave at the
            start or the end are removed.

    Example:
        >>> from halfsafe.precision.base.message import Message
        >>> Message("{0} runs in {1}", "blocks.0", "fp32")
        'blocks.0 runs in fp32'
    """

    template: str
    values: tuple
    named: dict

    def __new__(cls, template: str, *values, **named):
        message = super().__new__(cls, template.format(*values, **named).strip())
        message.template = template
        message.values, message.named = values, named
        return message

    def __str__(self) -> str:
        """Return the message itself, so that ``str`` of an error keeps its template."""
        return self

    def __getnewargs_ex__(self):
        return (self.template, *self.values), self.named


def joined(texts: Iterable[str], between: str = " ") -> str:
    """Return texts as one message, with ``between`` them; empty texts are left out."""
    present = list(filter(None, texts))
    if not present:
        return ""
    return functools.reduce(functools.partial(Message, f"{{0}}{between}{{1}}"), present)


def messages_in(value) -> dict[str, dict]:
    """Return each message in JSON data, and the messages it is made of: text -> its ``template`` and ``values``."""
    if isinstance(value, Message):
        parts = {**{str(place): each for place, each in enumerate(value.values)}, **value.named}
        values = {name: each if isinstance(each, int) else str(each) for name, each in parts.items()}
        return {value: {"template": value.template, "values": values}, **messages_in(values)}
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    found: dict[str, dict] = {}
    for each in inner:
        found |= messages_in(each)
    return found
