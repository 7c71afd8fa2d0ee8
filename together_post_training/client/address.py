"""Where the server is and how to say who one is: pure functions of arguments and environment."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

OWN_VARIABLE = "TOGETHER_POST_TRAINING_ADDRESS"
# Other SDKs' variables: used where they hold a gRPC address, ignored where they hold a web address.
FOREIGN_VARIABLES = ("TINKER_BASE_URL", "TOGETHER_BASE_URL")
KEY_VARIABLES = ("TINKER_API_KEY", "TOGETHER_API_KEY")

_ACCEPTED = "grpc://host:port, grpcs://host:port (TLS) or host:port"
_ADDRESS = re.compile(
    r"(?:(grpcs?)://)?(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.\-]+):([0-9]{1,5})/?", re.ASCII
)
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.\-]+", re.ASCII)
_WEB = re.compile(r"https?://", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A gRPC server. `target` is host:port; `secure` is TLS."""

    target: str
    secure: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether the server runs on this very machine."""
        host = self.target.rpartition(":")[0].strip("[]")
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host.lower() == "localhost"

    def __str__(self) -> str:
        return f"{'grpcs' if self.secure else 'grpc'}://{self.target}"


def resolve_address(base_url: str | None, environ: Mapping[str, str]) -> Address | None:
    """The argument, else the first variable that is set; None means an embedded server.

    Raises:
        ValueError: for anything but a gRPC address, save for a web address in another SDK's variable.
        TypeError: for an argument that is not a string.
    """
    if base_url is not None:
        if not isinstance(base_url, str):
            raise TypeError(f"base_url must be a string ({_ACCEPTED}), got {base_url!r}.")
        return parse_address(base_url, what="base_url")
    if environ.get(OWN_VARIABLE):
        return parse_address(environ[OWN_VARIABLE], what=OWN_VARIABLE)
    for variable in FOREIGN_VARIABLES:
        value = environ.get(variable)
        if value and not _WEB.match(value.strip()):
            return parse_address(value, what=variable)
    return None


def parse_address(text: str, *, what: str) -> Address:
    """Raises ValueError, naming `what` and the forms that are accepted."""
    stripped = text.strip()
    if _WEB.match(stripped):
        raise ValueError(
            f"{what} is a web address, {text!r}: this client speaks gRPC. Pass {_ACCEPTED}, "
            "or leave it out to start an embedded server."
        )
    match = _ADDRESS.fullmatch(stripped)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"{what} is {text!r}: expected {_ACCEPTED}.")
    return Address(target=f"{match[2]}:{match[3]}", secure=match[1] == "grpcs")


def resolve_key(api_key: str | None, environ: Mapping[str, str]) -> str | None:
    """The argument, else the first variable that is set. Any key will do, and none too.

    Raises:
        TypeError: for a key that is not a string.
        ValueError: for a key that cannot be sent in a header. The key itself is not repeated.
    """
    if api_key is None:
        for variable in KEY_VARIABLES:
            if environ.get(variable):
                return _check_key(environ[variable], what=variable)
        return None
    if not isinstance(api_key, str):
        raise TypeError(f"api_key must be a string, got {type(api_key).__name__}.")
    return _check_key(api_key, what="api_key") or None


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers as they are sent, with lower-case names.

    Raises:
        TypeError, ValueError: naming the header. Values are not repeated.
    """
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name) or name.endswith("-bin"):
            raise ValueError(
                f"Header {name!r}: names are of letters, digits, '-', '_' and '.', and do not end in '-bin'."
            )
        if not isinstance(value, str):
            raise TypeError(f"Header {name!r} must be a string, got {type(value).__name__}.")
        _check_key(value, what=f"Header {name!r}")
    return {name.lower(): value for name, value in headers.items()}


def _check_key(key: str, *, what: str) -> str:
    for position, character in enumerate(key):
        if not 0x20 <= ord(character) < 0x7F:
            raise ValueError(
                f"{what} holds {character!r} at position {position}: it is sent as a header and must be "
                "printable ASCII without line breaks."
            )
    return key
