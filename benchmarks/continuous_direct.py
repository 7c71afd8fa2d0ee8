"""A reference of the sampling benchmarks: transformers' own continuous batching, in the caller's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.loads import Request

_PAGE_TOKENS = 256


class ContinuousGenerator:
    """Keeps one manager running, as a server would. It returns log-probabilities of what it samples, as ours does."""

    def __init__(self, directory: Path, *, num_requests: int, num_tokens: int) -> None:
        """
        Args:
            num_requests, num_tokens: what its cache has room for at once.
        """
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="paged|sdpa"
        ).eval()
        pages = num_requests + num_tokens // _PAGE_TOKENS
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=pages,
                max_batch_tokens=4096,
                return_logprobs=True,
                use_async_batching=False,
            ),
        )
        self._manager.start()

    def sample(self, requests: Sequence[Request]) -> None:
        left = {
            self._manager.add_request(
                request.prompt, max_new_tokens=request.num_new
            ): request.num_new
            for request in requests
        }
        while left:
            result = self._manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError(f"{len(left)} requests were not answered within a minute")
            if result.is_finished():
                num_tokens, wanted = len(result.generated_tokens), left.pop(result.request_id)
                assert num_tokens == wanted, f"{num_tokens} tokens, {wanted} were asked for"

    def close(self) -> None:
        self._manager.stop(block=True)
