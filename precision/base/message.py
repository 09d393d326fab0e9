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
    sentences: tuple[str, ...] = ()
    """The sentences that :func:`joined` put together: the page shows the first ones large, and folds the others."""

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
    """Return texts as one message, with ``between`` them; empty texts are left out. With white space alone between them
    they are its ``sentences``."""
    present = list(filter(None, texts))
    if not present:
        return ""
    message = functools.reduce(functools.partial(Message, f"{{0}}{between}{{1}}"), present)
    if between.isspace() and isinstance(message, Message) and len(present) > 1:
        message.sentences = tuple(each for text in present for each in getattr(text, "sentences", ()) or (text,))
    return message


def ended(text: str) -> str:
    """Return a text as a sentence, which ends with a full stop."""
    return text if text.endswith(".") else Message("{0}.", text)


def messages_in(value) -> dict[str, dict]:
    """Return each message in JSON data, and the messages it is made of: text -> its ``template`` and ``values``, and
    its ``sentences`` if it has several. A message whose other values are empty is the value that is left."""
    if isinstance(value, Message):
        parts = {**{str(place): each for place, each in enumerate(value.values)}, **value.named}
        values = {name: each if isinstance(each, int) else str(each) for name, each in parts.items()}
        inner = messages_in(values)
        several = {"sentences": [*value.sentences]} if value.sentences else {}
        made_of = {"template": value.template, "values": values, **several}
        return inner if value in values.values() else {value: made_of, **inner}
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    found: dict[str, dict] = {}
    for each in inside:
        found |= messages_in(each)
    return found
