"""The result of bench_peers.py as tables in Markdown."""

from __future__ import annotations


def as_text(result: dict) -> str:
    """Conditions, one table for each section measured, every error in full, and which packs were left out."""
    peers = ", ".join(f"{name} {commit}" for name, commit in result["peers"].items()) or "no peers"
    machine = f"{result['cpu']}, {result['cores']} cores, torch {result['torch']} with {result['torch_threads']} threads"
    head = f"{machine}, ComfyUI {result['comfyui']}; {peers}; medians of {result['runs']}, {result['date']}"
    parts = [TABLES[name](rows) for name, rows in result["sections"].items()]
    return "\n\n".join([head, *parts, *result["left_out"]])


def loads(rows: list[dict]) -> str:
    head = ["load to fp8, one call in fp32", "load s", "of it computing", "peak memory", "weights", "call s", "of it computing", "error", "import s"]
    keys = (("seconds", _two), ("cpu_seconds", _two), ("anonymous_bytes", _gb), ("weight_bytes", _gb))
    keys += (("call_seconds", _two), ("call_cpu_seconds", _two), ("error", _error), ("import_cpu_seconds", _two))
    good = [[row["name"], *(show(row.get(key)) for key, show in keys)] for row in rows if "fails" not in row]
    calls = [f"{row['name']}, its own call: {row['call_fails']}; the error is of its stored weights in ComfyUI's Wan" for row in rows if row.get("call_fails")]
    return _with_notes(_table(head, good), calls + _failures(rows))


def options(sides: list[dict]) -> str:
    """One line for each weight dtype and compute dtype; a letter stands for each error."""
    notes: dict[str, str] = {}
    grids = [{(row["storage"], row["compute"]): _cell(row, notes) for row in side["rows"]} for side in sides]
    rows = [[*pair, *(grid[pair] for grid in grids)] for pair in grids[0]]
    table = _table(["weights", "compute", *(side["name"] for side in sides)], rows)
    return _with_notes(table, [f"{letter}: {text}" for text, letter in notes.items()])


def _cell(row: dict, notes: dict[str, str]) -> str:
    if "fails" in row:
        return notes.setdefault(row["fails"], chr(ord("a") + len(notes)))
    return _error(row["error"])


def accumulation(sides: list[dict]) -> str:
    """Of each node: runs whose flag was as asked inside, runs after which every flag was as before, by how they ended."""
    head = ["node that sets fp16 accumulation", "as asked in the call", "as before after: a run", "an error", "an interrupt", "two models, on and off"]
    table = _table(head, [_sums_row(side) for side in sides])
    return _with_notes(table, _reasons(sides))


def _sums_row(side: dict) -> list[str]:
    called = [row for row in side["rows"] if row["inside"] is not None]
    ends = [_share([row["restored"] for row in side["rows"] if row["end"] == end]) for end in ("finishes", "raises", "is interrupted")]
    two = side["two_models"].get("right")
    words = {True: "right", False: "wrong", None: "not run"}
    return [side["name"], _share([row["inside"] == row["asked"] for row in called]), *ends, words[two]]


def _share(found: list[bool]) -> str:
    return f"{sum(found)} of {len(found)}" if found else "not run"


def nan(sides: list[dict]) -> str:
    kinds = [row["kind"] for row in sides[0]["rows"]]
    rows = [[side["name"], *("fails" if "fails" in row else _error(row["error"]) for row in side["rows"])] for side in sides]
    return _with_notes(_table(["four steps, overflow in", *kinds], rows), _reasons(sides))


def products(rows: list[dict]) -> str:
    good = [[row["name"], _error(row["error"])] for row in rows if "fails" not in row]
    return _with_notes(_table(["fp8 product, one channel 1000 times larger", "error"], good), _failures(rows))


def overhead(result: dict) -> str:
    if "fails" in result:
        return f"overhead: {result['fails']}"
    rows = [[row["node"], f"{row['cpu_seconds']:.3f}", f"{row['ratio']:.3f}"] for row in result["rows"]]
    return _table(["20 steps of a small model with", "s of computing", "ratio"], rows)


TABLES = {
    "load": loads,
    "options": options,
    "accumulation": accumulation,
    "nan": nan,
    "fp8_product": products,
    "overhead": overhead,
}


def _reasons(sides: list[dict]) -> list[str]:
    """Each error of each side, once."""
    texts = {side["name"]: dict.fromkeys(row["fails"] for row in side["rows"] if "fails" in row) for side in sides}
    return [f"{name}: {text}" for name, found in texts.items() for text in found]


def _failures(rows: list[dict]) -> list[str]:
    return [f"{row['name']}: {row['fails']}" for row in rows if "fails" in row]


def _with_notes(table: str, notes: list[str]) -> str:
    return "\n\n".join([table, *notes])


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _gb(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f} GB"


def _error(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.2g}"
