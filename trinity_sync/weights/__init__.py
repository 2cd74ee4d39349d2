"""The data plane: shards, their layout in shared memory, digests, staging, applying, files. No Ray, and no torch here.

A rank describes its tensors as shards (`Shard`), lays them out as a part (`PartLayout`) and stages them into a slot
(`staging.stage`). The node agent digests a slot (`bucket_digests`, `digest_rows`) and writes it (`write_shard_file`);
an explorer applies it (`apply.Receiver`). `tensors`, `packing`, `snapshot`, `staging` and `apply` need torch, which the
node agent and the control plane never load.
"""
