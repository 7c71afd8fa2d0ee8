"""The reference of the sampling benchmarks: transformers.generate on one batch, in the caller's own process.

Run as a program, it compares the embedded generator with it, without client or server:

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.generator_direct [--threads 1] [--repeats 5]

Both sides sample at temperature 1 from the whole vocabulary, from the same prompts, with the same weights, in turn;
ours also returns log-probabilities. Figures are medians: tokens per second of wall time, and per second of CPU time,
which is the one to compare where the machine has other work.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from backend.generator.base import SampleCall, Stop
from backend.generator.embedded import EmbeddedGenerator
from backend.trainer import base_model
from backend.trainer.base import Adapter, LoraConfig
from backend.trainer.targets import linear_layers, tensor_names
from benchmarks import model

Prompts = Sequence[Sequence[int]]

# Behind the attention mask; any token will do.
_PAD_TOKEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, medians of the repeats."""

    wall_s: float
    cpu_s: float


class DirectGenerator:
    """Samples with transformers.generate; it returns no log-probabilities."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def generate(self, prompts: Prompts, *, new_tokens: int) -> Callable[[], torch.Tensor]:
        """One batch, padded on the left. Every sample has `new_tokens`."""
        longest = max(map(len, prompts))
        tokens = torch.full((len(prompts), longest), _PAD_TOKEN)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1

        @torch.inference_mode()
        def run() -> torch.Tensor:
            return self._model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                tokens,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=_PAD_TOKEN,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )

        return run


class EmbeddedSide:
    """The embedded generator, driven as the server drives it: concurrent calls on one event loop."""

    def __init__(self, directory: Path) -> None:
        self.base = base_model.load("bench", str(directory))
        self.generator = EmbeddedGenerator(self.base)
        self._loop = asyncio.new_event_loop()
        self._num_snapshots = 0

    def sample(
        self, prompts: Prompts, *, new_tokens: int, snapshots: Sequence[str | None]
    ) -> Callable[[], None]:
        """Prompt i is sampled from snapshot i, counted round."""
        calls = [
            make_call(prompt, new_tokens, seed=i, snapshot=snapshots[i % len(snapshots)])
            for i, prompt in enumerate(prompts)
        ]
        return lambda: self._loop.run_until_complete(self._gather(calls))

    def publish(self, adapter: Adapter) -> str:
        self._num_snapshots += 1
        snapshot = f"snapshot-{self._num_snapshots}"
        self._loop.run_until_complete(self.generator.add_snapshot(snapshot, adapter))
        return snapshot

    def close(self) -> None:
        self._loop.run_until_complete(self.generator.close())
        self._loop.close()

    async def _gather(self, calls: list[SampleCall]) -> None:
        await asyncio.gather(*(self.generator.sample(call) for call in calls))


def make_prompts(num_prompts: int, *, shortest: int = 8, longest: int = 24) -> Prompts:
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest + 1, num_prompts)
    return [rng.integers(1, model.VOCAB_SIZE, length).tolist() for length in lengths]


def make_call(
    prompt: Sequence[int], new_tokens: int, *, seed: int, snapshot: str | None
) -> SampleCall:
    return SampleCall(
        snapshot=snapshot,
        prompt=np.array(prompt, np.int64),
        num_samples=1,
        max_tokens=new_tokens,
        seed=seed,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop=Stop(),
    )


def make_adapter(base: base_model.BaseModel, rank: int = 16) -> Adapter:
    rng = np.random.default_rng(1)
    tensors = {}
    for path, layer in linear_layers(base.module).items():
        a, b = tensor_names(path)
        tensors[a] = rng.normal(scale=0.02, size=(rank, layer.in_features)).astype(np.float32)
        tensors[b] = rng.normal(scale=0.02, size=(layer.out_features, rank)).astype(np.float32)
    return Adapter(lora=LoraConfig(rank=rank, alpha=32, seed=0), tensors=tensors)


def in_turn(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Runs the sides alternately, after one round that is not counted."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for i in range(repeats + 1):
        for name, side in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            side()
            if i:
                seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: Timing(
            wall_s=statistics.median(w for w, _ in pairs),
            cpu_s=statistics.median(c for _, c in pairs),
        )
        for name, pairs in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The embedded generator against generate.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        directory = model.save(Path(scratch) / "model")
        direct, ours = DirectGenerator(directory), EmbeddedSide(directory)
    adapter = make_adapter(ours.base)
    adapted = [ours.publish(adapter) for _ in range(3)]
    for num_prompts in (32, 1):
        prompts, n = make_prompts(num_prompts), options.tokens
        sides: dict[str, Callable[[], object]] = {
            "generate": direct.generate(prompts, new_tokens=n),
            "ours": ours.sample(prompts, new_tokens=n, snapshots=[None]),
            "ours, 1 snapshot": ours.sample(prompts, new_tokens=n, snapshots=adapted[:1]),
            "ours, 3 snapshots + base": ours.sample(
                prompts, new_tokens=n, snapshots=[*adapted, None]
            ),
        }
        _print(f"{num_prompts} x {n} tokens", num_prompts * n, in_turn(sides, options.repeats))
    _time_first_token(ours, adapter, options.repeats)
    ours.close()


def _print(title: str, num_tokens: int, timings: dict[str, Timing]) -> None:
    print(f"{title}\n{'':28}{'tok/s':>9}{'ratio':>7}{'tok/cpu-s':>11}{'ratio':>7}")
    reference = timings["generate"]
    for name, timing in timings.items():
        print(
            f"  {name:26}{num_tokens / timing.wall_s:9.0f}{reference.wall_s / timing.wall_s:7.2f}"
            f"{num_tokens / timing.cpu_s:11.0f}{reference.cpu_s / timing.cpu_s:7.2f}"
        )


def _time_first_token(ours: EmbeddedSide, adapter: Adapter, repeats: int) -> None:
    prompts = make_prompts(1)

    def first_token() -> None:
        ours.sample(prompts, new_tokens=1, snapshots=[ours.publish(adapter)])()

    sides: dict[str, Callable[[], object]] = {
        "add_snapshot": lambda: ours.publish(adapter),
        "add_snapshot + first token": first_token,
    }
    for name, timing in in_turn(sides, repeats).items():
        print(f"{name:28}{timing.wall_s * 1e3:7.1f} ms{timing.cpu_s * 1e3:9.1f} cpu-ms")


if __name__ == "__main__":
    main()
