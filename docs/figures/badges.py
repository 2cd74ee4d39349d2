"""The badges of the README: facts of this checkout, drawn from its own files, so that they need no server."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
_STYLE = """
  text { font: 11px -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #ffffff }
  .what { fill: #59636e } .fact { fill: #0b5cad }
  @media (prefers-color-scheme: dark) { .what { fill: #3d444d } .fact { fill: #2f6fb3 } }
"""


def facts() -> dict[str, tuple[str, str]]:
    """Name of a badge -> what, and the fact."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, high = (int(minor) for minor in re.findall(r"3\.(\d+)", project["requires-python"]))
    tested = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    return {
        "python": ("python", " | ".join(f"3.{minor}" for minor in range(low, high))),
        "licence": ("licence", project["license"]),
        **{name: (f"tested with {name}", tested[name]) for name in ("verl", "torch")},
    }


def draw(what: str, fact: str) -> str:
    """One badge."""
    left, right = (round(6.4 * len(text)) + 14 for text in (what, fact))
    width = left + right
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 20" width="{width}" height="20" role="img">',
            f"<title>{escape(what)}: {escape(fact)}</title>",
            f"<style>{_STYLE}</style>",
            f'<path class="what" d="M 4 0 H {left} V 20 H 4 A 4 4 0 0 1 0 16 V 4 A 4 4 0 0 1 4 0"/>',
            f'<path class="fact" d="M {left} 0 H {width - 4} a 4 4 0 0 1 4 4 V 16 a 4 4 0 0 1 -4 4 H {left} z"/>',
            f'<text x="{left / 2:g}" y="14" text-anchor="middle">{escape(what)}</text>',
            f'<text x="{left + right / 2:g}" y="14" text-anchor="middle">{escape(fact)}</text>',
            "</svg>\n",
        ]
    )


def badges() -> dict[str, Callable[[], str]]:
    """File name, without its ending -> what draws it."""
    return {f"badge-{name}": partial(draw, *pair) for name, pair in facts().items()}
