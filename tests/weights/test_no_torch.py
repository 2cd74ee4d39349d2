from __future__ import annotations

import subprocess
import sys


def test_the_room_and_all_that_the_node_agent_needs_load_neither_torch_nor_ray() -> None:
    program = (
        "import sys; from trinity_sync.weights import digests, layout, lora, shard_file, shards, slots\n"
        "layout = layout.PartLayout.build('p', [shards.whole('a', 'BF16', (2, 2))], 64)\n"
        "assert digests.digest_rows([(layout, bytes(8))]).version_digest()\n"
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
