"""SGLang's replies as arrays, every length and number checked. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from backend.generator.base import Topk
from backend.generator.sampling import ABSENT_LOGPROB
from backend.generator.sequences import non_finite_logits
from backend.generator.sglang.client import Json, unreadable
from backend.generator.sglang.requests import Reading
from together_post_training.errors import Reason, fail

Array = np.ndarray
End = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """layers: those that have experts, of all num_layers."""

    num_layers: int
    layers: tuple[int, ...]
    per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What one request added to a sample: tokens int32 (n,), logprobs float32 (n,), the likeliest tokens of each.

    weight_version: of the base weights; empty: the server does not say. experts: int16 (num tokens read, layers with
    experts, experts per token), present if asked for.
    """

    tokens: Array
    logprobs: Array
    topk: Topk | None
    end: End
    cached_tokens: int
    weight_version: str
    experts: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Of the positions that a reading scores, R of them: logprobs float32 (R,) of their own tokens, the likeliest
    tokens, logprobs (R, C) of those that the reading chose."""

    logprobs: Array
    topk: Topk | None
    chosen: Array | None
    cached_tokens: int
    weight_version: str


def sampled(
    reply: Json, *, num_asked: int, vocab_size: int, num_top: int, experts: Experts | None
) -> Sampled:
    """Raises NON_FINITE_LOGITS; INTERNAL for a reply that does not fit; UNAVAILABLE for one that the server ended."""
    meta, tokens = _meta(reply), _token_ids(reply.get("output_ids"))
    end = _end(meta)
    rows = _rows(meta, "output_token_logprobs")
    if len(rows) != len(tokens) or [row[1] for row in rows] != tokens:
        raise unreadable(f"{len(tokens)} tokens and {len(rows)} log-probabilities")
    if len(tokens) > num_asked or (end == "length" and len(tokens) < num_asked):
        raise unreadable(f"{len(tokens)} tokens of {num_asked}, ended by {end!r}")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise unreadable(f"token ids {min(tokens)} to {max(tokens)} of {vocab_size}")
    encoded = meta.get("routed_experts")
    num_read = _number(meta, "prompt_tokens") + len(tokens) - 1
    return Sampled(
        tokens=np.array(tokens, np.int32),
        logprobs=_finite([row[0] for row in rows]),
        topk=_topk(_rows(meta, "output_top_logprobs"), len(tokens), num_top) if num_top else None,
        end=end,
        cached_tokens=_number(meta, "cached_tokens"),
        weight_version=str(meta.get("weight_version") or ""),
        experts=_experts(encoded, num_read, experts) if encoded and experts else None,
    )


def read(reply: Json, reading: Reading, *, vocab_size: int) -> Read:
    """Raises as `sampled` does."""
    meta = _meta(reply)
    if _end(meta) == "abort":
        raise unreadable("a prompt was not read to its end")
    num_scored = 0 if reading.first is None else len(reading.tokens) - reading.first
    logprobs, topk, chosen = np.empty(0, np.float32), None, None
    if num_scored:
        rows = _scored(meta, "input_token_logprobs", num_scored)
        if not _are_of(rows, reading.tokens[-num_scored:].tolist(), vocab_size):
            raise unreadable("log-probabilities of other tokens than the prompt's")
        logprobs = _finite([row[0] for row in rows])
        if reading.num_top:
            top_rows = _scored(meta, "input_top_logprobs", num_scored)
            topk = _topk(top_rows, num_scored, reading.num_top)
        if reading.chosen:
            chosen = _chosen(_scored(meta, "input_token_ids_logprobs", num_scored), reading.chosen)
    return Read(
        logprobs=logprobs,
        topk=topk,
        chosen=chosen,
        cached_tokens=_number(meta, "cached_tokens"),
        weight_version=str(meta.get("weight_version") or ""),
    )


def padded(topk: Topk, k: int) -> Topk:
    """With k columns: absent ones where the vocabulary has fewer tokens."""
    missing = k - topk.token_ids.shape[1]
    if not missing:
        return topk
    return Topk(
        token_ids=np.pad(topk.token_ids, ((0, 0), (0, missing))),
        logprobs=np.pad(topk.logprobs, ((0, 0), (0, missing)), constant_values=ABSENT_LOGPROB),
    )


def _meta(reply: Json) -> Mapping[str, object]:
    meta = reply.get("meta_info")
    if not isinstance(meta, Mapping):
        raise unreadable(f"no meta_info among {sorted(reply)}")
    return meta


def _end(meta: Mapping[str, object]) -> End:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else None
    if kind == "stop" and isinstance(reason, Mapping) and reason.get("matched") == "NaN happened":
        raise non_finite_logits()
    if kind == "abort" and isinstance(reason, Mapping) and reason.get("status_code"):
        raise fail(Reason.UNAVAILABLE, f"The SGLang server ended the call: {reason.get('message')}")
    if kind == "stop" or kind == "length" or kind == "abort":
        return kind
    raise unreadable(f"finish_reason {reason!r}")


def _number(meta: Mapping[str, object], name: str) -> int:
    value = meta.get(name) or 0
    if not isinstance(value, int):
        raise unreadable(f"{name} {value!r}")
    return value


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
        raise unreadable(f"output_ids {str(value)[:100]}")
    return value


def _rows(meta: Mapping[str, object], name: str) -> list:
    value = meta.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise unreadable(f"{name} is no list")
    return value


def _scored(meta: Mapping[str, object], name: str, num_scored: int) -> list:
    """The rows after the first, which has no numbers."""
    rows = _rows(meta, name)
    if len(rows) != num_scored + 1:
        raise unreadable(f"{len(rows)} rows of {name}, must be {num_scored + 1}")
    return rows[1:]


def _are_of(rows: Sequence, tokens: list[int], vocab_size: int) -> bool:
    """Whether the rows name these tokens. SGLang 0.5.23 names the last of the vocabulary 0 in the rows of a prompt
    (logprob_result_processor.py); their numbers are right."""
    last = vocab_size - 1
    return all(
        row[1] == token or (token == last and row[1] == 0)
        for row, token in zip(rows, tokens, strict=True)
    )


def _finite(values: Sequence[float | None]) -> Array:
    """JSON has no NaN: some writers make it null."""
    array = np.array([np.nan if v is None else v for v in values], np.float32)
    if not np.isfinite(array).all():
        raise non_finite_logits()
    return array


def _topk(rows: Sequence, num_rows: int, k: int) -> Topk:
    """Best first; of equals the lowest id."""
    if len(rows) != num_rows or any(row is None or len(row) != k for row in rows):
        raise unreadable(f"the {k} likeliest tokens are not there for each of {num_rows} positions")
    if any(cell[0] is None for row in rows for cell in row):
        raise non_finite_logits()
    cells = [sorted(row, key=lambda cell: (-cell[0], cell[1])) for row in rows]
    ids = np.array([[cell[1] for cell in row] for row in cells], np.int32).reshape(num_rows, k)
    logprobs = _finite([cell[0] for row in cells for cell in row]).reshape(num_rows, k)
    return Topk(token_ids=ids, logprobs=logprobs)


def _chosen(rows: Sequence, chosen: tuple[int, ...]) -> Array:
    if any(row is None or [cell[1] for cell in row] != list(chosen) for row in rows):
        raise unreadable("log-probabilities of other tokens than those asked for")
    values = [cell[0] for row in rows for cell in row]
    return _finite(values).reshape(len(rows), len(chosen))


def _experts(encoded: object, num_tokens: int, experts: Experts) -> Array:
    """From base64 of int32 (num_tokens, all layers, experts per token)."""
    shape = (num_tokens, experts.num_layers, experts.per_token)
    try:
        flat = np.frombuffer(base64.b64decode(str(encoded), validate=True), "<i4")
        whole = flat.reshape(shape)
    except (binascii.Error, ValueError) as error:
        raise unreadable(f"routed_experts are not {list(shape)} ({error})") from None
    return whole[:, list(experts.layers)].astype(np.int16)
