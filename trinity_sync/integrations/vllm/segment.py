"""A segment of this node's shared memory that an explorer has vLLM's workers map."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from trinity_sync.host.logs import story
from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.slots import DEFAULT_ROOT, SlotArena, remove_stale


class SharedSegment:
    """A segment that is made anew when what is to lie in it is laid out otherwise. It goes with `close`; if this
    process is killed, with the next one that is made.
    """

    def __init__(self) -> None:
        self._arena: SlotArena | None = None
        self._layout: PartLayout | None = None

    def laid_out(self, layout: PartLayout) -> SlotArena:
        """An arena of one slot, in which the layout's part is.

        Raises:
            SegmentError: there is no room for it.
            WaitTimeout: another process of this user keeps the user's folder locked.
        """
        if self._arena is None or self._layout != layout:
            self.close()
            elsewhere = Path(tempfile.gettempdir())
            for root in (DEFAULT_ROOT, elsewhere):
                remove_stale(root)  # of programs that were killed
            key = f"vllm-{secrets.token_hex(8)}"
            self._arena = SlotArena.create(key, 1, {layout.part: layout.nbytes}, fallback=elsewhere)
            for note in self._arena.notes:
                story.warning("%s", note)
            self._layout = layout
        return self._arena

    def close(self) -> None:
        """Give the memory back once nobody maps it any more."""
        if self._arena is not None:
            self._arena.close()
        self._arena = None
