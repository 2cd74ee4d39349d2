"""HTML by construction: text is escaped unless it was built here. And the frame and style of every report page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib import resources


class Html(str):
    """Markup that is safe to place as it is. Only `tag`, `join` and the charts make it."""


def tag(element: str, /, *children: str | Html | None, **attributes: object) -> Html:
    """An element. Children that are plain text are escaped, None is left out; attributes lose a trailing underscore."""
    head = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in ("meta", "br", "line", "circle", "rect", "polyline", "path", "col"):
        inner = join(*children)
        return Html(f"<{element}{head}>{inner}</{element}>") if inner else Html(f"<{element}{head}/>")
    return Html(f"<{element}{head}>{join(*children)}</{element}>")


def join(*children: str | Html | None) -> Html:
    """Children one after the other, plain text escaped."""
    return Html(
        "".join(child if isinstance(child, Html) else html.escape(child) for child in children if child is not None)
    )


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str | Html]],
    numeric: Sequence[int] = (),
    empty: str = "Nothing recorded.",
) -> Html:
    """A table that scrolls sideways when the window is narrow.

    Args:
        head: column titles.
        rows: cells as text or markup.
        numeric: columns to align right.
        empty: said instead of a table without rows.
    """
    lines = [
        tag("tr", *(tag("td", cell, class_="num" if index in numeric else None) for index, cell in enumerate(row)))
        for row in rows
    ]
    if not lines:
        return tag("p", empty, class_="quiet")
    titles = tag(
        "tr", *(tag("th", title, scope="col", class_="num" if i in numeric else None) for i, title in enumerate(head))
    )
    return tag("div", tag("table", tag("thead", titles), tag("tbody", *lines)), class_="scroll")


def section(title: str, *children: str | Html | None, hint: str | None = None, wide: bool = True) -> Html:
    """A card with a title and one line on how to read it."""
    head = tag("header", tag("h2", title), tag("p", hint, class_="quiet") if hint else None)
    return tag("section", head, *children, class_="card wide" if wide else "card")


def tiles(items: Iterable[tuple[str, str, str | None]]) -> Html:
    """Key figures: label, value, and a line of detail."""
    cells = [
        tag(
            "div",
            tag("dt", label),
            tag("dd", value),
            tag("p", detail, class_="quiet") if detail else None,
            class_="tile",
        )
        for label, value, detail in items
    ]
    return tag("dl", *cells, class_="tiles")


def badge(status: str) -> Html:
    """A status as sign, word and colour."""
    sign = {"completed": "✓", "failed": "✕", "running": "▶", "interrupted": "❚❚"}.get(status, "○")
    return tag("span", tag("span", sign, aria_hidden="true"), " ", status, class_=f"badge {status.split()[0]}")


def digest(value: object) -> Html:
    """The beginning of a digest, all of it on hover."""
    text = str(value or "")
    return tag("code", text[:12], title=text) if text else tag("span", "off", class_="quiet")


def page(title: str, *body: str | Html | None) -> str:
    """A whole page, style included, with nothing to be fetched from anywhere."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(resources.files(__package__).joinpath("style.css").read_text())),
    )
    return f'<!doctype html>\n<html lang="en">{head}{tag("body", tag("main", *body))}</html>\n'
