"""What a real server was asked and answered: SGLang 0.5.23 on a CPU, a random Qwen3 of 259 tokens, a window of 64."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

VOCAB_SIZE = 259

_RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """path, body: of the request. status, reply: what came back."""

    path: str
    body: dict
    status: int
    reply: dict


def exchange(name: str) -> Exchange:
    return Exchange(**copy.deepcopy(_RECORDED[name]))
