"""`python -m trinity_sync.cli`: the command without its installed script."""

import sys

from trinity_sync.cli.main import program

sys.exit(program())
