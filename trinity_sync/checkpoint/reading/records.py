"""Stand-ins for classes that checkpoints name in their pickles: they keep the fields, and run nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class Record:
    """An object of a class that is not loaded: its fields as attributes; what is no set of fields as ``state``."""

    def __new__(cls, *args: object) -> Record:
        return super().__new__(cls)

    def __init__(self, *args: object) -> None:
        pass

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a field of the pickle, whatever its name."""

    def __setstate__(self, state: object) -> None:
        # dataclasses with slots are pickled as a pair of their (empty) dict and their slots
        fields = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in fields):
            for part in fields:
                vars(self).update(part if isinstance(part, dict) else {})
        else:
            self.state = state
