"""Calls of the embedded generator: snapshots, seeds, stops, limits, cancellation."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from backend.generator.base import SampleResult, Stop
from backend.generator.embedded import EmbeddedGenerator
from backend.generator.text import load_decoder
from backend.trainer import base_model
from backend.trainer.base import AdamParams, LoraConfig, Pass
from backend.trainer.base_model import BaseModel
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.generator.calls import call, random_prompt
from tests.generator.oracle import (
    TOLERANCE,
    assert_logprobs_are_of,
    assert_same_answer,
    merged,
    publish,
    random_adapter,
    score,
)
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.samples import Sample


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in result.sequences]


# Snapshots


def test_snapshots_and_the_base_run_in_one_batch_as_they_do_alone(base_of, generator, sample_all):
    base = base_of("qwen3")
    adapters = [random_adapter(base, seed=i, rank=rank) for i, rank in ((1, 2), (2, 8), (3, 3))]
    snapshots = [publish(generator, adapter) for adapter in adapters] + [None]
    calls = [
        call(random_prompt(4 + i, seed=i), snapshot=snapshots[i % 4], max_tokens=20, seed=i)
        for i in range(11)
    ]
    modules = [merged(base, adapter) for adapter in (*adapters, None)]
    together = sample_all(generator, *calls)
    for i, (asked, result) in enumerate(zip(calls, together, strict=True)):
        assert_same_answer(modules[i % 4], asked, result, sample_all(generator, asked)[0])
        assert_logprobs_are_of(modules[i % 4], asked, result.sequences[0])
    # The same prompt and seed: what differs is the weights.
    same = [call([1, 2, 3], snapshot=s, max_tokens=20) for s in snapshots]
    assert len({str(tokens_of(r)) for r in sample_all(generator, *same)}) == 4


def test_an_adapter_of_some_layers_changes_those_alone(base_of, generator, sample_all):
    base = base_of("qwen3")
    whole = random_adapter(base, seed=5)
    for given in (("lm_head",), ("gate_proj", "up_proj", "down_proj"), ("q_proj",)):
        some = replace(
            whole,
            lora=replace(whole.lora, target_modules=given),
            tensors={n: t for n, t in whole.tensors.items() if any(part in n for part in given)},
        )
        module = merged(base, None)
        asked = call(
            random_prompt(12), snapshot=publish(generator, some), max_tokens=0, prompt_logprobs=True
        )
        scored = sample_all(generator, asked)[0].prompt_logprobs
        full = replace(
            whole, tensors={n: some.tensors.get(n, 0 * t) for n, t in whole.tensors.items()}
        )
        expected = score(merged(base, full), asked.prompt)
        np.testing.assert_allclose(scored, expected, rtol=0, atol=TOLERANCE)
        assert np.nanmax(np.abs(expected - score(module, asked.prompt))) > 0.1


def test_a_snapshot_dropped_while_it_samples_is_freed_afterwards(base_of, wait):
    base = base_of("qwen3")
    generator = EmbeddedGenerator(base)
    adapter = random_adapter(base, seed=6)
    snapshot, twin = publish(generator, adapter), publish(generator, adapter)
    weights = weakref.ref(generator._snapshots[snapshot].pairs["lm_head"][0])
    asked = call(random_prompt(5), snapshot=snapshot, max_tokens=50, num_samples=8)
    expected = wait(generator.sample(replace(asked, snapshot=twin)))

    async def drop_and_load() -> SampleResult:
        running = asyncio.ensure_future(generator.sample(asked))
        await asyncio.sleep(0.005)
        assert not running.done()
        generator.drop_snapshot(snapshot)
        others = [publish(generator, random_adapter(base, seed=s)) for s in (7, 8)]
        new = [generator.sample(call([1], snapshot=s, max_tokens=5)) for s in others]
        with pytest.raises(PostTrainingError, match=snapshot) as error:
            await generator.sample(asked)
        assert error.value.reason is Reason.SNAPSHOT_NOT_FOUND
        await asyncio.gather(*new)
        return await running

    assert_same_answer(merged(base, adapter), asked, wait(drop_and_load()), expected)
    assert _comes_true(lambda: weights() is None)
    wait(generator.close())


def _comes_true(condition: Callable[[], bool], timeout_s: float = 5) -> bool:
    """The engine lets go of a sample a moment after it has answered."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return condition()


def test_dropping_what_is_unknown_is_not_found(generator):
    with pytest.raises(PostTrainingError, match="never-made") as error:
        generator.drop_snapshot("never-made")
    assert error.value.reason is Reason.SNAPSHOT_NOT_FOUND


def test_an_adapter_of_another_model_is_refused(base_of, generator, wait):
    adapter = random_adapter(base_of("llama"), seed=0)
    other = replace(
        adapter, tensors={n.replace("q_proj", "x_proj"): t for n, t in adapter.tensors.items()}
    )
    with pytest.raises(PostTrainingError, match="x_proj") as error:
        wait(generator.add_snapshot("unfit", other))
    assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT


# Batches


def test_neighbours_of_all_lengths_change_nothing(base_of, generator, sample_all):
    """LG-08."""
    module = merged(base_of("qwen3"), None)
    one = call(random_prompt(9, seed=9), max_tokens=15, prompt_logprobs=True)
    (alone,) = sample_all(generator, one)
    for lengths in ([2] * 7, [40] * 7, [1, 3, 9, 21, 48]):
        others = [call(random_prompt(n, seed=n), max_tokens=10) for n in lengths]
        (got, *_) = sample_all(generator, one, *others)
        assert_same_answer(module, one, got, alone)
        np.testing.assert_allclose(got.prompt_logprobs, alone.prompt_logprobs, rtol=0, atol=5e-5)


def test_identical_calls_are_answered_identically(base_of, generator, sample_all):
    module = merged(base_of("qwen3"), None)
    one = call(random_prompt(9), max_tokens=15)
    others = [call(random_prompt(n, seed=n), max_tokens=12) for n in (3, 30)]
    results = sample_all(generator, *[one] * 8, *others)[:8]
    for result in results[1:]:
        assert_same_answer(module, one, result, results[0])


def test_samples_that_join_and_leave_change_nothing(base_of, generator, sample_all, wait):
    """Arrivals in the middle of others' samples, of lengths that leave at every step."""
    module = merged(base_of("qwen3"), None)
    calls = [
        call(random_prompt(2 + i % 5, seed=i), max_tokens=1 + (7 * i) % 40, seed=i)
        for i in range(24)
    ]
    alone = [sample_all(generator, c)[0] for c in calls]

    async def arrive() -> list[SampleResult]:
        tasks = []
        for asked in calls:
            tasks.append(asyncio.ensure_future(generator.sample(asked)))
            await asyncio.sleep(0.002)
        return list(await asyncio.gather(*tasks))

    for asked, got, wanted in zip(calls, wait(arrive()), alone, strict=True):
        assert_same_answer(module, asked, got, wanted)


def test_a_full_cache_makes_some_wait_and_changes_nothing(tmp_path, wait, sample_all):
    """Room for one whole window: samples are suspended when older ones grow, and go on where they were."""
    directory = models.rand(
        tmp_path / "small", "qwen3", max_position_embeddings=512, num_hidden_layers=1
    )
    base = base_model.load("small", str(directory))
    roomy = EmbeddedGenerator(base)
    tight = EmbeddedGenerator(base, cache_bytes=512 * 2 * 8 * 2 * 4)
    suspensions = _count_calls(tight._engine._batch, "_suspend")
    asked = call(random_prompt(50), max_tokens=220, num_samples=3, topk_sample_logprobs=2)
    adapter = random_adapter(base, seed=1)
    both = []
    for generator in (roomy, tight):
        adapted = replace(asked, snapshot=publish(generator, adapter), num_samples=1)
        both.append(sample_all(generator, asked, adapted))
    assert suspensions
    for weights, one, other in zip((None, adapter), *both, strict=True):
        assert_same_answer(merged(base, weights), asked, one, other)
        for sequence in one.sequences:
            assert sequence.topk is not None
            assert len(sequence.topk.logprobs) == len(sequence.tokens) == 220
    wait(roomy.close())
    wait(tight.close())


def _count_calls(owner, name: str) -> list[int]:
    calls, plain = [], getattr(owner, name)

    def counted(*args):
        calls.append(1)
        return plain(*args)

    setattr(owner, name, counted)
    return calls


def test_a_cache_too_small_for_a_window_is_refused(base_of):
    with pytest.raises(PostTrainingError, match=r"1000 bytes .* give at least") as error:
        EmbeddedGenerator(base_of("qwen3"), cache_bytes=1000)
    assert error.value.reason is Reason.INVALID_ARGUMENT


def test_more_samples_than_run_at_once_are_all_answered(base_of, wait, sample_all):
    generator = EmbeddedGenerator(base_of("qwen3"), max_running=3)
    asked = call(random_prompt(4), max_tokens=6, num_samples=10, prompt_logprobs=True)
    (result,) = sample_all(generator, asked)
    singles = [replace(asked, num_samples=1, seed=i) for i in range(10)]
    assert tokens_of(result) == [tokens_of(r)[0] for r in sample_all(generator, *singles)]
    wait(generator.close())


def test_training_on_the_same_weights_meanwhile_changes_nothing(base_of, generator, sample_all):
    """Neither what is sampled nor what is trained."""
    base = base_of("qwen3")
    calls = [call(random_prompt(5, seed=i), max_tokens=40, num_samples=4, seed=i) for i in range(6)]
    alone = sample_all(generator, *calls)
    trained_alone = _train(TorchTrainer(base))
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(_train, TorchTrainer(base))
        together = sample_all(generator, *calls)
        trained = training.result()
    for asked, got, wanted in zip(calls, together, alone, strict=True):
        assert_same_answer(merged(base, None), asked, got, wanted)
    for name, tensor in trained_alone.items():
        np.testing.assert_array_equal(trained[name], tensor)


def _train(trainer: TorchTrainer) -> Mapping[str, np.ndarray]:
    trainer.create_session("s", LoraConfig(rank=4, alpha=8, seed=0))
    whole = np.array(random_prompt(50), np.int64)
    one = Sample(
        tokens=whole[:-1],
        inputs={"target_tokens": whole[1:], "weights": np.ones(49, np.float32)},
    )
    for _ in range(8):
        trainer.run(Pass(session="s", samples=[one, one], backward=True))
        trainer.optim_step("s", AdamParams())
    return trainer.weights("s").tensors


# Seeds


def test_a_seed_repeats_and_another_differs(generator, sample_all):
    hot = call(random_prompt(3), max_tokens=20, temperature=2.0)
    results = sample_all(generator, *[replace(hot, seed=s) for s in (5, 5, 6, 2**63 - 1, -1)])
    texts = [str(tokens_of(r)) for r in results]
    assert texts[0] == texts[1]
    assert len(set(texts[1:])) == 4


# Text. The model's tokens are bytes.


@pytest.fixture(scope="module")
def bytes_base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return base_model.load("builtin:tiny")


@pytest.fixture(scope="module")
def speller(bytes_base: BaseModel, wait) -> Iterator[EmbeddedGenerator]:
    generator = EmbeddedGenerator(bytes_base)
    yield generator
    wait(generator.close())


def decode(base: BaseModel, tokens: Sequence[int]) -> str:
    decoder = load_decoder(base.tokenizer_dir)
    assert decoder is not None
    return decoder(tokens)


def test_a_prompt_of_ids_is_never_tokenised_again(speller, sample_all):
    """As many logprobs as ids, whatever a tokenizer would make of their text."""
    prompt = [104, 105, 104, 105]
    (result,) = sample_all(speller, call(prompt, max_tokens=4, prompt_logprobs=True))
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == 4
    assert len(result.sequences[0].tokens) == len(result.sequences[0].logprobs) == 4


def test_a_stop_string_ends_at_the_token_that_completes_it(bytes_base, speller, sample_all):
    free = call([65], max_tokens=200, seed=3)
    tokens = tokens_of(sample_all(speller, free)[0])[0]
    # Three tokens that are letters of their own, so that the string spans all of them.
    start = next(
        i
        for i in range(20, 190)
        if len(decode(bytes_base, tokens[i : i + 3])) == 3
        and "\ufffd" not in decode(bytes_base, tokens[i - 1 : i + 4])
    )
    string = decode(bytes_base, tokens[start : start + 3])
    end = next(i for i in range(1, 200) if string in decode(bytes_base, tokens[:i]))
    stopped = replace(free, stop=Stop(strings=("not in there at all", string)))
    (sequence,) = sample_all(speller, stopped)[0].sequences
    assert sequence.tokens.tolist() == tokens[:end]
    assert len(sequence.logprobs) == end
    assert sequence.stop_reason == "stop"


def test_a_special_token_is_a_stop_by_text_and_by_id(bytes_base, speller, sample_all):
    """SA-09."""
    special = 258
    name = decode(bytes_base, [special])
    assert name == "<|im_end|>"
    calls = [call([65], max_tokens=100, temperature=5.0, seed=seed) for seed in range(20)]
    asked, tokens = next(
        (c, t)
        for c, r in zip(calls, sample_all(speller, *calls), strict=True)
        if special in (t := tokens_of(r)[0])
    )
    for stop in (Stop(strings=(name,)), Stop(tokens=(special,))):
        (sequence,) = sample_all(speller, replace(asked, stop=stop))[0].sequences
        assert sequence.tokens.tolist() == tokens[: tokens.index(special) + 1]
        assert sequence.stop_reason == "stop"


def test_stop_strings_need_a_tokenizer(generator, sample_all):
    with pytest.raises(PostTrainingError, match="no tokenizer") as error:
        sample_all(generator, call([1], max_tokens=3, stop_strings=["x"]))
    assert error.value.reason is Reason.INVALID_ARGUMENT


# Limits


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message", "reason"),
    [
        ([], 3, "prompt is empty", Reason.EMPTY_INPUT),
        ([-1], 3, "token id -1: this model's ids are 0 to 127", Reason.TOKEN_OUT_OF_RANGE),
        ([5, 128], 3, "token id 128", Reason.TOKEN_OUT_OF_RANGE),
        ([2**31 - 1], 3, "token id 2147483647", Reason.TOKEN_OUT_OF_RANGE),
        ([1] * 60, 5, "60 tokens and max_tokens is 5: .* 64", Reason.SEQUENCE_TOO_LONG),
        ([1] * 65, 0, "65 tokens", Reason.SEQUENCE_TOO_LONG),
    ],
)
def test_what_the_model_cannot_read_is_refused(
    generator, sample_all, prompt, max_tokens, message, reason
):
    with pytest.raises(PostTrainingError, match=message) as error:
        sample_all(generator, call(prompt, max_tokens=max_tokens, prompt_logprobs=True))
    assert error.value.reason is reason
    assert len(tokens_of(sample_all(generator, call([1], max_tokens=3))[0])[0]) == 3


def test_stop_tokens_outside_the_vocabulary_never_match(generator, sample_all):
    (result,) = sample_all(generator, call([1], max_tokens=9, stop_tokens=[10**7, -5]))
    assert result.sequences[0].stop_reason == "length"


def test_the_window_can_be_filled_to_its_last_token(base_of, generator, sample_all):
    asked = call([1], max_tokens=63)
    (sequence,) = sample_all(generator, asked)[0].sequences
    assert len(sequence.tokens) == 63
    assert sequence.stop_reason == "length"
    assert_logprobs_are_of(merged(base_of("qwen3"), None), asked, sequence)


# Cancelling and closing


def test_a_cancelled_call_frees_its_share(base_of, wait):
    """One sample runs at a time: the next is answered only because the first has left."""
    generator = EmbeddedGenerator(base_of("qwen3"), max_running=1)
    long = call([1], max_tokens=63, num_samples=1000)

    async def cancel_one() -> SampleResult:
        running = asyncio.ensure_future(generator.sample(long))
        await asyncio.sleep(0.02)
        assert not running.done()
        running.cancel()
        return await asyncio.wait_for(generator.sample(call([1], max_tokens=3)), timeout=5)

    assert len(wait(cancel_one()).sequences) == 1
    wait(generator.close())


def test_closing_fails_what_runs_and_refuses_what_comes(base_of, wait):
    generator = EmbeddedGenerator(base_of("qwen3"))

    async def close_one() -> None:
        running = asyncio.ensure_future(generator.sample(call([1], max_tokens=63, num_samples=500)))
        await asyncio.sleep(0.01)
        await generator.close()
        for waiting in (running, generator.sample(call([1], max_tokens=1))):
            with pytest.raises(PostTrainingError, match="closed") as error:
                await waiting
            assert error.value.reason is Reason.UNAVAILABLE
        await generator.close()

    wait(close_one())


def test_the_event_loop_is_free_while_the_engine_works(generator, wait):
    """It comes round at least every 50 ms, though a call takes longer (the machine may be busy: the median)."""

    async def measure() -> list[float]:
        running = asyncio.ensure_future(
            generator.sample(call(random_prompt(5), max_tokens=55, num_samples=64))
        )
        gaps, last = [], time.perf_counter()
        while not running.done():
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
        return gaps

    gaps = wait(measure())
    assert len(gaps) > 5
    assert np.median(gaps) < 0.05


def test_weights_are_shared_with_the_base(base_of, generator):
    shared = {t.data_ptr() for t in base_of("qwen3").module.parameters()}
    view = generator._engine._stepper._runner._body
    assert {p.data_ptr() for p in view.parameters()} <= shared
