"""The data plane: shards, their layout in shared memory, digests, staging, applying, files. No Ray, and no torch here.

A rank describes what it holds as shards (`Shard`), lays them out as a part (`PartLayout`) and stages them into a slot
(`staging.stage`). Whoever holds the slot digests it (`bucket_digests`, `digest_rows`), writes it (`write_shard_file`)
or applies it (`apply.Receiver`). All are imported by their module's name: `dtypes` and `wire` need nothing, so that the
control plane may, `tensors`, `staging` and `apply` need torch, which the node agent never loads.
"""
