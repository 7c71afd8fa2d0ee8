from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from backend.generator.base import SampleCall, SampleResult
from tests.services.harness import (
    HIT,
    MISS,
    MODEL,
    Caller,
    Running,
    prompt,
    refusal,
    serving,
    wait_until,
)
from together_post_training import tensors
from together_post_training.v1 import checkpoints_pb2, data_pb2
from together_post_training.v1 import generator_pb2 as pb

NAN, INF = float("nan"), float("inf")
TOKENS = [3, 4, 9, 1]


@pytest.fixture
def base(caller: Caller) -> str:
    return caller.open(base_model=MODEL)


def request(snapshot: str, tokens: list[int] | None = None, **fields: Any) -> pb.SampleRequest:
    """`fields` of SampleRequest, and all others of SamplingParams."""
    names = {f.name for f in pb.SampleRequest.DESCRIPTOR.fields}
    params = {k: v for k, v in fields.items() if k not in names}
    return pb.SampleRequest(
        snapshot=snapshot,
        prompt=prompt([3] if tokens is None else tokens),
        params=pb.SamplingParams(**params),
        **{k: v for k, v in fields.items() if k in names},
    )


def sampled(caller: Caller, *args: Any, **fields: Any) -> list[list[int]]:
    response = caller.generator.Sample(request(*args, **fields))
    return [np.frombuffer(s.tokens, "<i4").tolist() for s in response.sequences]


def test_sample_gives_tokens_with_their_untempered_logprobs(caller: Caller, base: str):
    response = caller.generator.Sample(
        request(base, max_tokens=3, temperature=0, prompt_logprobs=True, topk_sample_logprobs=2)
    )
    (sequence,) = response.sequences
    assert np.frombuffer(sequence.tokens, "<i4").tolist() == [4, 5, 6]
    np.testing.assert_allclose(np.frombuffer(sequence.logprobs, "<f4"), [HIT] * 3, atol=1e-5)
    assert sequence.stop_reason == pb.STOP_REASON_LENGTH
    assert sequence.id
    assert (sequence.topk_logprobs.num_rows, sequence.topk_logprobs.k) == (3, 2)
    assert np.isnan(np.frombuffer(response.prompt_logprobs.raw, "<f4")).tolist() == [True]
    assert not response.HasField("topk_prompt_logprobs")


def test_absent_and_explicit_values_of_sampling_parameters_differ(caller: Caller, base: str):
    """SA-05: temperature 0 is greedy, seed 0 is a seed, absent ones are drawn. SA-18."""
    for _ in range(5):
        assert sampled(caller, base, temperature=0, max_tokens=1) == [[4]]
    hot = {"temperature": 5.0, "max_tokens": 30}
    assert sampled(caller, base, seed=0, **hot) == sampled(caller, base, seed=0, **hot)
    assert sampled(caller, base, **hot) != sampled(caller, base, **hot)
    assert len(sampled(caller, base, max_tokens=1)) == 1
    for num_tokens in (1, 1020):
        window = sampled(caller, base, [3] * num_tokens, temperature=0)
        assert len(window[0]) == 1024 - num_tokens, "max_tokens absent: what the window leaves"


def test_samples_without_a_seed_all_differ_also_after_a_restart(tmp_path: Path):
    """SA-02."""
    seen: list[tuple[int, ...]] = []
    for _ in range(2):
        with serving(tmp_path / "store") as running:
            base = running.caller.open(base_model=MODEL)
            for _ in range(10):
                (tokens,) = sampled(running.caller, base, temperature=5.0, max_tokens=8)
                seen.append(tuple(tokens))
    assert len(set(seen)) == 20


def test_stop_absent_is_the_models_end_and_an_empty_one_stops_at_nothing(caller: Caller, base: str):
    """This model has no end-of-sequence token. SA-08, SA-13."""
    greedy = {"temperature": 0, "max_tokens": 6}
    assert sampled(caller, base, **greedy) == [[4, 5, 6, 7, 8, 9]]
    assert sampled(caller, base, stop=pb.Stop(), **greedy) == [[4, 5, 6, 7, 8, 9]]
    assert sampled(caller, base, stop=pb.Stop(tokens=[6]), **greedy) == [[4, 5, 6]]
    assert sampled(caller, base, stop=pb.Stop(strings=["fg"]), **greedy) == [[4, 5, 6]]


@pytest.mark.parametrize(
    ("fields", "reason", "says"),
    [
        ({"temperature": -0.1}, "INVALID_ARGUMENT", "temperature is -0.1"),
        ({"temperature": NAN}, "INVALID_ARGUMENT", "temperature is nan"),
        ({"temperature": INF}, "INVALID_ARGUMENT", "temperature is inf"),
        ({"top_k": -2}, "INVALID_ARGUMENT", "top_k is -2"),
        ({"top_p": 0.0}, "INVALID_ARGUMENT", "0 would keep none"),
        ({"top_p": 1.1}, "INVALID_ARGUMENT", "top_p is 1.1"),
        ({"top_p": NAN}, "INVALID_ARGUMENT", "top_p is nan"),
        ({"min_p": -0.1}, "INVALID_ARGUMENT", "min_p is -0.1"),
        ({"min_p": 1.1}, "INVALID_ARGUMENT", "0 (all tokens) to 1"),
        ({"min_p": NAN}, "INVALID_ARGUMENT", "min_p is nan"),
        ({"prompt_alt_tokens_k": -1}, "INVALID_ARGUMENT", "0 to 100"),
        ({"prompt_alt_tokens_k": 101}, "INVALID_ARGUMENT", "prompt_alt_tokens_k is 101"),
        (
            {"tokens": [3, 4], "prompt_logprobs_last_n": 1},
            "INVALID_ARGUMENT",
            "Set prompt_logprobs too",
        ),
        (
            {"tokens": [3, 4], "prompt_logprobs": True, "prompt_logprobs_last_n": 0},
            "INVALID_ARGUMENT",
            "prompt_logprobs_last_n is 0",
        ),
        (
            {"tokens": [3, 4], "prompt_logprobs": True, "prompt_logprobs_last_n": 2},
            "INVALID_ARGUMENT",
            "The prompt has 2 tokens",
        ),
        ({"max_tokens": 0}, "INVALID_ARGUMENT", "ComputeLogprobs"),
        ({"max_tokens": -1}, "INVALID_ARGUMENT", "max_tokens is -1"),
        ({"num_samples": 0}, "INVALID_ARGUMENT", "num_samples is 0"),
        ({"num_samples": 1025}, "INVALID_ARGUMENT", "1 to 1024"),
        ({"topk_prompt_logprobs": 101}, "INVALID_ARGUMENT", "0 to 100"),
        ({"topk_sample_logprobs": -1}, "INVALID_ARGUMENT", "0 to 100"),
        ({"tokens": []}, "EMPTY_INPUT", "prompt is empty"),
        ({"tokens": [-1]}, "TOKEN_OUT_OF_RANGE", "-1"),
        ({"tokens": [16]}, "TOKEN_OUT_OF_RANGE", "0 to 15"),
        ({"tokens": [2**31 - 1]}, "TOKEN_OUT_OF_RANGE", "2147483647"),
        ({"stop": pb.Stop(tokens=[10**7])}, "TOKEN_OUT_OF_RANGE", "10000000"),
        ({"stop": pb.Stop(tokens=[-5])}, "TOKEN_OUT_OF_RANGE", "-5"),
        ({"stop": pb.Stop(strings=[""])}, "INVALID_ARGUMENT", "empty string"),
        ({"stop": pb.Stop(strings=["a", ""])}, "INVALID_ARGUMENT", "empty string"),
        (
            {"tokens": [1] * 1000, "max_tokens": 100},
            "SEQUENCE_TOO_LONG",
            "Prompt length plus max_tokens exceeds the model's context window: 1000 + 100 > 1024",
        ),
        ({"tokens": [1] * 1024}, "SEQUENCE_TOO_LONG", "1024 + 1 > 1024"),
    ],
)
def test_sample_is_refused_with_the_value_and_what_is_accepted(
    caller: Caller, base: str, fields: dict[str, Any], reason: str, says: str
):
    """SA-16 and its like: the engine never sees them, and goes on. SA-05, SA-06, SA-07, SA-12."""
    refused = refusal(caller.generator.Sample, request(base, **fields))
    assert refused.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.reason == reason
    assert says in refused.message
    assert sampled(caller, base, temperature=0, max_tokens=1) == [[4]]


def targets(rows: list[list[int]]) -> data_pb2.Tensor:
    return tensors.encode(np.array(rows, np.int64))


def sparse_targets(
    values: list[int], crow: list[int], col: list[int], shape: tuple[int, int]
) -> data_pb2.Tensor:
    stored, rows, columns = (np.array(numbers, np.int64) for numbers in (values, crow, col))
    return tensors.encode_csr(stored, rows, columns, shape)


FLOATS = data_pb2.Tensor(floats=data_pb2.Floats(values=[4, 5]), shape=data_pb2.Shape(dims=[2, 1]))


@pytest.mark.parametrize(
    ("tensor", "reason", "says"),
    [
        (FLOATS, "WRONG_DTYPE", "float32: it must be int64"),
        (data_pb2.Tensor(), "INVALID_ARGUMENT", "target_prompt_logprobs has no data"),
        (data_pb2.Tensor(ints=data_pb2.Ints(values=[4, 5])), "LENGTH_MISMATCH", "shape [2]"),
        (targets([[4], [5], [6]]), "LENGTH_MISMATCH", "[3, 1], but the prompt has 3 tokens"),
        (targets([[4]]), "LENGTH_MISMATCH", "it must be [2, K]"),
        (targets([[16], [5]]), "TOKEN_OUT_OF_RANGE", "token id 16: this model's ids are 0 to 15"),
        (targets([[4], [-2]]), "TOKEN_OUT_OF_RANGE", "-1 wants nothing"),
        (targets([[-1], [-1]]), "INVALID_ARGUMENT", "name at least one"),
        (targets([[], []]), "INVALID_ARGUMENT", "name at least one"),
        (sparse_targets([4, 5], [0, 1], [0, 1], (2, 2)), "INVALID_ARGUMENT", "malformed CSR"),
        (sparse_targets([4, 5], [0, 0, 2], [1, 1], (2, 2)), "INVALID_ARGUMENT", "row has once"),
        (
            sparse_targets([4, 5, 6], [0, 1, 2, 3], [0, 1, 1], (3, 2)),
            "LENGTH_MISMATCH",
            "shape [3, 2], but the prompt has 3 tokens",
        ),
        (
            sparse_targets([4, 16], [0, 1, 2], [0, 1], (2, 2)),
            "TOKEN_OUT_OF_RANGE",
            "token id 16",
        ),
        (sparse_targets([], [0, 0, 0], [], (2, 2)), "INVALID_ARGUMENT", "name at least one"),
    ],
)
def test_targets_are_refused_with_what_is_wrong_and_what_is_accepted(
    caller: Caller, base: str, tensor: data_pb2.Tensor, reason: str, says: str
):
    asked = request(base, [3, 4, 5], target_prompt_logprobs=tensor, max_tokens=1)
    refused = refusal(caller.generator.Sample, asked)
    assert refused.reason == reason
    assert says in refused.message


def test_targets_of_too_many_cells_are_refused_before_they_are_made(caller: Caller, base: str):
    """A sparse tensor of a few bytes may claim any width: what it stores counts, row by row."""
    wide = sparse_targets([4, 5], [0, 1, 2], [10**12, 7], (2, 2**40))
    answer = caller.generator.Sample(
        request(base, [3, 4, 5], target_prompt_logprobs=wide, max_tokens=1)
    ).target_prompt_logprobs
    assert list(answer.shape.dims) == [2, 2**40]
    np.testing.assert_allclose(np.frombuffer(answer.raw, "<f4"), [HIT, HIT], atol=1e-5)
    tall = sparse_targets([1] * 5000, [0] + [5000] * 1000, list(range(5000)), (1000, 5000))
    refused = refusal(
        caller.generator.Sample,
        request(base, [3] * 1001, target_prompt_logprobs=tall, max_tokens=1),
    )
    assert refused.reason == "INVALID_ARGUMENT"
    assert "1000 x 5000 cells: at most 4194304" in refused.message


def test_targets_are_answered_in_their_shape_and_layout(caller: Caller, base: str):
    def answer(tensor: data_pb2.Tensor) -> data_pb2.Tensor:
        asked = request(base, [3, 4, 5, 9], target_prompt_logprobs=tensor, max_tokens=1)
        return caller.generator.Sample(asked).target_prompt_logprobs

    dense = answer(targets([[4, -1], [-1, -1], [6, 9]]))
    assert not dense.HasField("csr")
    np.testing.assert_allclose(tensors.decode(dense), [[HIT, 0], [0, 0], [HIT, MISS]], atol=1e-5)
    sparse = answer(sparse_targets([4, 6, 9], [0, 1, 1, 3], [0, 0, 1], (3, 2)))
    assert sparse.dtype == data_pb2.DTYPE_FLOAT32
    assert list(sparse.csr.crow_indices) == [0, 1, 1, 3]
    assert list(sparse.csr.col_indices) == [0, 0, 1]
    np.testing.assert_array_equal(tensors.decode(sparse), tensors.decode(dense))
    typed = data_pb2.Tensor(ints=data_pb2.Ints(values=[4, 5, 6]), shape=data_pb2.Shape(dims=[3, 1]))
    np.testing.assert_allclose(tensors.decode(answer(typed)), [[HIT]] * 3, atol=1e-5)


def test_alternatives_come_with_their_logprobs_and_follow_from_the_seed(caller: Caller, base: str):
    def drawn(k: int, **fields: Any) -> np.ndarray:
        response = caller.generator.Sample(
            request(base, [3, 4, 5], prompt_alt_tokens_k=k, max_tokens=1, **fields)
        )
        tokens = tensors.decode(response.prompt_alt_tokens.tokens)
        logprobs = tensors.decode(response.prompt_alt_tokens.logprobs)
        assert (tokens.dtype, logprobs.dtype) == (np.int64, np.float32)
        np.testing.assert_allclose(logprobs, np.where(tokens == [[4], [5]], HIT, MISS), atol=1e-5)
        return tokens

    hot = {"temperature": 8.0}
    assert drawn(100, seed=0, **hot).shape == (2, 100)
    np.testing.assert_array_equal(drawn(9, seed=0, **hot), drawn(100, seed=0, **hot)[:, :9])
    assert not np.array_equal(drawn(100, **hot), drawn(100, **hot))
    none = caller.generator.Sample(request(base, [3, 4], max_tokens=1))
    assert not none.HasField("prompt_alt_tokens")
    assert not none.HasField("target_prompt_logprobs")


def test_min_p_is_reached_and_an_explicit_0_keeps_all(caller: Caller, base: str):
    """After 3, at temperature 50, a miss has e^-.08 = .923 of the hit's probability."""
    hot = {"temperature": 50.0, "max_tokens": 100, "seed": 3}
    everything = sampled(caller, base, **hot)
    assert sampled(caller, base, min_p=0.0, **hot) == everything
    assert sampled(caller, base, min_p=0.92, **hot) == everything
    assert sampled(caller, base, min_p=0.93, **hot) == [[(4 + i) % 16 for i in range(100)]]


def test_the_last_n_tokens_alone_are_scored(caller: Caller, base: str):
    response = caller.generator.Sample(
        request(
            base,
            [3, 4, 9, 10],
            prompt_logprobs=True,
            prompt_logprobs_last_n=2,
            topk_prompt_logprobs=1,
            max_tokens=1,
        )
    )
    expected = [NAN, NAN, MISS, HIT]
    np.testing.assert_allclose(tensors.decode(response.prompt_logprobs), expected, atol=1e-5)
    ids = np.frombuffer(response.topk_prompt_logprobs.token_ids, "<i4")
    assert ids.tolist() == [0, 0, 5, 10]

    def scored(last_n: int) -> pb.ComputeLogprobsRequest:
        return pb.ComputeLogprobsRequest(snapshot=base, prompt=prompt([3, 4, 9, 10]), last_n=last_n)

    answer = caller.generator.ComputeLogprobs(scored(2))
    np.testing.assert_allclose(tensors.decode(answer.logprobs), expected, atol=1e-5)
    for last_n in (0, 4, -1):
        refused = refusal(caller.generator.ComputeLogprobs, scored(last_n))
        assert f"last_n is {last_n}: it must be 1 to the prompt's length less 1" in refused.message


def test_the_engine_learns_whether_the_caller_chose_the_seed_and_its_warnings_arrive(
    watched: Running,
):
    generator = watched.generator
    assert generator is not None
    seen: list[SampleCall] = []
    real = generator.sample

    async def sample(call: SampleCall) -> SampleResult:
        seen.append(call)
        return replace(await real(call), warnings=("seeds are of no use here",))

    generator.sample = sample  # pyright: ignore[reportAttributeAccessIssue]
    base = watched.caller.open(base_model=MODEL)
    choices: list[dict[str, Any]] = [{}, {"seed": 0}]
    for fields in choices:
        response = watched.caller.generator.Sample(request(base, max_tokens=1, **fields))
        assert list(response.warnings) == ["seeds are of no use here"]
    scored = watched.caller.generator.ComputeLogprobs(
        pb.ComputeLogprobsRequest(snapshot=base, prompt=prompt([3, 4]))
    )
    assert list(scored.warnings) == ["seeds are of no use here"]
    assert [call.is_seeded for call in seen] == [False, True, False]


def test_prompt_of_images_is_refused(caller: Caller, base: str):
    image = data_pb2.Chunk(image=data_pb2.Image(data=b"x", format="png"))
    refused = refusal(
        caller.generator.Sample,
        pb.SampleRequest(snapshot=base, prompt=data_pb2.ModelInput(chunks=[image])),
    )
    assert refused.reason == "UNSUPPORTED_INPUT"


def test_top_k_of_0_and_minus_1_keep_all_and_1_is_greedy(caller: Caller, base: str):
    """SA-06."""
    hot = {"temperature": 50.0, "max_tokens": 200, "seed": 3}
    everything = sampled(caller, base, **hot)
    for top_k in (0, -1, 16, 1000):
        assert sampled(caller, base, top_k=top_k, **hot) == everything
    assert len(set(everything[0])) == 16
    assert sampled(caller, base, top_k=1, temperature=50.0, max_tokens=2) == [[4, 5]]


@pytest.mark.parametrize("seed", [-1, 2**63 - 1, -(2**63)])
def test_seed_may_be_any_integer_and_sample_i_has_seed_plus_i(caller: Caller, base: str, seed: int):
    hot = {"temperature": 5.0, "max_tokens": 20}
    both = sampled(caller, base, seed=seed, num_samples=2, **hot)
    assert both[0] != both[1]
    assert sampled(caller, base, seed=seed, **hot) == both[:1]
    if seed < 2**63 - 1:
        assert sampled(caller, base, seed=seed + 1, **hot) == both[1:]


def test_score_gives_the_logprob_of_each_token_after_the_first(caller: Caller, base: str):
    """LG-03."""
    np.testing.assert_allclose(caller.score(base, [3, 4, 5, 9]), [NAN, HIT, HIT, MISS], atol=1e-5)
    np.testing.assert_array_equal(caller.score(base, [3]), [NAN])
    assert len(caller.score(base, [1] * 1024)) == 1024
    refused = refusal(
        caller.generator.ComputeLogprobs,
        pb.ComputeLogprobsRequest(snapshot=base, prompt=prompt([1] * 1025)),
    )
    assert refused.reason == "SEQUENCE_TOO_LONG"


def test_unknown_snapshots_give_no_tokens(caller: Caller):
    """LP-14: of a deleted run, of one that never was, of malformed names."""
    run = caller.session()
    run.save("gone", "INFERENCE")
    path = run.path("gone", "sampler_weights")
    caller.checkpoints.DeleteCheckpoint(checkpoints_pb2.DeleteCheckpointRequest(path=path))
    for name in ("snapshots/none", "", f"snapshots/session:{run.id}:1", path):
        for call, asked in (
            (caller.generator.Sample, request(name)),
            (
                caller.generator.ComputeLogprobs,
                pb.ComputeLogprobsRequest(snapshot=name, prompt=prompt([3])),
            ),
            (caller.generator.GetSnapshot, pb.GetSnapshotRequest(name=name)),
        ):
            refused = refusal(call, asked)
            assert refused.code == grpc.StatusCode.NOT_FOUND
            assert refused.reason == "SNAPSHOT_NOT_FOUND"
    for source, reason in (
        ({"path": path}, "CHECKPOINT_NOT_FOUND"),
        ({"path": "tinker://x/weights"}, "INVALID_PATH"),
        ({"base_model": "nothing"}, "MODEL_NOT_FOUND"),
        ({}, "INVALID_ARGUMENT"),
    ):
        refused = refusal(caller.generator.OpenSnapshot, pb.OpenSnapshotRequest(**source))
        assert refused.reason == reason


def test_snapshot_answers_from_its_weights_whatever_is_trained_later(caller: Caller):
    """Law 14, and the sampler's logprobs are the trainer's."""
    run = caller.session()
    base = caller.open(base_model=MODEL)
    published = []
    for step in range(4):
        name = run.publish()
        published.append((name, run.logprobs(TOKENS)))
        shown = caller.generator.GetSnapshot(pb.GetSnapshotRequest(name=name))
        assert (shown.policy_version, shown.session) == (step, run.id)
        run.train(TOKENS)
    for name, expected in published:
        np.testing.assert_allclose(caller.score(name, TOKENS)[1:], expected, atol=1e-6)
    np.testing.assert_allclose(caller.score(base, TOKENS)[1:], [HIT, MISS, MISS], atol=1e-5)


def test_opening_the_same_checkpoint_twice_gives_the_same_snapshot_and_a_new_one_when_replaced(
    caller: Caller,
):
    run = caller.session()
    run.train(TOKENS)
    run.save("a", "TRAINING")
    first = caller.generator.OpenSnapshot(pb.OpenSnapshotRequest(path=run.path("a")))
    assert first.path == run.path("a")
    assert first.policy_version == 1
    assert caller.open(path=run.path("a")) == first.name
    before = caller.score(first.name, TOKENS)
    run.train(TOKENS)
    run.save("a", overwrite=True)
    second = caller.open(path=run.path("a"))
    assert second != first.name
    np.testing.assert_array_equal(caller.score(first.name, TOKENS), before)
    assert not np.array_equal(caller.score(second, TOKENS), before)


def test_deleting_a_checkpoint_leaves_its_snapshots_and_refuses_new_ones(caller: Caller):
    """CK-12."""
    run = caller.session()
    run.train(TOKENS)
    run.save("a", "INFERENCE")
    path = run.path("a", "sampler_weights")
    snapshot = caller.open(path=path)
    before = caller.score(snapshot, TOKENS)
    caller.checkpoints.DeleteCheckpoint(checkpoints_pb2.DeleteCheckpointRequest(path=path))
    np.testing.assert_array_equal(caller.score(snapshot, TOKENS), before)
    refused = refusal(caller.generator.OpenSnapshot, pb.OpenSnapshotRequest(path=path))
    assert refused.reason == "CHECKPOINT_NOT_FOUND"


def test_snapshots_beyond_those_in_memory_are_spilled_and_answer_the_same(tmp_path: Path):
    with serving(tmp_path / "store", max_resident_snapshots=2) as running:
        caller = running.caller
        run = caller.session()
        expected = {}
        for _ in range(7):
            name = run.publish()
            expected[name] = caller.score(name, TOKENS)
            run.train(TOKENS)
        assert len({scores.tobytes() for scores in expected.values()}) == 7
        faults: list[BaseException] = []

        def score_all(names: list[str]) -> None:
            try:
                for name in names:
                    np.testing.assert_array_equal(caller.score(name, TOKENS), expected[name])
            except BaseException as error:
                faults.append(error)

        names = list(expected)
        threads = [
            threading.Thread(target=score_all, args=(names[i:] + names[:i],)) for i in range(7)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        spilled = list((tmp_path / "store").glob("*/snapshots/*"))
        assert len(spilled) >= 5


def test_sample_that_is_hung_up_on_is_cancelled_in_the_engine(watched: Running):
    """TR-06: by a deadline, and by the caller."""
    generator = watched.generator
    assert generator is not None
    base = watched.caller.open(base_model=MODEL)
    generator.hold = True
    with pytest.raises(grpc.RpcError) as caught:
        watched.caller.generator.Sample(request(base), timeout=0.2)
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    call = watched.caller.generator.Sample.future(request(base))  # pyright: ignore
    wait_until(lambda: generator.num_running == 1 and generator.num_cancelled == 1)
    call.cancel()
    wait_until(lambda: generator.num_running == 0 and generator.num_cancelled == 2)
    generator.hold = False
    assert sampled(watched.caller, base, temperature=0, max_tokens=1) == [[4]]
