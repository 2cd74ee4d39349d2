"""A console of rich that escapes control characters and secrets in everything that it prints."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trinity_sync.host.masking import without_hidden
from trinity_sync.host.terminal import printable


class PlainConsole(Console):
    """Escapes control characters in rendered text, but not rich's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(without_hidden(segment.text), keep="\n")
            yield segment._replace(text=text)
