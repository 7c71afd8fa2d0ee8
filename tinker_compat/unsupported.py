"""Names of Tinker's SDK that this service has nothing behind: they say so when they are used."""

from __future__ import annotations

from typing import Any

from tinker_compat.errors import refuse


class AdminClient:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(
            "AdminClient is not supported: a server of your own has no accounts, bills or audit log. "
            "RestClient.get_current_checkpoint_storage_usage tells what checkpoints take."
        )
