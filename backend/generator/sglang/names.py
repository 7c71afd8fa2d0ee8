"""What a server is to call a snapshot."""

from __future__ import annotations

import re
import uuid

_LONGEST = 60


def unique_name(snapshot: str) -> str:
    """Letters, digits and dashes of the snapshot's name, for people who list a server's models, and what makes it
    unique among all that share the server."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", snapshot).strip("-")[-_LONGEST:]
    return f"{readable}-{uuid.uuid4().hex[:12]}"
