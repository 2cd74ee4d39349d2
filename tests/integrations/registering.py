"""What a program names as `custom_backend_module`."""

from trinity_sync.integrations.verl import weight_sync

weight_sync.register()
