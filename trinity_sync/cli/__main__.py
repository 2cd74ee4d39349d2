"""`python -m trinity_sync.cli`: the command where its script is not installed."""

import sys

from trinity_sync.cli.main import main

sys.exit(main())
