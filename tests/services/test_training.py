from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from tests.services.harness import (
    HIT,
    MISS,
    Caller,
    Run,
    Running,
    cross_entropy,
    on_loop,
    prompt,
    refusal,
    sample,
)
from together_post_training import tensors
from together_post_training.v1 import data_pb2, sessions_pb2
from together_post_training.v1 import operations_pb2 as o
from together_post_training.v1 import trainer_pb2 as t

NAN, INF = float("nan"), float("inf")


def failed(run: Run, method: str, **fields: Any) -> o.Operation:
    """The operation is failed at once, and the session goes on."""
    operation = run.submit(method, **fields)
    assert operation.state == o.OPERATION_STATE_FAILED, operation
    assert operation.error.message
    assert run.do("Forward", loss=cross_entropy(), samples=[sample([3, 4])]).state == 4
    return operation


def loss(type_: str, **params: float) -> data_pb2.LossConfig:
    return data_pb2.LossConfig(type=type_, params=params)


def test_forward_backward_returns_the_logprob_of_each_target(caller: Caller):
    run = caller.session()
    np.testing.assert_allclose(run.logprobs([3, 4, 5, 9, 10]), [HIT, HIT, MISS, HIT], atol=1e-5)
    done = run.do("ForwardBackward", loss=cross_entropy(), samples=[sample([3, 4, 5, 9, 10])] * 2)
    assert len(done.forward_backward.loss_fn_outputs) == 2
    assert done.forward_backward.metrics["loss:sum"] == pytest.approx(-2 * (3 * HIT + MISS))
    assert done.create_time.ToNanoseconds() <= done.start_time.ToNanoseconds()
    assert done.start_time.ToNanoseconds() <= done.end_time.ToNanoseconds()


@pytest.mark.parametrize("shape", [(3, 1), (3, 4)])
def test_forward_backward_takes_two_dimensional_targets(caller: Caller, shape: tuple[int, int]):
    targets = np.arange(np.prod(shape)).reshape(shape) % 16
    message = data_pb2.Sample(
        model_input=prompt([3, 4, 5]),
        loss_fn_inputs={
            "target_tokens": tensors.encode(targets.astype(np.int64)),
            "weights": tensors.encode(np.ones(shape, np.float32)),
        },
    )
    done = caller.session().do("ForwardBackward", loss=cross_entropy(), samples=[message])
    got = tensors.decode(done.forward_backward.loss_fn_outputs[0].tensors["logprobs"])
    expected = np.where(targets == np.array([[4], [5], [6]]), HIT, MISS)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "reason", "says"),
    [
        ({"loss": loss("nll"), "samples": [sample([1, 2])]}, "UNKNOWN_LOSS", "cross_entropy, dppo"),
        ({"samples": [sample([1, 2])]}, "UNKNOWN_LOSS", "cross_entropy"),
        (
            {"loss": loss("ppo", epsilon=0.2), "samples": [sample([1, 2])]},
            "UNKNOWN_PARAMETER",
            "clip_high_threshold",
        ),
        ({"loss": loss("dro", beta=NAN), "samples": [sample([1, 2])]}, "NOT_FINITE", "nan"),
        ({"loss": cross_entropy()}, "EMPTY_INPUT", "at least one"),
        (
            {"loss": cross_entropy(), "samples": [sample([1, 2], mask=[1.0])]},
            "UNKNOWN_INPUT",
            "'mask'",
        ),
        (
            {"loss": loss("ppo"), "samples": [sample([1, 2])]},
            "MISSING_INPUT",
            "logprobs",
        ),
        (
            {
                "loss": cross_entropy(),
                "samples": [sample([1, 2, 3]), sample([1, 2, 3], weights=[1])],
            },
            "LENGTH_MISMATCH",
            "Sample 1: weights has 1 values, but the model input has 2 tokens",
        ),
        (
            {"loss": cross_entropy(), "samples": [sample([1, 2], weights=[INF])]},
            "NOT_FINITE",
            "weights[0] is inf",
        ),
        ({"loss": cross_entropy(), "samples": [sample([1, 16])]}, "TOKEN_OUT_OF_RANGE", "16"),
        ({"loss": cross_entropy(), "samples": [sample([-1, 2])]}, "TOKEN_OUT_OF_RANGE", "-1"),
        ({"loss": cross_entropy(), "samples": [sample([1] * 1026)]}, "SEQUENCE_TOO_LONG", "1024"),
        ({"loss": cross_entropy(), "samples": [data_pb2.Sample()]}, "EMPTY_INPUT", "model_input"),
    ],
)
def test_forward_backward_is_refused_with_the_value_and_what_is_accepted(
    caller: Caller, fields: dict[str, Any], reason: str, says: str
):
    """TR-09 and the rest: validation fails the operation, uses its number up, and nothing else."""
    error = failed(caller.session(), "ForwardBackward", **fields).error
    assert error.reason == reason
    assert says in error.message
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


@pytest.mark.parametrize(
    ("message", "reason", "says"),
    [
        (
            data_pb2.Sample(
                model_input=data_pb2.ModelInput(
                    chunks=[data_pb2.Chunk(image=data_pb2.Image(data=b"x", format="png"))]
                )
            ),
            "UNSUPPORTED_INPUT",
            "image",
        ),
        (
            data_pb2.Sample(model_input=data_pb2.ModelInput(chunks=[data_pb2.Chunk()])),
            "INVALID_ARGUMENT",
            "encoded_text",
        ),
        (
            data_pb2.Sample(
                model_input=data_pb2.ModelInput(
                    chunks=[data_pb2.Chunk(encoded_text=data_pb2.EncodedText(raw=b"123"))]
                )
            ),
            "INVALID_ARGUMENT",
            "3 raw bytes",
        ),
        (
            data_pb2.Sample(
                model_input=data_pb2.ModelInput(
                    chunks=[
                        data_pb2.Chunk(encoded_text=data_pb2.EncodedText(raw=b"1234", tokens=[1]))
                    ]
                )
            ),
            "INVALID_ARGUMENT",
            "both raw and tokens",
        ),
    ],
)
def test_sample_of_a_kind_this_server_does_not_read_is_refused(
    caller: Caller, message: data_pb2.Sample, reason: str, says: str
):
    error = failed(
        caller.session(), "Forward", loss=cross_entropy(), samples=[sample([1, 2]), message]
    ).error
    assert error.reason == reason
    assert says in error.message
    assert "Sample 1" in error.message


def span(length: int, offset: int = 0, sequence_id: str = "q", source: str = "sampled_tokens"):
    tokens = data_pb2.TokenSpan(sequence_id=sequence_id, offset=offset, length=length)
    return data_pb2.ProvenanceSpan(**{source: tokens})


@pytest.mark.parametrize(
    ("field", "spans", "reason", "says"),
    [
        ("model_input_spans", [span(2)], "LENGTH_MISMATCH", "cover 2 positions, but the model"),
        ("model_input_spans", [span(2), span(2)], "LENGTH_MISMATCH", "input has 3"),
        (
            "loss_fn_input_spans",
            [span(0)],
            "LENGTH_MISMATCH",
            "0 positions, but target_tokens has 3",
        ),
        ("model_input_spans", [span(4), span(-1)], "INVALID_ARGUMENT", "length -1"),
        ("loss_fn_input_spans", [span(3, offset=-2)], "INVALID_ARGUMENT", "offset -2"),
        ("loss_fn_input_spans", [span(3, sequence_id="")], "INVALID_ARGUMENT", "sequence_id"),
        ("model_input_spans", [data_pb2.ProvenanceSpan()], "INVALID_ARGUMENT", "sampled_tokens"),
    ],
)
def test_provenance_spans_that_do_not_cover_every_position_are_refused(
    caller: Caller,
    field: str,
    spans: list[data_pb2.ProvenanceSpan],
    reason: str,
    says: str,
):
    message = sample([1, 2, 3, 4])
    getattr(message, field).extend(spans)
    error = failed(
        caller.session(), "Forward", loss=cross_entropy(), samples=[sample([1, 2]), message]
    ).error
    assert error.reason == reason
    assert says in error.message
    assert f"Sample 1: {field}" in error.message


def test_provenance_spans_are_kept_and_change_nothing_for_losses_that_do_not_read_them(
    caller: Caller, shared: Running
):
    run = caller.session()
    floats = {"logprobs": [-1.0, -2.0, -1.5], "advantages": [1.0, -1.0, 0.5]}
    plain, traced = (sample([1, 2, 3, 4], **floats) for _ in range(2))
    traced.model_input_spans.extend([span(1, source="prompt_tokens"), span(0), span(2)])
    traced.loss_fn_input_spans.extend([span(3, offset=5)])
    done = [
        run.do("ForwardBackward", loss=loss("importance_sampling"), samples=[one]).forward_backward
        for one in (plain, traced)
    ]
    assert done[0] == done[1]
    kept = dict(on_loop(shared.server._journal.requests(run.id)))
    assert t.ForwardBackwardRequest.FromString(kept[2]).samples[0] == traced


def test_chunks_of_a_model_input_are_joined_in_order(caller: Caller):
    """Typed lists and raw bytes side by side; an empty chunk is nothing."""
    texts = [
        data_pb2.EncodedText(tokens=[3]),
        data_pb2.EncodedText(),
        data_pb2.EncodedText(raw=np.array([4, 5], "<i4").tobytes()),
    ]
    message = sample([3, 4, 5, 6])
    message.model_input.CopyFrom(
        data_pb2.ModelInput(chunks=[data_pb2.Chunk(encoded_text=text) for text in texts])
    )
    done = caller.session().do("Forward", loss=cross_entropy(), samples=[message])
    got = tensors.decode(done.forward_backward.loss_fn_outputs[0].tensors["logprobs"])
    np.testing.assert_allclose(got, [HIT] * 3, atol=1e-5)


def test_custom_forward_backward_follows_the_callers_gradient(caller: Caller):
    """The gradient of cross_entropy with weights w is -w: both paths end at the same weights."""
    sequences, weights = [3, 4, 9, 1], [0.5, -2.0, 1.0]
    custom, plain = (caller.session() for _ in range(2))
    gradient = tensors.encode(-np.array(weights, np.float32))
    custom.do("CustomForwardBackward", samples=[sample(sequences)], gradients=[gradient])
    plain.do("ForwardBackward", loss=cross_entropy(), samples=[sample(sequences, weights=weights)])
    for run in (custom, plain):
        run.do("OptimStep", adam=t.AdamParams(learning_rate=0.1))
    np.testing.assert_array_equal(custom.logprobs(sequences), plain.logprobs(sequences))
    for bad, reason in (([], "LENGTH_MISMATCH"), ([gradient, gradient], "LENGTH_MISMATCH")):
        error = failed(
            custom, "CustomForwardBackward", samples=[sample(sequences)], gradients=bad
        ).error
        assert error.reason == reason
    nan = tensors.encode(np.array([NAN, 0, 0], np.float32))
    error = failed(
        custom, "CustomForwardBackward", samples=[sample(sequences)], gradients=[nan]
    ).error
    assert error.reason == "NOT_FINITE"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", NAN),
        ("learning_rate", INF),
        ("beta1", -0.1),
        ("beta1", 1.0),
        ("beta2", 1.0),
        ("beta2", NAN),
        ("eps", -1e-8),
        ("weight_decay", -1.0),
        ("weight_decay", NAN),
        ("grad_clip_norm", -1.0),
        ("grad_clip_norm", NAN),
    ],
)
def test_optim_step_is_refused_with_the_parameter_and_its_value(
    caller: Caller, name: str, value: float
):
    """OP-04: clipping at a negative or undefined norm, and its like."""
    error = failed(caller.session(), "OptimStep", adam=t.AdamParams(**{name: value})).error
    assert error.reason == "INVALID_ARGUMENT"
    assert name in error.message
    assert str(value) in error.message


def test_optim_step_without_parameters_is_refused_and_with_empty_ones_has_defaults(caller: Caller):
    run = caller.session()
    assert "adam" in failed(run, "OptimStep").error.message
    run.do(
        "ForwardBackward",
        loss=cross_entropy(),
        samples=[sample([3, 4, 9])],
        failures_seen_through=run.sequence,
    )
    done = run.do("OptimStep", adam=t.AdamParams())
    assert done.optim_step.policy_version == 1
    assert done.optim_step.metrics["unclipped_grad_l2:mean"] > 0


def test_explicit_zeros_of_the_optimizer_are_honoured(caller: Caller):
    """SA-05: learning rate 0 changes nothing, but it is a step; beta1 0 is not 0.9."""
    run = caller.session()
    before = run.logprobs([3, 4, 9])
    run.train([3, 4, 9], learning_rate=0.0)
    np.testing.assert_array_equal(run.logprobs([3, 4, 9]), before)
    shown = caller.sessions.GetSession(sessions_pb2.GetSessionRequest(id=run.id))
    assert shown.policy_version == 1

    def after_two_steps(beta1: float | None) -> np.ndarray:
        one = caller.session()
        for tokens in ([3, 4, 9], [9, 1, 2]):
            one.do("ForwardBackward", loss=cross_entropy(), samples=[sample(tokens)])
            adam = t.AdamParams(learning_rate=0.1)
            if beta1 is not None:
                adam.beta1 = beta1
            one.do("OptimStep", adam=adam)
        return one.logprobs([3, 4, 9])

    np.testing.assert_array_equal(after_two_steps(None), after_two_steps(0.9))
    assert not np.array_equal(after_two_steps(0.0), after_two_steps(0.9))


def test_optim_step_takes_exactly_one_step_for_each_window(caller: Caller):
    """OP-15: three passes are one step; a step on an empty window changes nothing and says so."""
    run = caller.session()
    run.train([3, 4, 9], [9, 1, 2], [5, 5, 5])
    before = run.logprobs([3, 4, 9])
    empty = run.do("OptimStep", adam=t.AdamParams(learning_rate=0.1))
    assert empty.state == o.OPERATION_STATE_SUCCEEDED
    assert empty.optim_step.metrics == {"empty_window:max": 1.0}
    assert empty.optim_step.policy_version == 1
    np.testing.assert_array_equal(run.logprobs([3, 4, 9]), before)
    run.train([3, 4, 9])
    run.save("two")
    resumed = caller.session(resume_from=run.path("two"), load_optimizer=True)
    assert resumed.shown.policy_version == 2


def test_weights_sync_of_a_kind_that_is_not_there_is_refused(caller: Caller):
    error = failed(caller.session(), "WeightsSync", type=99).error
    assert error.reason == "INVALID_ARGUMENT"
    assert "type is 99" in error.message
    assert "WEIGHT_SYNC_TYPE_SYNCHRONOUS" in error.message


@pytest.mark.parametrize("num_chunks", [0, 2_000_000])
def test_number_of_chunks_is_refused_with_the_value(caller: Caller, num_chunks: int):
    error = failed(
        caller.session(),
        "ForwardBackward",
        loss=cross_entropy(),
        samples=[sample([1, 2])],
        num_chunks=num_chunks,
    ).error
    assert str(num_chunks) in error.message


def test_only_unknown_sessions_and_bad_numbers_are_rpc_errors(caller: Caller):
    step = t.OptimStepRequest(session="nobody", sequence=1, adam=t.AdamParams())
    unknown = refusal(caller.trainer.OptimStep, step)
    assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
    run = caller.session()
    zero = refusal(
        caller.trainer.OptimStep, t.OptimStepRequest(session=run.id, adam=t.AdamParams())
    )
    assert (zero.code, zero.metadata["sequence"]) == (grpc.StatusCode.INVALID_ARGUMENT, "0")
    ahead = refusal(
        caller.trainer.OptimStep,
        t.OptimStepRequest(session=run.id, sequence=1025, adam=t.AdamParams()),
    )
    assert ahead.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "Send 1 first" in ahead.message
    run.do("OptimStep", adam=t.AdamParams())
    reused = refusal(
        caller.trainer.OptimStep,
        t.OptimStepRequest(session=run.id, sequence=1, adam=t.AdamParams(beta1=0.1)),
    )
    assert (reused.code, reused.reason) == (grpc.StatusCode.ALREADY_EXISTS, "SEQUENCE_REUSED")


def test_unknown_fields_of_a_newer_client_are_ignored_and_unknown_methods_unimplemented(
    caller: Caller,
):
    """TR-09."""
    run = caller.session()
    step = t.OptimStepRequest(session=run.id, sequence=1, adam=t.AdamParams())
    newer = step.SerializeToString() + b"\xba\x3e\x03new"  # field 999, length-delimited
    raw = caller.channel.unary_unary("/together_post_training.v1.TrainerService/OptimStep")
    operation = o.Operation.FromString(raw(newer))
    assert caller.wait(operation).state == o.OPERATION_STATE_SUCCEEDED
    with pytest.raises(grpc.RpcError) as caught:
        caller.channel.unary_unary("/together_post_training.v1.TrainerService/Distil")(b"")
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED


def test_engine_failure_is_internal_without_its_traceback(watched: Running, caplog: Any):
    assert watched.watched is not None
    run = watched.caller.session()
    watched.watched.raises = RuntimeError("CUDA error at /secret/path.py")
    done = run.do("ForwardBackward", loss=cross_entropy(), samples=[sample([1, 2])])
    assert done.error.reason == "INTERNAL"
    assert done.error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "RuntimeError" in done.error.message
    assert "secret" not in str(done)
    assert sum("secret" in str(r.exc_info) for r in caplog.records) == 1
    watched.watched.raises = None
    run.do("ForwardBackward", loss=cross_entropy(), samples=[sample([1, 2])])
    assert run.do("OptimStep", adam=t.AdamParams()).error.reason == "WINDOW_VOID"
    run.train([3, 4])


def test_misaligned_targets_are_reported_and_trained_as_they_are(caller: Caller):
    """Law 3: nothing is shifted silently."""
    run = caller.session()
    shifted = data_pb2.Sample(
        model_input=prompt([3, 4, 5]),
        loss_fn_inputs={"target_tokens": tensors.encode(np.array([3, 4, 5]))},
    )
    for message, num_shifted, total in ((sample([3, 4, 5, 6]), 0, HIT), (shifted, 2, MISS)):
        done = run.do("ForwardBackward", loss=cross_entropy(), samples=[message])
        metrics = done.forward_backward.metrics
        assert metrics["alignment_shifted_targets:sum"] == num_shifted
        assert metrics["loss:sum"] == pytest.approx(-3 * total, abs=1e-4)
