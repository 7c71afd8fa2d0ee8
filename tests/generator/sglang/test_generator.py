"""The generator over a server, as far as a stand-in can show it; tests/sglang has the real one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backend.generator.base import SampleCall, SampledSequence, Segment, Stop
from backend.trainer.base import Adapter, FullWeights, LoraConfig
from backend.trainer.base_model import BaseModel
from tests.generator.sglang.conftest import Pair
from tests.generator.sglang.stand_in_engine import letter
from together_post_training.errors import PostTrainingError, Reason

HIT = 4 - float(np.log(np.exp(4) + 15))
# The model's norm leaves 4 a little smaller; what is kept is float32.
TOLERANCE = 2e-5
A = "base_model.model.lm_head.lora_A.weight"
B = "base_model.model.lm_head.lora_B.weight"


def call(prompt: list[int], **settings) -> SampleCall:
    chosen = {
        "snapshot": None,
        "num_samples": 1,
        "max_tokens": 6,
        "seed": 0,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop": Stop(),
        "is_seeded": False,
        **settings,
    }
    return SampleCall(prompt=np.array(prompt, np.int64), **chosen)


def always(token: int, *, gain: float = 8.0, rank: int = 2) -> Adapter:
    """After every token, this one's logit is raised by 4 * gain."""
    a, b = np.zeros((rank, 16), np.float32), np.zeros((16, rank), np.float32)
    a[0], b[token, 0] = 1.0, gain
    lora = LoraConfig(rank=rank, alpha=rank, seed=0, train_attn=False, train_mlp=False)
    return Adapter(lora=lora, tensors={A: a, B: b})


def successor_of(base: BaseModel, step: int) -> FullWeights:
    """The model whose likeliest token is `step` further."""
    tensors = {
        name: parameter.numpy().copy() for name, parameter in base.module.state_dict().items()
    }
    tensors["lm_head.weight"] = np.roll(np.eye(16, dtype=np.float32), step, axis=0)
    return FullWeights(tensors=tensors)


def one(result) -> SampledSequence:
    (sequence,) = result.sequences
    return sequence


async def until(condition, pair: Pair) -> None:
    """Waits for what the stand-in's thread does."""
    async with asyncio.timeout(5):
        while not condition(pair.engine):
            await asyncio.sleep(0.002)


def is_running(number: int):
    return lambda engine: len(engine.running) >= number


# What is asked and answered


def test_samples_and_scores_are_the_models(opened, run):
    async def work():
        async with opened() as pair:
            asked = call([3, 4, 9], num_samples=2, prompt_logprobs=True, topk_sample_logprobs=3)
            return await pair.generator.sample(asked), pair.engine.paths("/generate")

    result, sent = run(work())
    for sequence in result.sequences:
        assert sequence.tokens.tolist() == [10, 11, 12, 13, 14, 15]
        np.testing.assert_allclose(sequence.logprobs, HIT, atol=TOLERANCE)
        assert sequence.topk.token_ids[:, 0].tolist() == sequence.tokens.tolist()
        assert sequence.stop_reason == "length"
        assert sequence.segments == ()
    assert np.isnan(result.prompt_logprobs[0])
    np.testing.assert_allclose(result.prompt_logprobs[1:], [HIT, HIT - 4], atol=TOLERANCE)
    # The prompt is read once for all samples, which find it in the cache.
    assert len(sent) == 3
    assert len({body["rid"] for body in sent}) == 3


def test_only_the_last_tokens_are_scored_if_asked(opened, run):
    async def work():
        async with opened() as pair:
            asked = call([3, 4, 5, 9, 15], max_tokens=0, num_scored=2, topk_prompt_logprobs=20)
            result = await pair.generator.sample(replace(asked, prompt_logprobs=True))
            return result, pair.engine.paths("/generate")

    result, (sent,) = run(work())
    assert np.isnan(result.prompt_logprobs).tolist() == [True, True, True, False, False]
    np.testing.assert_allclose(result.prompt_logprobs[3:], HIT - 4, atol=TOLERANCE)
    assert (result.topk_prompt.logprobs[:3] == -99999).all()
    assert (result.topk_prompt.logprobs[:, 16:] == -99999).all()
    assert result.topk_prompt.token_ids[3:, 0].tolist() == [6, 10]
    assert sent["logprob_start_len"] == 2
    assert sent["top_logprobs_num"] == 16  # more would end a server


def test_targets_at_prompt_positions_are_scored(opened, run):
    targets = np.array([[4, -1], [9, 5], [-1, -1], [10, 10]])

    async def work():
        async with opened() as pair:
            asked = call([3, 4, 5, 9, 15], max_tokens=0, target_prompt_tokens=targets)
            return await pair.generator.sample(asked)

    result = run(work())
    expected = np.array([[HIT, 0], [HIT - 4, HIT], [0, 0], [HIT, HIT]])
    np.testing.assert_allclose(result.target_prompt_logprobs, expected, atol=TOLERANCE)


def test_a_prompt_read_before_is_reported(opened, run):
    async def work():
        async with opened() as pair:
            first = await pair.generator.sample(call([1, 2, 3, 4]))
            return first, await pair.generator.sample(call([1, 2, 3, 4]))

    cold, warm = run(work())
    assert (cold.cache_hit_tokens, warm.cache_hit_tokens) == (0, 3)


def test_what_cannot_be_honoured_is_refused_or_warned_about(opened, run):
    async def work():
        async with opened() as pair:
            sample = pair.generator.sample
            refused = {
                "prompt_alt_tokens": sample(call([1, 2], prompt_alt_tokens=3)),
                "window": sample(call([1] * 1000, max_tokens=100)),
                "token id 16": sample(call([1, 16])),
                "rank 17": pair.generator.add_snapshot("s", always(1, rank=17)),
            }
            for name, attempt in refused.items():
                with pytest.raises(PostTrainingError, match=name):
                    await attempt
            assert not pair.engine.paths("/generate")
            asked = call([1], temperature=1.0, seed=5, is_seeded=True, top_k=3, top_p=0.5)
            return await sample(asked)

    result = run(work())
    seed, both = result.warnings
    assert "seed=5" in seed
    assert "top_p=0.5" in both


def test_seeds_are_passed_on_where_the_server_has_a_use_for_them(opened, run):
    async def work():
        async with opened(enable_deterministic_inference=True) as pair:
            asked = call([1], num_samples=2, temperature=1.0, seed=-1, is_seeded=True)
            return await pair.generator.sample(asked), pair.engine.paths("/generate")[1:]

    result, sent = run(work())
    assert result.warnings == ()
    seeds = {body["sampling_params"]["sampling_seed"] for body in sent}
    assert seeds == {2**63 - 1, 0}


def test_stop_strings_need_a_server_with_a_tokenizer(opened, run):
    async def work():
        async with opened(skip_tokenizer_init=True) as pair:
            await pair.generator.sample(call([1], stop=Stop(strings=("x",))))

    with pytest.raises(PostTrainingError, match="no tokenizer"):
        run(work())


# When samples end


@pytest.mark.parametrize(
    ("stop", "tokens", "reason"),
    [
        (Stop(), [5, 6, 7, 8, 9, 10], "length"),
        (Stop(tokens=(8,)), [5, 6, 7, 8], "stop"),
        (Stop(tokens=(6, 8)), [5, 6], "stop"),
        (Stop(tokens=(10,)), [5, 6, 7, 8, 9, 10], "stop"),
        (Stop(strings=("hi",)), [5, 6, 7, 8], "stop"),
        (Stop(strings=("hi",), tokens=(7,)), [5, 6, 7], "stop"),
        (Stop(strings=("zz",)), [5, 6, 7, 8, 9, 10], "length"),
    ],
)
def test_samples_end_where_the_call_says_and_not_at_the_models_eos(
    opened, run, stop, tokens, reason
):
    """The server stops at 6 and 9, too, unless it is told to look for no token at all."""

    async def work():
        async with opened() as pair:
            pair.engine.eos = (6, 9)
            return await pair.generator.sample(call([3, 4], stop=stop, topk_sample_logprobs=1))

    sequence = one(run(work()))
    assert sequence.tokens.tolist() == tokens
    assert sequence.stop_reason == reason
    np.testing.assert_allclose(sequence.logprobs, HIT, atol=TOLERANCE)
    assert sequence.topk is not None
    assert sequence.topk.token_ids[:, 0].tolist() == tokens


def test_a_stop_string_that_the_server_missed_ends_the_sample(opened, run):
    """It looks at the last few tokens; a string sampled in small pieces may be longer than that."""

    async def work():
        async with opened() as pair:
            pair.engine.finds_strings = False
            asked = call([3, 4], stop=Stop(strings=("fgh",)), max_tokens=8)
            return await pair.generator.sample(asked)

    sequence = one(run(work()))
    assert "".join(map(letter, sequence.tokens.tolist())) == "fgh"
    assert sequence.stop_reason == "stop"


# Snapshots


def test_snapshots_and_the_base_are_sampled_side_by_side_each_from_its_own_weights(opened, run):
    async def work():
        async with opened() as pair:
            for token in (2, 7, 11):
                await pair.generator.add_snapshot(f"always-{token}", always(token))
            names = [None, "always-2", "always-7", "always-11"] * 3
            calls = [call([3, 4], snapshot=name, max_tokens=3) for name in names]
            return await asyncio.gather(*(pair.generator.sample(c) for c in calls))

    found = [one(result).tokens.tolist() for result in run(work())]
    assert found == [[5, 6, 7], [2, 2, 2], [7, 7, 7], [11, 11, 11]] * 3


def test_adapters_beyond_what_the_server_may_have_take_turns(opened, run):
    """Three places, nine adapters, all at once: none is unloaded while it is in use, and every answer is its own."""

    async def work():
        async with opened(max_loaded=3) as pair:
            for token in range(9):
                await pair.generator.add_snapshot(f"s{token}", always(token))
            calls = [call([15], snapshot=f"s{i % 9}", max_tokens=4) for i in range(90)]
            results = await asyncio.gather(*(pair.generator.sample(c) for c in calls))
            return results, pair.engine.most_loaded

    results, most_loaded = run(work())
    for i, result in enumerate(results):
        assert one(result).tokens.tolist() == [i % 9] * 4
    assert most_loaded == 3


def test_a_dropped_snapshot_is_unloaded_and_its_files_go_once_no_call_runs(opened, run):
    async def work():
        async with opened() as pair:
            await pair.generator.add_snapshot("s", always(2))
            (path,) = pair.engine.adapters.values()
            pair.engine.pause_at = 2
            running = asyncio.create_task(pair.generator.sample(call([1], snapshot="s")))
            await until(is_running(1), pair)
            pair.generator.drop_snapshot("s")
            with pytest.raises(PostTrainingError) as error:
                await pair.generator.sample(call([1], snapshot="s"))
            was_loaded = list(pair.engine.adapters.values()) == [path]
            pair.stand_in.go_on()
            tokens = one(await running).tokens.tolist()
            await until(lambda engine: not engine.adapters and not path.exists(), pair)
            return tokens, was_loaded, error.value.reason

    assert run(work()) == ([2] * 6, True, Reason.SNAPSHOT_NOT_FOUND)


def test_weights_that_are_not_finite_never_reach_a_sample(opened, run):
    """float32 holds them, and the logits do not."""

    async def work():
        async with opened() as pair:
            pair.engine.mangle = _nan_under_adapters
            await pair.generator.add_snapshot("s", always(2, gain=1e38))
            with pytest.raises(PostTrainingError) as error:
                await pair.generator.sample(call([1], snapshot="s", temperature=1.0))
            return error.value.reason, pair.engine.paths("/generate")

    reason, sent = run(work())
    assert reason is Reason.NON_FINITE_LOGITS
    assert [body["sampling_params"]["max_new_tokens"] for body in sent] == [0]


def _nan_under_adapters(reply: dict) -> dict:
    for row in reply["meta_info"].get("input_token_logprobs", [])[1:]:
        row[0] = None
    return reply


# Full weights


def test_full_weights_adapters_and_the_base_take_turns(opened, run, base):
    """Whatever the order, each call is answered from its own weights."""

    async def work():
        async with opened() as pair:
            await pair.generator.add_snapshot("three", successor_of(base, 3))
            await pair.generator.add_snapshot("five", successor_of(base, 5))
            await pair.generator.add_snapshot("always-2", always(2))
            names = ["three", None, "five", "always-2"] * 10
            calls = [call([0], snapshot=name, max_tokens=2) for name in names]
            results = await asyncio.gather(*(pair.generator.sample(c) for c in calls))
            return results, len(pair.engine.paths("/update_weights_from_disk")), pair.engine

    results, num_switches, engine = run(work())
    found = [one(result).tokens.tolist() for result in results]
    assert found == [[3, 6], [1, 2], [5, 10], [2, 2]] * 10
    assert num_switches == 3  # to three, to five, and, when it is closed, to what it was
    assert engine.version == "default"


def test_weights_that_somebody_else_put_there_are_noticed(opened, run):
    async def work():
        async with opened() as pair:
            await pair.generator.sample(call([0]))
            pair.engine.version = "theirs"
            result = await pair.generator.sample(call([0]))
            return one(result).tokens.tolist(), pair.engine.version

    assert run(work()) == ([1, 2, 3, 4, 5, 6], "default")


def test_full_weights_of_another_shape_are_refused(opened, run, base):
    weights = successor_of(base, 1)
    wrong = FullWeights(tensors={**weights.tensors, "lm_head.weight": np.zeros((16, 8), "f4")})

    async def work():
        async with opened() as pair:
            await pair.generator.add_snapshot("s", wrong)

    with pytest.raises(PostTrainingError, match=r"lm_head\.weight") as error:
        run(work())
    assert error.value.reason is Reason.INCOMPATIBLE_CHECKPOINT


# Moving


def test_calls_that_follow_go_on_under_other_weights(opened, run):
    """Three tokens under the first, the others under the second, read anew; calls that do not follow stay."""

    async def work():
        async with opened() as pair:
            for token in (2, 7):
                await pair.generator.add_snapshot(f"s{token}", always(token))
            pair.engine.pause_at = 3
            asked = call([1], snapshot="s2", num_samples=2, topk_sample_logprobs=1)
            following = asyncio.create_task(pair.generator.sample(replace(asked, follows=True)))
            pinned = asyncio.create_task(pair.generator.sample(asked))
            await until(is_running(4), pair)
            pair.generator.move("s2", "s7")
            await until(lambda engine: len(engine.paths("/abort_request")) >= 2, pair)
            pair.stand_in.go_on()
            return await following, await pinned

    following, pinned = run(work())
    for sequence in following.sequences:
        assert sequence.tokens.tolist() == [2, 2, 2, 7, 7, 7]
        assert sequence.segments == (Segment(snapshot="s2"), Segment(snapshot="s7", first_token=3))
        assert len(sequence.logprobs) == len(sequence.topk.token_ids) == 6
    for sequence in pinned.sequences:
        assert sequence.tokens.tolist() == [2] * 6
        assert sequence.segments == ()


def test_a_stop_string_across_two_policies_ends_the_sample(opened, run):
    async def work():
        async with opened() as pair:
            for token in (2, 7):
                await pair.generator.add_snapshot(f"s{token}", always(token))
            pair.engine.pause_at = 2
            asked = call([1], snapshot="s2", follows=True, stop=Stop(strings=("chh",)))
            following = asyncio.create_task(pair.generator.sample(asked))
            await until(is_running(1), pair)
            pair.generator.move("s2", "s7")
            await until(lambda engine: engine.paths("/abort_request"), pair)
            pair.stand_in.go_on()
            return one(await following)

    sequence = run(work())
    assert sequence.tokens.tolist() == [2, 2, 7, 7]
    assert sequence.stop_reason == "stop"


# Failures


def test_a_cancelled_call_is_aborted_on_the_server(opened, run):
    async def work():
        async with opened() as pair:
            pair.engine.pause_at = 1
            running = asyncio.create_task(pair.generator.sample(call([1], num_samples=3)))
            await until(is_running(3), pair)
            running.cancel()
            await until(lambda engine: not engine.running, pair)
            pair.engine.pause_at = None
            return running, one(await pair.generator.sample(call([1]))).tokens.tolist()

    running, tokens = run(work())
    assert running.cancelled()
    assert tokens == [2, 3, 4, 5, 6, 7]


def test_calls_survive_a_crash_of_the_server_and_adapters_are_loaded_again(opened, run):
    async def work():
        async with opened() as pair:
            await pair.generator.add_snapshot("s", always(7))
            pair.engine.pause_at = 2
            calls = [call([1], snapshot=name) for name in (None, "s")]
            running = [asyncio.create_task(pair.generator.sample(c)) for c in calls]
            await until(is_running(2), pair)
            await asyncio.to_thread(pair.stand_in.crash)
            pair.engine.pause_at = None
            await asyncio.to_thread(pair.stand_in.restart)
            return [one(result).tokens.tolist() for result in await asyncio.gather(*running)]

    assert run(work()) == [[2, 3, 4, 5, 6, 7], [7] * 6]


def test_a_call_that_ends_the_server_again_and_again_fails(opened, run):
    async def work():
        async with opened() as pair:
            pair.stand_in.num_to_drop = 3
            with pytest.raises(PostTrainingError, match="lost 3 times") as error:
                await pair.generator.sample(call([1]))
            return error.value.reason, one(await pair.generator.sample(call([1])))

    reason, sequence = run(work())
    assert reason is Reason.UNAVAILABLE
    assert sequence.tokens.tolist() == [2, 3, 4, 5, 6, 7]


def test_a_server_that_stays_away_is_unavailable(opened, run):
    async def work():
        async with opened() as pair:
            pair.generator._server._wait_s = 0.2
            await asyncio.to_thread(pair.stand_in.crash)
            with pytest.raises(PostTrainingError, match="does not answer") as error:
                await pair.generator.sample(call([1]))
            await asyncio.to_thread(pair.stand_in.restart)
            return error.value.reason

    assert run(work()) is Reason.UNAVAILABLE


def test_an_adapter_that_somebody_unloaded_is_loaded_again(opened, run):
    async def work():
        async with opened() as pair:
            await pair.generator.add_snapshot("s", always(7))
            pair.engine.adapters.clear()
            return one(await pair.generator.sample(call([1], snapshot="s"))).tokens.tolist()

    assert run(work()) == [7] * 6


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda reply: reply["output_ids"].pop(), "log-probabilities"),
        (lambda reply: reply["meta_info"].pop("output_token_logprobs"), "log-probabilities"),
        (lambda reply: reply["output_ids"].__setitem__(0, 99), "log-probabilities"),
        (lambda reply: reply["meta_info"].pop("finish_reason"), "finish_reason"),
        (lambda reply: reply.pop("meta_info"), "meta_info"),
        (
            lambda reply: reply["meta_info"]["output_token_logprobs"][2].__setitem__(0, None),
            "finite",
        ),
    ],
)
def test_replies_that_do_not_fit_are_never_passed_on(opened, run, fault, says):
    def mangle(reply: dict) -> dict:
        fault(reply)
        return reply

    async def work():
        async with opened() as pair:
            pair.engine.mangle = mangle
            await pair.generator.sample(call([1]))

    with pytest.raises(PostTrainingError, match=says) as error:
        run(work())
    assert error.value.reason in (Reason.INTERNAL, Reason.NON_FINITE_LOGITS)


def test_snapshots_that_the_server_cannot_read_are_refused_with_what_to_do(
    opened, run, monkeypatch
):
    monkeypatch.setattr("backend.generator.sglang.peft_directory.write", lambda *_: None)

    async def work():
        async with opened() as pair:
            await pair.generator.add_snapshot("s", always(7))

    with pytest.raises(PostTrainingError, match="--sglang-dir"):
        run(work())


def test_a_closed_generator_leaves_the_server_as_it_was(opened, run, base, tmp_path: Path):
    async def work():
        async with opened() as pair:
            await pair.generator.add_snapshot("s", always(7))
            await pair.generator.add_snapshot("full", successor_of(base, 3))
            await pair.generator.sample(call([1], snapshot="full"))
            pair.engine.pause_at = 1
            running = asyncio.create_task(pair.generator.sample(call([1], snapshot="full")))
            await until(is_running(1), pair)
            await pair.generator.close()
            with pytest.raises(PostTrainingError, match="closed") as error:
                await running
            assert error.value.reason is Reason.UNAVAILABLE
            with pytest.raises(PostTrainingError, match="closed"):
                await pair.generator.sample(call([1]))
            return pair.engine

    engine = run(work())
    assert not engine.adapters
    assert not engine.running
    assert engine.version == "default"
    assert not (tmp_path / "handed-out").exists()


def test_five_hundred_calls_at_once_are_each_answered_once(opened, run):
    async def work():
        async with opened(max_running=100) as pair:
            await pair.generator.add_snapshot("s", always(7))
            calls = [
                call([i % 16], snapshot="s" if i % 2 else None, max_tokens=2) for i in range(500)
            ]
            results = await asyncio.gather(*(pair.generator.sample(c) for c in calls))
            return results, pair.engine

    results, engine = run(work())
    for i, result in enumerate(results):
        expected = [7, 7] if i % 2 else [(i + 1) % 16, (i + 2) % 16]
        assert one(result).tokens.tolist() == expected
    num_sampled = sum(
        body["sampling_params"]["max_new_tokens"] > 0 for body in engine.paths("/generate")
    )
    assert num_sampled == 500
    assert engine.most_running <= 100
