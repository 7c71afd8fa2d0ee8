"""tinker.auth: whether one can use the service. Here any key will do, and none too; the server may ask for one."""

from __future__ import annotations

import os
from dataclasses import replace

import tinker

from tinker_compat.service_client import ServiceClient
from together_post_training.client.address import resolve_key

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]

# Whoever asks wants to know now.
_CONNECT_TIMEOUT_S = 3.0


def get_tinker_token() -> str | None:
    """The key that a client made now would send: TINKER_API_KEY's or TOGETHER_API_KEY's, if it can be sent."""
    try:
        return resolve_key(None, os.environ)
    except ValueError:
        return None


def tinker_has_credentials() -> bool:
    """Whether a client could be made now: not with a key in the environment that cannot be sent. Asks nobody."""
    try:
        resolve_key(None, os.environ)
    except ValueError:
        return False
    return True


def raise_if_tinker_not_accessible() -> None:
    """Asks the server which models it serves; starts one where that is what clients would do.

    Raises:
        APIConnectionError: there is none, within seconds.
        TinkerError: for an address or key that no client could be made with, or what the server says to it.
    """
    try:
        service = ServiceClient()
    except ValueError as error:
        raise tinker.TinkerError(str(error)) from error
    connection = service.holder.connection
    connection.policy = replace(connection.policy, connect_timeout_s=_CONNECT_TIMEOUT_S)
    try:
        service.get_server_capabilities()
    finally:
        service.close("success").result()
