"""A segment of this node's shared memory that an explorer has vLLM's workers map."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from trinity_sync.weights.layout import PartLayout
from trinity_sync.weights.slots import SlotArena, remove_stale


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
            remove_stale()  # of programs that were killed
            key, elsewhere = f"vllm-{secrets.token_hex(8)}", Path(tempfile.gettempdir())
            self._arena = SlotArena.create(key, 1, {layout.part: layout.nbytes}, fallback=elsewhere)
            self._layout = layout
        return self._arena

    def close(self) -> None:
        """Give the memory back once nobody maps it any more."""
        if self._arena is not None:
            self._arena.close()
        self._arena = None
