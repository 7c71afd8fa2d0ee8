"""A reference of the sampling benchmarks: a real SGLang server on the CPU, asked over HTTP as its own clients do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.loads import Request

_TIMEOUT_S = 600.0


class SglangClient:
    """One request for each sequence, all at the same time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = asyncio.new_event_loop()
        # The server closes a connection that idles for 5 s, perhaps just when it is taken up again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits)

    def load_adapter(self, name: str, directory: Path) -> None:
        body = {"lora_name": name, "lora_path": str(directory)}
        response = httpx.post(f"{self._url}/load_lora_adapter", json=body, timeout=_TIMEOUT_S)
        response.raise_for_status()

    def sample(self, requests: Sequence[Request], adapters: Sequence[str | None] = (None,)) -> None:
        """Request i is sampled from adapter i, counted round; log-probabilities come along, as ours do."""
        self._loop.run_until_complete(self._gather(requests, adapters))

    def close(self) -> None:
        self._loop.run_until_complete(self._http.aclose())
        self._loop.close()

    async def _gather(self, requests: Sequence[Request], adapters: Sequence[str | None]) -> None:
        await asyncio.gather(
            *(self._one(r, adapters[i % len(adapters)]) for i, r in enumerate(requests))
        )

    async def _one(self, request: Request, adapter: str | None) -> None:
        body = {
            "input_ids": request.prompt,
            "sampling_params": {
                "max_new_tokens": request.num_new,
                "temperature": 1.0,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "lora_path": adapter,
        }
        response = await self._http.post("/generate", json=body)
        response.raise_for_status()
        num_tokens = len(response.json()["output_ids"])
        assert num_tokens == request.num_new, (
            f"{num_tokens} tokens, {request.num_new} were asked for"
        )
