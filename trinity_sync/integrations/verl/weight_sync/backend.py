"""What a verl program names as its ``custom_backend_module``: importing this registers the weight sync."""

from __future__ import annotations

from trinity_sync.integrations.verl.weight_sync import register

register()
