"""Whether a model gives numbers under some weights: asked once, before anything is sampled from them.

A server that draws from logits that are not finite makes something up, or ends (SGLang 0.5.23, on GPUs and CPUs).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from backend.generator.sequences import non_finite_logits


class FiniteCheck:
    """Owned by the event loop. `ask`: whether they are."""

    def __init__(self, ask: Callable[[], Awaitable[bool]]) -> None:
        self._ask = ask
        self._asking = asyncio.Lock()
        self._answer: bool | None = None

    async def require(self) -> None:
        """Raises NON_FINITE_LOGITS, and what asking raises."""
        if self._answer is None:
            async with self._asking:
                if self._answer is None:
                    self._answer = await self._ask()
        if not self._answer:
            raise non_finite_logits()
