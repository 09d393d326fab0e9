"""Rules of ten thousand lines, and of lines in any script."""

import pytest
from halfsafe.precision.base.errors import RuleError
from halfsafe.precision.plan import rules as module
from halfsafe.precision.plan.rules import rules_from

LINES = 10_000
LAYERS = [(f"blocks.{index}.ffn.0", "Linear") for index in range(20)]


@pytest.fixture
def counted(monkeypatch):
    """The patterns that are compiled, and the questions whether one matches a layer."""
    compiled, asked = [], []
    compile_pattern, matches = module.compile_pattern, module.Rule.matches
    monkeypatch.setattr(module, "compile_pattern", lambda pattern: compiled.append(pattern) or compile_pattern(pattern))
    monkeypatch.setattr(module.Rule, "matches", lambda rule, *layer: asked.append(rule) or matches(rule, *layer))
    return compiled, asked


def test_only_patterns_that_can_match_are_compiled_and_each_layer_is_asked_for_once(counted):
    compiled, asked = counted
    rules = rules_from("\n".join(f"blocks.{index}.* storage=bf16 compute=fp32" for index in range(LINES)), "none")
    assert not compiled
    for key in ("storage", "compute", "stream", "accumulation"):
        found = [rules.setting(key, *layer) for layer in LAYERS]
        assert all(found) == (key in ("storage", "compute"))
    assert len(rules.without_match(LAYERS)) == LINES - len(LAYERS)
    assert len(compiled) == len(LAYERS) and len(asked) == LINES * len(LAYERS)


def test_layers_and_reasons_in_any_script():
    rules = rules_from("blöcke.注意.* storage=bf16  # 理由: Größe", "none")
    value, rule = rules.setting("storage", "blöcke.注意.q", "Linear")
    assert (value, rule.reason) == ("bf16", "理由: Größe")
    assert rules_from(rules.to_text(), "none") == rules


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_ends_where_an_editor_ends_it(separator, end):
    with pytest.raises(RuleError, match="line 2: 'wrong'"):
        rules_from(f"a storage=bf16  # pasted{separator}from a page{end}b storage=wrong", "none")
