"""A console of rich's that shows foreign text as text."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from trinity_sync.host.masking import without_hidden
from trinity_sync.host.terminal import printable


class PlainConsole(Console):
    """Escapes control characters in everything that is rendered, but not those by which rich draws."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(without_hidden(segment.text), keep="\n")
            yield segment._replace(text=text)
