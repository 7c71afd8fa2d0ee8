"""A notebook: its kernel runs a loop all the time, and cells both await and wait."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.compat.conftest import MODEL

REPOSITORY = Path(__file__).parents[2]
START = f"""
import asyncio
import together.post_training.tinker as tinker

service = tinker.ServiceClient()
datum = tinker.Datum(
    model_input=tinker.ModelInput.from_ints([3]), loss_fn_inputs={{"target_tokens": [9]}}
)
prompt = tinker.ModelInput.from_ints([3])
greedy = tinker.SamplingParams(max_tokens=1, temperature=0)
MODEL = {MODEL!r}
"""
WAIT = [
    "client = service.create_lora_training_client(base_model=MODEL, rank=4)",
    "client",
    """
before = client.forward([datum], "cross_entropy").result().metrics["loss:sum"]
for _ in range(8):
    passed = client.forward_backward([datum], "cross_entropy")
    stepped = client.optim_step(tinker.AdamParams(learning_rate=1.0))
    passed.result(), stepped.result()
after = client.forward([datum], "cross_entropy").result().metrics["loss:sum"]
print("falls" if after < before else "stays")
""",
    "sampler = client.save_weights_and_get_sampling_client()\nsampler",
    "print(sampler.sample(prompt, 1, greedy).result().sequences[0].tokens)",
    """
def loss_fn(data, logprobs):
    return -logprobs[0].sum(), {"mine:mean": 1.0}

print(client.forward_backward_custom([datum], loss_fn).result().metrics["mine:mean"])
""",
]
AWAIT = [
    "trained = await service.create_lora_training_client_async(base_model=MODEL, rank=4)",
    """
for _ in range(8):
    passed = await trained.forward_backward_async([datum], "cross_entropy")
    stepped = await trained.optim_step_async(tinker.AdamParams(learning_rate=1.0))
    await passed
    await stepped.result_async()
sampler = await trained.save_weights_and_get_sampling_client_async()
""",
    """
calls = [sampler.sample_async(prompt, 1, greedy) for _ in range(100)]
print({tuple(r.sequences[0].tokens) for r in await asyncio.gather(*calls)})
""",
    "print((await sampler.compute_logprobs(prompt))[0], sampler.compute_logprobs(prompt).result())",
    "await trained.save_state('from-a-notebook')",
    "service.close('success').result()",
]


def execute(cells: list[str], address: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs them in a kernel; what the cells printed and what their last lines were shown as.

    Fails for a cell that raises, and for anything on a cell's stderr.
    """
    paths = (os.environ.get("PYTHONPATH"), str(REPOSITORY), f"{REPOSITORY}/tinker_compat/_alias")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in paths if p))
    monkeypatch.setenv("TOGETHER_POST_TRAINING_ADDRESS", address)
    # About files that Python froze, of debuggers; it is no warning of ours.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=240, startup_timeout=240, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    noise = [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    assert noise == []
    return [text for cell in notebook.cells if (text := _shown(cell.outputs))]


def _shown(outputs: list[nbformat.NotebookNode]) -> str:
    """Of one cell. A kernel that is slow sends what is printed in pieces."""
    return "".join(o.text if o.output_type == "stream" else o.data["text/plain"] for o in outputs)


def test_a_notebook_trains_and_samples_waiting_and_awaiting(address, monkeypatch):
    shown = [text.strip() for text in execute([START, *WAIT, *AWAIT], address, monkeypatch)]
    trained, falls, published, tokens, metric, many, scores, saved = shown
    assert trained.startswith("<BackcompatTrainingClientFuture: ")
    assert published.startswith("<BackcompatSamplingClientFuture: ")
    assert (falls, tokens, metric, many) == ("falls", "[9]", "1.0", "{(9,)}")
    assert scores == "None [None]"
    assert "weights/from-a-notebook" in saved


def test_a_cell_that_fails_shows_tinkers_error_and_the_next_goes_on(address, monkeypatch):
    bad = "client.forward([datum], 'no_such_loss').result()"
    caught = f"""
client = service.create_lora_training_client(base_model=MODEL).result()
try:
    {bad}
except tinker.BadRequestError as error:
    print(error.status_code)
print(client.forward([datum], "cross_entropy").result().loss_fn_output_type)
"""
    shown = execute([START, caught], address, monkeypatch)
    assert shown[0].startswith("400\n")
    with pytest.raises(CellExecutionError, match="no_such_loss"):
        execute(
            [START, "client = service.create_lora_training_client(MODEL)", bad],
            address,
            monkeypatch,
        )
