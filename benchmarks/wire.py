"""A million tokens through client and server, with an engine that costs nothing."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
import tempfile
from pathlib import Path

import numpy as np

import tinker_compat as tinker
from backend.config import ServerConfig
from backend.resources.catalog import ModelSpec
from backend.resources.engines import Engines
from backend.server import Server
from backend.trainer import bigram
from backend.trainer.base import Pass, PassResult
from benchmarks import report

NUM_SAMPLES = 1000
NUM_TOKENS = 1000
MODEL = "builtin:bigram16"


class NoTrainer(bigram.BigramTrainer):
    """Answers every pass with logprobs 0."""

    def run(self, work: Pass) -> PassResult:
        shapes = [sample.inputs["target_tokens"].shape for sample in work.samples]
        return PassResult(
            logprobs=[np.zeros(s, np.float32) for s in shapes], metrics={"loss:sum": 0.0}
        )


def seconds_for_a_million_tokens(rounds: int) -> float:
    """From SDK types to the server's numpy, journal included, and the log-probabilities back in SDK types."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as scratch:
        process = context.Process(target=_serve, args=(theirs, Path(scratch)), daemon=True)
        process.start()
        service = tinker.ServiceClient(base_url=ours.recv())
        client = service.create_lora_training_client(MODEL, rank=1).result()
        data = _data()

        def cross() -> None:
            outputs = client.forward(data, "importance_sampling").result().loss_fn_outputs
            assert sum(o["logprobs"].to_numpy().size for o in outputs) == NUM_SAMPLES * NUM_TOKENS

        seconds = report.median_seconds(cross, rounds=rounds)
        service.close("success").result()
        ours.send("stop")
        process.join()
    return seconds


def _data() -> list[tinker.Datum]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 16, (NUM_SAMPLES, NUM_TOKENS))
    floats = rng.standard_normal((NUM_SAMPLES, NUM_TOKENS)).astype(np.float32)
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row.tolist()),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(row),
                "logprobs": tinker.TensorData.from_numpy(values),
                "advantages": tinker.TensorData.from_numpy(values),
            },
        )
        for row, values in zip(tokens, floats, strict=True)
    ]


def _serve(pipe: multiprocessing.connection.Connection, scratch: Path) -> None:
    asyncio.run(_run(pipe, scratch))


async def _run(pipe: multiprocessing.connection.Connection, scratch: Path) -> None:
    def open_engines(name: str, path: str) -> Engines:
        model = bigram.load(name)
        return Engines(trainer=NoTrainer(model), generator=model.generator(), tokenizer_dir=None)

    config = ServerConfig(
        port=0, store=scratch / "store", models=(ModelSpec(name=MODEL, path=MODEL),)
    )
    server = Server(config, open_engines=open_engines)
    address = await server.start()
    await server.load_models()
    pipe.send(address)
    await asyncio.to_thread(pipe.recv)
    await server.stop(grace_s=1.0)


if __name__ == "__main__":
    print(f"{seconds_for_a_million_tokens(7):.3f} s")
