"""Stands in for `trinity_sync.launch.worker_fork` where one fork server serves several of Ray's drivers.

The driver that a worker is for is in its environment, and a fork server begins nothing in another environment than the
first one. So the driver goes to the worker as a variable of its own. A server that has imported Ray could not serve
another driver: Ray's library keeps what it finds there.
"""

import json
import os
import runpy
import sys
from pathlib import Path

_CONTEXT, _DRIVER = "--serialized-runtime-env-context=", "RAY_JOB_ID"
_WORKER = Path(__file__).parents[1] / "trinity_sync" / "launch" / "worker_fork.py"

if __name__ == "__main__":
    context = next((a[len(_CONTEXT) :] for a in sys.argv if a.startswith(_CONTEXT)), "") or "{}"
    said = json.loads(context)
    said["env_vars"] = {_DRIVER: os.environ.pop(_DRIVER), **(said.get("env_vars") or {})}
    sys.argv[1:] = [a for a in sys.argv[1:] if not a.startswith(_CONTEXT)] + [_CONTEXT + json.dumps(said)]
    runpy.run_path(str(_WORKER), run_name="__main__")
