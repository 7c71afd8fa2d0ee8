"""Training through the client: order, chunks, failures that were seen, checkpoints. Real server, exact model."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tests.compat.data import HIT, MISS, close, datum, greedy, prompt
from tinker_compat import passes
from tinker_compat.conversion import loss_config
from together_post_training.client.loop import background_loop
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.v1 import trainer_pb2

# No usual step hides the gradient's size: with eps this large AdamW moves by about -0.01 * gradient.
LINEAR = types.AdamParams(learning_rate=100.0, eps=1e4)


def logprobs(client: tinker.TrainingClient) -> list[float]:
    result = client.forward([datum()], "cross_entropy").result()
    return result.loss_fn_outputs[0]["logprobs"].tolist()


def test_forward_gives_loss_and_logprobs_in_tinkers_types(client):
    result = client.forward([datum()], "cross_entropy").result()
    assert type(result) is types.ForwardBackwardOutput
    assert result.metrics["loss:sum"] == close(-(2 * HIT + MISS))
    output = result.loss_fn_outputs[0]["logprobs"]
    assert type(output) is types.TensorData
    assert (output.dtype, output.shape) == ("float32", [3])
    assert output.data == close([HIT, HIT, MISS])
    assert output.to_torch().tolist() == output.tolist()


def test_forward_returns_logprobs_also_where_the_weight_is_zero(client):
    zero = datum(target_tokens=[4, 5, 9], weights=[0.0, 0.0, 0.0])
    result = client.forward([zero], "cross_entropy").result()
    assert result.loss_fn_outputs[0]["logprobs"].tolist() == close([HIT, HIT, MISS])
    assert result.metrics["loss:sum"] == 0


def test_forward_leaves_no_gradient(client):
    client.forward([datum()], "cross_entropy")
    assert client.optim_step(LINEAR).result().metrics["empty_window:max"] == 1
    assert logprobs(client) == close([HIT, HIT, MISS])


@pytest.mark.parametrize(
    "idiom",
    [
        lambda c, p: c.optim_step(p),
        lambda c, p: c.optim_step(adam_params=p),
        lambda c, p: c.optim_step(optim_params=p),
        lambda c, p: c.optim_step(p.model_dump()),
        lambda c, p: c.optim_step(adam_params=p.model_dump()),
    ],
)
def test_optim_step_takes_its_parameters_in_every_spelling(client, idiom):
    client.forward_backward([datum()], "cross_entropy")
    idiom(client, types.AdamParams(learning_rate=0.0)).result()
    assert logprobs(client) == close([HIT, HIT, MISS])
    client.forward_backward([datum()], "cross_entropy")
    idiom(client, types.AdamParams(learning_rate=0.05)).result()
    assert logprobs(client)[2] > MISS + 0.1


def test_optim_step_uses_what_was_submitted_before_it_and_not_after(service):
    """Nothing is waited for: the order of the calls is the order of the operations."""
    pipelined = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    waited = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    for _ in range(3):
        pipelined.forward_backward([datum()], "cross_entropy")
        pipelined.optim_step(LINEAR)
        waited.forward_backward([datum()], "cross_entropy").result()
        waited.optim_step(LINEAR).result()
    assert logprobs(pipelined) == logprobs(waited)


def test_operations_of_many_threads_each_take_effect_once(client):
    threads = [
        threading.Thread(target=lambda: client.forward_backward([datum()], "cross_entropy"))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    norm = client.optim_step(LINEAR).result().metrics["unclipped_grad_l2:mean"]
    client.forward_backward([datum()] * 8, "cross_entropy")
    again = client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    # The step moved the weights a little; eight times one gradient is nothing near one.
    assert again.metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=0.5)


def test_a_call_of_1025_samples_is_split_and_read_as_one(client):
    data = [datum([i % 16], target_tokens=[(i + 1 + i % 3) % 16]) for i in range(1025)]
    result = client.forward_backward(data, "cross_entropy").result()
    assert client.forward(data[:1], "cross_entropy").result()
    operations = client._core.session.reserve(1).sequences.start - 1
    assert operations == 3, "two of the split call, one more"
    values = [output["logprobs"].tolist()[0] for output in result.loss_fn_outputs]
    assert len(values) == 1025
    expected = [HIT if i % 3 == 0 else MISS for i in range(1025)]
    assert values == close(expected)
    # A sum of 1025 float32 values.
    assert result.metrics["loss:sum"] == pytest.approx(-sum(expected), abs=1e-2)
    assert result.metrics["tokens:sum"] == 1025


def test_more_than_four_mebibytes_pass_each_way_in_one_message(client):
    """gRPC's own limit is 4 MiB. 1100 samples of 1000 tokens: 13 MB there, 4.4 MB back, not split here."""
    tokens = [i % 16 for i in range(1000)]
    data = [datum(tokens, target_tokens=np.arange(1, 1001) % 16) for _ in range(1100)]
    (request,) = passes.forward_requests(
        data, [slice(0, len(data))], loss_config("cross_entropy", None)
    )
    assert request.ByteSize() > 12 * 2**20
    result = client._core.submit([request], passes.output).result()
    assert sum(len(o["logprobs"].data) for o in result.loss_fn_outputs) == 1_100_000
    assert result.loss_fn_outputs[-1]["logprobs"].data[:2] == close([HIT, HIT])


def test_a_large_call_is_split_into_messages_of_five_megabytes(fake):
    training = tinker.ServiceClient(base_url=fake.address).create_lora_training_client("fake")
    data = [datum(list(range(1000)), target_tokens=np.arange(1000)) for _ in range(900)]
    training.forward(data, "cross_entropy").result()
    # 12 kB each, so 416 in 5 MB.
    assert [len(r.samples) for r in sorted(fake.received("Forward"), key=lambda r: r.sequence)] == [
        416,
        416,
        68,
    ]


def test_two_dimensional_targets_come_back_in_their_shape(client):
    targets = np.array([[4, 9], [5, 9], [6, 9]])
    weights = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], dtype=np.float32)
    result = client.forward(
        [datum(target_tokens=targets, weights=weights)], "cross_entropy"
    ).result()
    output = result.loss_fn_outputs[0]["logprobs"]
    assert output.shape == [3, 2]
    assert np.ravel(output.tolist()) == close([HIT, MISS] * 3)
    assert result.metrics["loss:sum"] == close(-(1.5 * HIT + 1.5 * MISS))


def test_loss_config_reaches_the_loss(client):
    """One token with ratio e^2: not clipped by the defaults' upper bound when that is raised."""
    sample = datum([3], target_tokens=[4], logprobs=[HIT - 2.0], advantages=[1.0])
    clipped = client.forward([sample], "ppo").result().metrics["loss:sum"]
    config = {"clip_low_threshold": 0.1, "clip_high_threshold": 100.0}
    free = client.forward([sample], "ppo", config).result().metrics["loss:sum"]
    named = client.forward([sample], "ppo", loss_fn_config=config).result().metrics["loss:sum"]
    assert clipped == close(-1.2)
    assert free == named == pytest.approx(-np.exp(2.0), rel=1e-5)


def test_get_info_answers_with_what_scripts_read(client):
    info = client.get_info()
    assert type(info) is types.GetInfoResponse
    assert info.model_id == client.model_id
    assert (info.model_data.model_name, info.model_data.arch) == (MODEL, "Bigram")
    assert (info.is_lora, info.lora_rank, info.model_name) == (True, 4, MODEL)
    assert asyncio.run(client.get_info_async()) == info


def test_sessions_are_scaled_as_tinkers_are(client):
    lora = client._core.session.info.lora
    assert (lora.alpha, lora.rank) == (32.0, 4)


def test_model_ids_are_tinkers_and_lead_checkpoint_paths(service, client):
    assert client.model_id == f"{service.holder.get_session_id()}:train:0"
    assert client.save_state("a").result().path == f"tinker://{client.model_id}/weights/a"
    exported = client.save_weights_for_sampler("a").result()
    assert exported.path == f"tinker://{client.model_id}/sampler_weights/a"
    assert type(exported) is types.SaveWeightsForSamplerResponse


def test_a_checkpoint_name_that_is_taken_is_refused_at_once_and_replaced_on_demand(client):
    client.save_state("a").result()
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(LINEAR)
    with pytest.raises(tinker.ConflictError, match=r"'a' already exists") as taken:
        client.save_state("a").result(timeout=5)
    assert taken.value.status_code == 409
    path = client.save_state("a", overwrite=True, user_metadata={"k": "v"}).result().path
    trained = logprobs(client)
    client.load_state(path).result()
    assert logprobs(client) == trained
    assert client.forward_backward([datum()], "cross_entropy").result()


def test_a_request_that_is_sent_again_has_its_first_result(client):
    """As after a lost answer: the same number and bytes are the same operation, other bytes are refused."""
    session = client._core.session
    request = trainer_pb2.SaveCheckpointRequest(kind=trainer_pb2.CHECKPOINT_KIND_TRAINING, name="a")
    session.number([request], session.reserve(1))
    saved = [background_loop().start(session.run([request])).result(10) for _ in range(2)]
    assert saved[0] == saved[1]
    request.name = "b"
    with pytest.raises(PostTrainingError) as reused:
        background_loop().start(session.run([request])).result(10)
    assert reused.value.reason is Reason.SEQUENCE_REUSED
    assert client.forward_backward([datum()], "cross_entropy").result()


def test_resuming_with_the_optimizer_goes_on_as_if_nothing_had_stopped(service, client):
    params = types.AdamParams(learning_rate=0.02)

    def train(target: tinker.TrainingClient) -> None:
        target.forward_backward([datum()], "cross_entropy")
        target.optim_step(params).result()

    train(client)
    train(client)
    path = client.save_state("half").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path, {"renderer": "chat"}).result()
    assert logprobs(resumed) == logprobs(fresh) == logprobs(client)
    assert resumed.get_info().lora_rank == 4
    for each in (client, resumed, fresh):
        train(each)
    assert logprobs(resumed) == logprobs(client)
    assert logprobs(fresh) != logprobs(client)
    client.load_state_with_optimizer(path).result()
    train(client)
    assert logprobs(client) == logprobs(resumed)


def test_load_state_answers_in_tinkers_type(client):
    path = client.save_state("b").result().path
    loaded = client.load_state(path).result()
    assert (type(loaded), loaded.path) == (types.LoadWeightsResponse, path)


def test_a_sampling_client_keeps_its_weights(client):
    before = client.save_weights_and_get_sampling_client()
    score = before.compute_logprobs(prompt(3, 9)).result()
    client.forward_backward([datum([3], target_tokens=[9])], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.5))
    after = client.save_weights_and_get_sampling_client()
    assert before.compute_logprobs(prompt(3, 9)).result() == score
    assert after.compute_logprobs(prompt(3, 9)).result()[1] > score[1] + 1
    path = client.save_weights_for_sampler("s").result().path
    saved = client.create_sampling_client(path)
    assert saved.sample(prompt(3), 1, greedy()).result().sequences[0].tokens[0] == 9
    assert saved.get_base_model() == MODEL


def test_every_sampling_client_of_a_run_has_a_snapshot_of_its_own(client):
    samplers = []
    for _ in range(3):
        client.forward_backward([datum([3], target_tokens=[9])], "cross_entropy")
        client.optim_step(LINEAR)
        samplers.append(client.save_weights_and_get_sampling_client())
    scores = [s.compute_logprobs(prompt(3, 9)).result()[1] for s in samplers]
    assert scores[0] < scores[1] < scores[2]
    assert len({s._sampling_session_id for s in samplers}) == 3


def test_a_step_of_learning_rate_zero_changes_no_bit(client):
    before = logprobs(client)
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    assert logprobs(client) == before


def bad() -> list[types.Datum]:
    return [datum(target_tokens=[4, 5, 99])]


def test_an_optim_step_sent_along_with_a_failure_changes_nothing(client):
    failed = client.forward_backward(bad(), "cross_entropy")
    client.forward_backward([datum()], "cross_entropy")
    stepped = client.optim_step(LINEAR)
    with pytest.raises(tinker.BadRequestError, match="99"):
        failed.result()
    with pytest.raises(tinker.RequestFailedError, match="operation 1") as void:
        stepped.result()
    assert void.value.category is types.RequestErrorCategory.User
    assert void.value.request_id.endswith("/operations/3")
    assert logprobs(client) == close([HIT, HIT, MISS])
    client.forward_backward([datum()], "cross_entropy")
    client.optim_step(LINEAR).result()
    assert logprobs(client)[2] > MISS + 0.1


def test_a_failure_that_was_seen_does_not_void_what_comes_after_it(client):
    client.forward_backward([datum()], "cross_entropy")
    with pytest.raises(tinker.BadRequestError):
        client.forward_backward(bad(), "cross_entropy").result()
    client.optim_step(LINEAR).result()
    assert logprobs(client)[2] > MISS + 0.1


async def _await(future: tinker.APIFuture) -> None:
    await future


SEEN = {
    "result": lambda f: f.result(),
    "await": lambda f: asyncio.run(_await(f)),
    "gather": lambda f: asyncio.run(_gather(f)),
}
UNSEEN = {
    "exception": lambda f: f.exception(),
    "done": lambda f: f.done(),
    "nothing": lambda f: None,
}


async def _gather(future: tinker.APIFuture) -> None:
    (error,) = await asyncio.gather(future, return_exceptions=True)
    raise error


@pytest.mark.parametrize("way", [*SEEN, *UNSEEN])
def test_a_failure_is_seen_when_it_was_handed_to_the_caller(fake, way):
    def refuse(request: object) -> None:
        if type(request).__name__ == "ForwardBackwardRequest":
            raise fail(Reason.UNKNOWN_LOSS, "refused")

    fake.behave = refuse
    training = tinker.ServiceClient(base_url=fake.address).create_lora_training_client("fake")
    failed = training.forward_backward([datum()], "x")
    training.forward([datum()], "x").result()
    if way in SEEN:
        with pytest.raises(tinker.BadRequestError):
            SEEN[way](failed)
    else:
        UNSEEN[way](failed)
    training.optim_step(types.AdamParams()).result()
    (step,) = fake.received("OptimStep")
    assert step.failures_seen_through == (1 if way in SEEN else 0)


def test_a_failure_of_a_split_call_is_seen_up_to_its_last_chunk(fake):
    def refuse(request: object) -> None:
        if type(request).__name__ == "ForwardBackwardRequest":
            raise fail(Reason.UNKNOWN_LOSS, "refused")

    fake.behave = refuse
    training = tinker.ServiceClient(base_url=fake.address).create_lora_training_client("fake")
    with pytest.raises(tinker.BadRequestError):
        training.forward_backward([datum()] * 2049, "x").result()
    training.optim_step(types.AdamParams()).result()
    chunks = fake.received("ForwardBackward")
    assert {c.num_chunks for c in chunks} == {3}
    assert sorted((c.sequence, len(c.samples)) for c in chunks) == [(1, 1024), (2, 1024), (3, 1)]
    assert fake.received("OptimStep")[0].failures_seen_through == 3


def test_closing_refuses_further_calls_and_ends_the_session_on_the_server(service, client):
    sampler = client.save_weights_and_get_sampling_client().result()
    service.close("success").result()
    assert service.close("errored").result() is None
    for call in (
        lambda: client.forward([datum()], "cross_entropy"),
        lambda: sampler.sample(prompt(1), 1, greedy()),
        lambda: service.create_lora_training_client(MODEL),
        service.get_server_capabilities,
    ):
        with pytest.raises(RuntimeError, match="ServiceClient is closed"):
            call()


def test_leaving_a_with_block_finishes_what_was_submitted(address):
    with tinker.ServiceClient(base_url=address) as service:
        client = service.create_lora_training_client(MODEL, rank=4)
        model_id = client.model_id
        saved = client.save_state("kept")
    assert saved.result().path == f"tinker://{model_id}/weights/kept"
    again = tinker.ServiceClient(base_url=address)
    assert again.create_training_client_from_state(saved.result().path).result()


def test_leaving_a_with_block_by_an_error_keeps_the_error(address):
    with pytest.raises(KeyError, match="mine"), tinker.ServiceClient(base_url=address):
        raise KeyError("mine")
