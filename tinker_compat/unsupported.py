"""Names of Tinker's SDK that this service has nothing behind, yet: they say so when they are used."""

from __future__ import annotations

from typing import Any

from tinker_compat.errors import refuse


class RestClient:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(
            "RestClient is not supported yet: ServiceClient.get_server_capabilities lists models, and "
            "CheckpointService lists and deletes checkpoints over gRPC."
        )


class AdminClient:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("AdminClient is not supported: a server of your own has no accounts and no bills.")
