"""The generator over a real server of its own, where a stand-in could not show it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from backend.generator.base import SampleCall, SampledSequence, Stop
from backend.generator.sglang import requests
from backend.generator.sglang.facts import facts
from backend.generator.sglang.generator import SglangGenerator
from backend.generator.sglang.options import SglangOptions
from backend.generator.sglang.requests import Reading
from backend.generator.sglang.start import SglangServers
from backend.generator.text import load_decoder
from backend.trainer import base_model
from backend.trainer.base import (
    Adapter,
    FullConfig,
    FullWeights,
    LoraConfig,
    Pass,
    Weights,
    WeightsConfig,
)
from backend.trainer.base_model import BaseModel
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.generator.sglang.recorded import exchange
from tests.generator.sglang.test_generator import call
from tests.sglang.environment import ARGUMENTS, Installation
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.samples import Sample

pytestmark = pytest.mark.sglang

# Sums in other orders, in float32.
TOLERANCE = 5e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    base: BaseModel
    trainer: TorchTrainer
    generator: SglangGenerator
    run: Callable

    def adapter(self, seed: int, *, rank: int = 4, size: float = 0.1, **modules) -> Adapter:
        """Random, so that nothing of it could be lost unseen."""
        lora = LoraConfig(rank=rank, alpha=2.0 * rank, seed=seed, **modules)
        self.trainer.create_session("fresh", lora)
        fresh = self.trainer.weights("fresh")
        self.trainer.delete_session("fresh")
        assert isinstance(fresh, Adapter)
        rng = np.random.default_rng(seed)
        tensors = {
            name: rng.normal(scale=size, size=tensor.shape).astype(np.float32)
            if ".lora_B." in name
            else tensor
            for name, tensor in fresh.tensors.items()
        }
        return replace(fresh, tensors=tensors)

    def full(self, seed: int) -> FullWeights:
        """Every matrix a little off."""
        rng = np.random.default_rng(seed)
        weights = {n: p.numpy() for n, p in self.base.module.state_dict().items()}
        return FullWeights(
            tensors={
                n: w + rng.normal(scale=0.03, size=w.shape).astype(np.float32) if w.ndim > 1 else w
                for n, w in weights.items()
            }
        )

    def logprobs(self, weights: Weights | None, tokens: list[int]) -> np.ndarray:
        """The trainer's, of all tokens but the first."""
        self.trainer.create_session("score", _config(weights))
        try:
            if weights is not None:
                self.trainer.load("score", weights, None)
            whole = np.array(tokens, np.int64)
            sample = Sample(tokens=whole[:-1], inputs={"target_tokens": whole[1:]})
            return self.trainer.run(Pass(session="score", samples=[sample])).logprobs[0]
        finally:
            self.trainer.delete_session("score")

    def gap(self, weights: Weights | None, asked: SampleCall, sequence: SampledSequence) -> float:
        whole = [*asked.prompt.tolist(), *sequence.tokens.tolist()]
        own = self.logprobs(weights, whole)[len(asked.prompt) - 1 :]
        return float(np.abs(own - sequence.logprobs).max())


def _config(weights: Weights | None) -> WeightsConfig:
    if isinstance(weights, FullWeights):
        return FullConfig()
    return weights.lora if weights is not None else LoraConfig(rank=1, alpha=1.0, seed=0)


@pytest.fixture(scope="module")
def bench(sglang: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    base = base_model.load("builtin:tiny", dtype="float32", device="cpu")
    yield from started(base, sglang, tmp_path_factory.mktemp("adapter"))


def started(base: BaseModel, sglang: Installation, directory: Path) -> Iterator[Bench]:
    lora = ("--max-lora-rank=16", "--max-loras-per-batch=4")
    options = SglangOptions(
        python=str(sglang.python),
        arguments=(*ARGUMENTS, *lora),
        env=tuple(sglang.variables.items()),
    )
    servers = SglangServers(base, options, 1, directory)
    trainer = TorchTrainer(base)
    loop = asyncio.new_event_loop()
    try:
        (generator,) = servers.generators(trainer)
        yield Bench(base=base, trainer=trainer, generator=generator, run=loop.run_until_complete)
        loop.run_until_complete(generator.close())
    finally:
        servers.close()
        loop.close()


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, num_tokens).tolist()


# What it is sent


def test_every_request_is_one_that_sglang_reads(sglang: Installation):
    """By the types with which its server reads them, which refuse what they do not know."""
    plain = call([1, 2, 3], temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    calls = [
        plain,
        call([1], stop=Stop(strings=("x",), tokens=(3, 4)), topk_sample_logprobs=3),
        call([1], temperature=1e-300, top_p=1e-9, max_tokens=1),
        call([1], return_routed_experts=True),
    ]
    bodies = [
        requests.sampling_body(
            one,
            one.prompt.tolist(),
            one.max_tokens,
            lora=lora,
            seed=seed,
            vocab_size=16,
            has_experts=True,
        )
        for one in calls
        for lora, seed in ((None, None), ("a", 2**63 - 1))
    ]
    tokens = np.array([1, 2, 3])
    bodies += [
        requests.reading_body(reading, lora)
        for reading in (
            Reading(tokens=tokens),
            Reading(tokens=tokens, first=1, num_top=4),
            Reading(tokens=tokens, first=2, chosen=(3, 5)),
        )
        for lora in (None, "a")
    ]
    assert len(bodies) == 14
    assert decoded(sglang, "GenerateRequest", [{**body, "rid": "r"} for body in bodies]) == []
    # And it would say so.
    (fault,) = decoded(sglang, "GenerateRequest", [exchange("unknown parameter").body])
    assert "seed" in fault


def test_recorded_replies_are_ones_that_sglang_gives(sglang: Installation):
    names = ("sampled", "stopped", "scored", "chosen", "aborted", "read", "updated")
    assert decoded(sglang, "GenerateResponse", [exchange(name).reply for name in names]) == []


def decoded(sglang: Installation, kind: str, values: list[dict]) -> list[str]:
    """What SGLang has against these."""
    code = """if True:
        import importlib.util, json, pathlib, sys, sysconfig
        path = pathlib.Path(sysconfig.get_path("purelib")) / "sglang/api/v1/api_types.py"
        spec = importlib.util.spec_from_file_location("api_types", path)
        types = importlib.util.module_from_spec(spec)
        sys.modules["api_types"] = types
        spec.loader.exec_module(types)
        kind, values = json.load(sys.stdin)
        faults = []
        for value in values:
            try:
                getattr(types, kind).from_json_value(value)
            except types.JsonContractError as error:
                faults.append(str(error))
        print(json.dumps(faults))
    """
    done = subprocess.run(
        [sglang.python, "-c", code],
        input=json.dumps([kind, values]),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


# Snapshots


def test_base_and_snapshots_in_one_batch_have_the_trainers_logprobs(bench: Bench):
    """Of different ranks and layers: all, the output head alone, one of three that the server computes as one."""
    adapters = {
        "all": bench.adapter(1, rank=16),
        "head": bench.adapter(2, train_attn=False, train_mlp=False),
        "k_proj": bench.adapter(3, target_modules=("k_proj",), train_unembed=False),
        "up_proj": bench.adapter(4, target_modules=("up_proj",), train_unembed=False, rank=3),
    }

    async def work():
        for name, adapter in adapters.items():
            await bench.generator.add_snapshot(name, adapter)
        # Six with four places, one of which is the base model's.
        calls = [
            call(prompt_of(5 + i, i), snapshot=name, temperature=1.0, max_tokens=20)
            for i in range(3)
            for name in (None, *adapters)
        ]
        scores = [replace(c, prompt_logprobs=True, max_tokens=0) for c in calls]
        sample = bench.generator.sample
        return (
            calls,
            await asyncio.gather(*map(sample, calls)),
            await asyncio.gather(*map(sample, scores)),
        )

    calls, sampled, scored = bench.run(work())
    for asked, result, score in zip(calls, sampled, scored, strict=True):
        weights = adapters.get(asked.snapshot)
        assert bench.gap(weights, asked, result.sequences[0]) < TOLERANCE
        own = bench.logprobs(weights, asked.prompt.tolist())
        np.testing.assert_allclose(score.prompt_logprobs[1:], own, rtol=0, atol=TOLERANCE)
    base = bench.logprobs(None, prompt_of(20))
    for adapter in adapters.values():
        assert np.abs(bench.logprobs(adapter, prompt_of(20)) - base).max() > 0.05


def test_base_and_full_weights_take_turns_and_snapshots_stay_what_they_were(bench: Bench):
    full = {"one": bench.full(1), "two": bench.full(2)}
    adapter = bench.adapter(5)

    async def work():
        for name, weights in full.items():
            await bench.generator.add_snapshot(name, weights)
        await bench.generator.add_snapshot("beside", adapter)
        names = [None, "one", "beside", "two", "one", None]
        calls = [
            call(prompt_of(6), snapshot=name, temperature=1.0, max_tokens=20) for name in names
        ]
        found = []
        for asked in calls:
            found.append(await bench.generator.sample(asked))
        return calls * 2, found + list(await asyncio.gather(*map(bench.generator.sample, calls)))

    for asked, result in zip(*bench.run(work()), strict=True):
        weights = adapter if asked.snapshot == "beside" else full.get(asked.snapshot)
        assert bench.gap(weights, asked, result.sequences[0]) < TOLERANCE
    for name in (*full, "beside"):
        bench.run(dropped(bench, name))


async def dropped(bench: Bench, name: str) -> None:
    bench.generator.drop_snapshot(name)


def test_samples_that_follow_have_each_policys_logprobs(bench: Bench):
    """Everything before the second policy's first token is read anew under it."""
    first, second = bench.adapter(6), bench.adapter(7)

    async def work():
        await bench.generator.add_snapshot("first", first)
        await bench.generator.add_snapshot("second", second)
        asked = call(prompt_of(6), snapshot="first", temperature=1.0, max_tokens=400, follows=True)
        running = asyncio.create_task(bench.generator.sample(asked))
        await asyncio.sleep(0.3)
        bench.generator.move("first", "second")
        return asked, await running

    asked, result = bench.run(work())
    (sequence,) = result.sequences
    (before, after) = sequence.segments
    assert (before.snapshot, after.snapshot) == ("first", "second")
    cut, whole = after.first_token, [*asked.prompt.tolist(), *sequence.tokens.tolist()]
    assert 0 < cut < len(sequence.tokens) == 400
    own = {name: bench.logprobs(w, whole)[5:] for name, w in (("a", first), ("b", second))}
    np.testing.assert_allclose(sequence.logprobs[:cut], own["a"][:cut], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(sequence.logprobs[cut:], own["b"][cut:], rtol=0, atol=TOLERANCE)
    assert np.abs(own["a"] - own["b"]).max() > 0.05


def test_weights_that_overflow_are_found_before_anything_is_sampled(bench: Bench):
    """A server on a CPU ends when it is to draw from what is not finite."""
    adapter = bench.adapter(8, size=1e30)

    async def work():
        await bench.generator.add_snapshot("overflows", adapter)
        with pytest.raises(PostTrainingError) as error:
            await bench.generator.sample(call([1, 2], snapshot="overflows", temperature=1.0))
        return error.value.reason, await bench.generator.sample(call([1, 2]))

    reason, result = bench.run(work())
    assert reason is Reason.NON_FINITE_LOGITS
    assert len(result.sequences[0].tokens) == 6


# When samples end


def test_samples_end_as_the_call_says_and_not_at_the_models_eos(bench: Bench):
    (eos,) = bench.base.info.eos_tokens
    asked = call([5], num_samples=40, temperature=8.0, max_tokens=60)

    async def work():
        free = await bench.generator.sample(asked)
        other = await bench.generator.sample(replace(asked, stop=Stop(tokens=(7,))))
        own = await bench.generator.sample(replace(asked, stop=Stop(tokens=(eos,))))
        text = await bench.generator.sample(replace(asked, stop=Stop(strings=("a", "b"))))
        return free, other, own, text

    free, other, own, text = bench.run(work())
    # Nearly flat: each holds one EOS with a chance of a fifth.
    assert any(eos in s.tokens for s in free.sequences)
    assert all(len(s.tokens) == 60 for s in free.sequences)
    assert any(eos in s.tokens[:-1] for s in other.sequences)
    decode = load_decoder(bench.base.tokenizer_dir)
    assert decode is not None
    # One of them is in the text of a special token.
    letters = {token for token in range(259) if {"a", "b"} & set(decode([token]))}
    for result, stop in ((other, {7}), (own, {eos}), (text, letters)):
        assert any(s.stop_reason == "stop" for s in result.sequences)
        for sequence in result.sequences:
            hits = [i for i, token in enumerate(sequence.tokens.tolist()) if token in stop]
            assert hits == ([len(sequence.tokens) - 1] if sequence.stop_reason == "stop" else [])
            assert sequence.stop_reason == "stop" or len(sequence.tokens) == 60
    continued = next(s for s in other.sequences if eos in s.tokens[:-1])
    assert bench.gap(None, asked, continued) < TOLERANCE


def test_the_whole_window_is_usable(bench: Bench):
    window = bench.base.info.limits.max_seq_length
    asked = [call(prompt_of(n), max_tokens=window - n) for n in (window - 1, window - 9)]
    scored = call(prompt_of(window), max_tokens=0, prompt_logprobs=True)

    async def work():
        return [await bench.generator.sample(one) for one in (*asked, scored)]

    *sampled, score = bench.run(work())
    for one, result in zip(asked, sampled, strict=True):
        assert len(result.sequences[0].tokens) == one.max_tokens
        assert bench.gap(None, one, result.sequences[0]) < TOLERANCE
    own = bench.logprobs(None, prompt_of(window))
    np.testing.assert_allclose(score.prompt_logprobs[1:], own, rtol=0, atol=TOLERANCE)


def test_a_warm_prompt_has_all_its_logprobs(bench: Bench):
    asked = call(prompt_of(30), num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=300)
    targets = np.random.default_rng(0).integers(-1, 259, (29, 3))

    async def work():
        await bench.generator.sample(replace(asked, prompt_logprobs=False, topk_prompt_logprobs=0))
        scored = await bench.generator.sample(replace(asked, target_prompt_tokens=targets))
        warm = await bench.generator.sample(call(prompt_of(30)))
        return scored, warm.cache_hit_tokens

    scored, cached_tokens = bench.run(work())
    own = bench.logprobs(None, prompt_of(30))
    np.testing.assert_allclose(scored.prompt_logprobs[1:], own, rtol=0, atol=TOLERANCE)
    assert cached_tokens == 29
    for row in range(29):
        ids = scored.topk_prompt.token_ids[row + 1, :259]
        every = dict(zip(ids.tolist(), scored.topk_prompt.logprobs[row + 1], strict=False))
        assert len(every) == 259
        for column in range(3):
            expected = every[targets[row, column]] if targets[row, column] >= 0 else 0
            got = scored.target_prompt_logprobs[row, column]
            assert got == pytest.approx(expected, abs=TOLERANCE)


# Failures


def test_a_cancelled_call_frees_the_server(bench: Bench):
    async def work():
        url = await bench.generator._server.url()
        calls = [call(prompt_of(8, i), num_samples=2, max_tokens=1000) for i in range(4)]
        running = [asyncio.create_task(bench.generator.sample(one)) for one in calls]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in running)
        async with httpx.AsyncClient() as client:
            busy = await client.post(f"{url}/flush_cache")
            for task in running:
                task.cancel()
            async with asyncio.timeout(5):
                while (await client.post(f"{url}/flush_cache")).status_code != 200:
                    await asyncio.sleep(0.05)
        return busy.status_code

    # It flushes only when nothing runs. Eight samples of 1000 tokens would take much longer than 5 s.
    assert bench.run(work()) == 400


def test_calls_survive_the_servers_sudden_end(bench: Bench):
    """SIGKILL to all of it, in the middle of calls: the next one answers them, from the snapshots they asked for."""
    adapter, full = bench.adapter(9), bench.full(9)

    async def work():
        await bench.generator.add_snapshot("survives", adapter)
        await bench.generator.add_snapshot("survives too", full)
        names = ("survives", None, "survives too")
        calls = [call(prompt_of(6), snapshot=n, temperature=1.0, max_tokens=500) for n in names]
        running = [asyncio.create_task(bench.generator.sample(one)) for one in calls]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in running)
        before = bench.generator._server.number
        kill(bench)
        results = await asyncio.gather(*running)
        return calls, results, bench.generator._server.number - before

    calls, results, num_starts = bench.run(work())
    assert num_starts == 1
    for asked, result, weights in zip(calls, results, (adapter, None, full), strict=True):
        assert len(result.sequences[0].tokens) == 500
        assert bench.gap(weights, asked, result.sequences[0]) < TOLERANCE


def kill(bench: Bench) -> None:
    guard = bench.generator._server._process._child._process.pid  # pyright: ignore[reportAttributeAccessIssue]
    for process in psutil.Process(guard).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGKILL)


# Other models


def test_experts_are_reported_and_adapters_leave_them_out(
    sglang: Installation, tmp_path_factory: pytest.TempPathFactory
):
    directory = tmp_path_factory.mktemp("experts")
    where = models.rand(
        directory / "model", "qwen3_moe", moe_intermediate_size=64, intermediate_size=64
    )
    base = base_model.load("moe", str(where), dtype="float32", device="cpu")
    for bench in started(base, sglang, directory):
        adapter = bench.adapter(1, train_mlp=False)
        asked = call([5, 6, 7], snapshot="s", temperature=1.0, return_routed_experts=True)

        async def work(bench=bench, adapter=adapter, asked=asked):
            with pytest.raises(PostTrainingError, match="experts") as error:
                await bench.generator.add_snapshot("no", bench.adapter(2))
            await bench.generator.add_snapshot("s", adapter)
            return error.value.reason, await bench.generator.sample(asked)

        reason, result = bench.run(work())
        assert reason is Reason.UNIMPLEMENTED
        (sequence,) = result.sequences
        assert bench.gap(adapter, asked, sequence) < TOLERANCE
        assert sequence.routed_experts is not None
        assert sequence.routed_experts.shape == (3 + 6 - 1, 2, 2)
        assert 0 <= sequence.routed_experts.min() <= sequence.routed_experts.max() < 4


def test_a_server_of_another_model_is_refused(server, sglang: Installation, tmp_path: Path):
    """It runs already, and answers; its numbers are another model's."""
    where = models.rand(tmp_path / "model", "qwen3", vocab_size=259, intermediate_size=64)
    base = base_model.load("other", str(where), dtype="float32", device="cpu")
    servers = SglangServers(base, SglangOptions(urls=(server.url,)), 1, tmp_path)
    assert facts(httpx.get(f"{server.url}/server_info").json()).version
    with pytest.raises(PostTrainingError, match="differ from the trainer's"):
        servers.generators(TorchTrainer(base))
