"""The data plane: shards, their layout in shared memory, digests, staging, applying, files. No Ray, and no torch here.

A rank describes what it holds as shards (`Shard`), lays them out as a part (`PartLayout`) and stages them into a slot
(`staging.stage`). Whoever holds the slot digests it (`bucket_digests`, `digest_rows`), writes it (`write_shard_file`)
or applies it (`apply.Receiver`). The modules `tensors`, `staging` and `apply` need torch and are imported by name; the
node agent never does.
"""

from trinity_sync.weights.digests import IncompleteError, RowDigests, bucket_digests, digest_rows, version_digest
from trinity_sync.weights.layout import LayoutError, PartLayout
from trinity_sync.weights.shard_file import ShardFile, ShardFileError, open_shard_file, write_shard_file
from trinity_sync.weights.shards import CoverageError, Rect, Shard, check_cover, flat_range, row_slice, whole
from trinity_sync.weights.slots import SegmentError, SlotArena, map_segment, remove_stale

__all__ = [
    "CoverageError",
    "IncompleteError",
    "LayoutError",
    "PartLayout",
    "Rect",
    "RowDigests",
    "SegmentError",
    "Shard",
    "ShardFile",
    "ShardFileError",
    "SlotArena",
    "bucket_digests",
    "check_cover",
    "digest_rows",
    "flat_range",
    "map_segment",
    "open_shard_file",
    "remove_stale",
    "row_slice",
    "version_digest",
    "whole",
    "write_shard_file",
]
