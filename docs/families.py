"""The tables of families in the page on models, from what `tests/round_trips.py` found (`tests/round_trips.json`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("models.md")
RESULTS = PAGE.parents[1] / "tests" / "round_trips.json"
_BEGIN, _END = "<!-- python -m docs.families writes what follows -->\n", "<!-- up to here -->\n"
_CELLS = {
    "fsdp2 hf": "`fsdp2`, `hf`",
    "fsdp2 vllm": "`fsdp2`, `vllm`",
    "megatron hf": "`megatron`, `hf`",
    "megatron vllm": "`megatron`, `vllm`",
    "adapter": "LoRA, `fsdp2`, `hf`",
}


def page() -> str:
    """The whole page: what is between the marks is written anew."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{tables(json.loads(RESULTS.read_text()))}{_END}{after}"


def tables(results: Mapping[str, Any]) -> str:
    """Both tables.

    Args:
        results: by family what `tests.round_trips.results_of` returns.
    """
    reasons: dict[str, int] = {}

    def cell(family: str, found: str | None) -> str:
        if found is None:
            return ""
        if found.startswith("yes"):
            return found
        reason = re.sub(rf"(?<![\w/]){family}(?!\w)", "FAMILY", found)
        return f"no ({reasons.setdefault(reason, len(reasons) + 1)})"

    runs = [[f"`{family}`", *(cell(family, of["runs"].get(name)) for name in _CELLS)] for family, of in results.items()]
    libraries = list(dict.fromkeys(name for of in results.values() for name in of["loads"]))
    back = [
        [
            f"`{family}`",
            ", ".join(_changed(of["files"])) or "nothing",
            *(_joined(cell(family, said) for said in _loads(of, [name], adapter=False)) for name in libraries),
            _joined(cell(family, said) for said in _loads(of, libraries, adapter=True)),
        ]
        for family, of in results.items()
        if of["loads"]
    ]
    told = [f"- ({number}) `{reason}`" for reason, number in reasons.items()]
    return "\n".join(
        [
            *_table(["family (`model_type`)", *_CELLS.values()], runs),
            "",
            *_table(["family", "changed", *libraries, "peft"], back),
            "",
            "The reasons for each *no*. FAMILY is the family of the row, DIR the folder of the model:",
            "",
            *told,
            "",
        ]
    )


def _changed(files: Mapping[str, list[str]]) -> list[str]:
    return [f"`{name}`" for name in dict.fromkeys(name for names in files.values() for name in names)]


def _loads(of: Mapping[str, Any], libraries: list[str], *, adapter: bool) -> list[str]:
    """What libraries said of a family's adapter, or of its exports of whole weights."""
    found = [of["loads"].get(library, {}) for library in libraries]
    return [said for loads in found for name, said in loads.items() if (name == "adapter") == adapter]


def _joined(cells: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(cells))


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    PAGE.write_text(page())
