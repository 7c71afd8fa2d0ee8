"""Files that only the owners of given keys can read: age (age-encryption.org/v1), which every age program decrypts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# Compiled, without stubs.
from pyrage import RecipientError, encrypt_io, x25519  # pyright: ignore[reportAttributeAccessIssue]

from together_post_training.errors import Reason, fail

SUFFIX = ".age"
# Each takes a header in every file, and a moment of the server's.
MAX_RECIPIENTS = 100
_SECRET = "AGE-SECRET-KEY-"


def check_recipients(recipients: Iterable[str]) -> tuple[str, ...]:
    """Returns them. Raises INVALID_ARGUMENT, naming the one that is no public key."""
    given = tuple(recipients)
    if len(given) > MAX_RECIPIENTS:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"age_recipients holds {len(given)} keys: at most {MAX_RECIPIENTS} are accepted.",
            parameter="age_recipients",
            num_recipients=len(given),
        )
    for index, recipient in enumerate(given):
        _check(index, recipient)
    return given


def encrypt(path: Path, recipients: Iterable[str]) -> str:
    """Puts an encrypted file in the place of a plain one; its name.

    In pieces: pyrage's function for paths would stop all other threads until it is done. A process that is killed
    meanwhile leaves the plain file in the store's .data, until the next server starts or sweeps.
    """
    keys = [x25519.Recipient.from_str(recipient) for recipient in recipients]
    encrypted = path.with_name(path.name + SUFFIX)
    with open(path, "rb") as plain, open(encrypted, "wb") as file:
        encrypt_io(plain, file, keys)
    path.unlink()
    return encrypted.name


def _check(index: int, recipient: str) -> None:
    if recipient.strip().upper().startswith(_SECRET):
        raise fail(  # Without the value: messages are shown, kept and logged.
            Reason.INVALID_ARGUMENT,
            f"age_recipients[{index}] is a secret key: give the public key that belongs to it, which age-keygen -y "
            "prints, and count this one as known to the server.",
            parameter="age_recipients",
            index=index,
        )
    try:
        x25519.Recipient.from_str(recipient)
    except RecipientError as error:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"age_recipients[{index}] is {recipient!r}: it must be a public key of age's, age1 and 58 more characters, "
            f"as age-keygen makes it ({error}).",
            parameter="age_recipients",
            value=recipient,
        ) from None
