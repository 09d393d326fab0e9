"""The length of source files: whoever opens one reads it whole."""

from __future__ import annotations

from support.shipped import ROOT, tracked_files

LONGEST = 400


def test_no_source_file_outside_the_tests_is_longer_than_400_lines() -> None:
    sources = [path for path in tracked_files() if path.suffix in (".py", ".js") and path.parts[0] != "tests"]
    lengths = {str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources}
    assert len(lengths) > 150 and {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}
