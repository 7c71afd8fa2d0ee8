"""docs/compatibility.md is what the code says; and what it is made with sees what it is there to see."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
import tinker

import tinker_compat
from tools.compatibility import calls
from tools.compatibility.__main__ import DOCUMENT, sections
from tools.compatibility.calls import ACCEPTED
from tools.compatibility.compare import Finding, Verdict, compare
from tools.compatibility.observe import Observation
from tools.compatibility.recorder import Recorder
from tools.compatibility.report import render, render_section
from tools.compatibility.surface import Member, Name, Parameter, Surface, own_surface

PROMPT = Parameter("prompt", "POSITIONAL_OR_KEYWORD")
LAST_N = Parameter("prompt_logprobs_last_n", "POSITIONAL_OR_KEYWORD", "None")
SCORE = "SamplingClient.compute_logprobs"


def test_report_says_what_the_code_does_with_the_installed_version():
    installed = metadata.version("tinker")
    (section,) = sections(((installed, installed),))
    assert render_section(section) in DOCUMENT.read_text(), (
        "run `make compat` and commit what it changes"
    )


@pytest.mark.registry
@pytest.mark.slow
def test_report_says_what_the_code_does_with_every_version():
    assert render(list(sections())) == DOCUMENT.read_text(), (
        "run `make compat` and commit what it changes"
    )


def test_surface_has_methods_fields_submodules_and_constants():
    names = own_surface().names
    forward = names["TrainingClient"].members["forward"]
    assert forward.parameters[0] == Parameter("data", "POSITIONAL_OR_KEYWORD")
    assert forward.parameters[-1].default == "None"
    assert names["TrainingClient"].members["forward_async"].kind == "coroutine"
    assert Parameter("top_p", "KEYWORD_ONLY", "1") in names["SamplingParams"].parameters
    assert names["types.Datum"].first == "Datum"
    assert names["lib.public_interfaces.service_client.ServiceClient"].first == "ServiceClient"
    assert "lib.retry_handler.RetryConfig" in names
    assert not any(name.endswith((".Any", ".TYPE_CHECKING", ".annotations")) for name in names)


def replace_scoring(monkeypatch: pytest.MonkeyPatch, function: Any) -> calls.Fates:
    """What is found when the client's method is another one."""
    monkeypatch.setattr(tinker_compat.SamplingClient, "compute_logprobs", function)
    return calls.fates(SCORE, [PROMPT, LAST_N])


@pytest.fixture
def score() -> Any:
    return tinker_compat.SamplingClient.compute_logprobs


def test_fates_are_accepted_where_every_parameter_has_an_effect():
    fates = calls.fates(SCORE, [PROMPT, LAST_N])
    assert fates.plain == ACCEPTED
    assert fates.parameters == {"prompt": ACCEPTED, "prompt_logprobs_last_n": ACCEPTED}


def test_fates_tell_warned_from_refused():
    token = Parameter("weights_access_token", "POSITIONAL_OR_KEYWORD", "None")
    path = Parameter("path", "POSITIONAL_OR_KEYWORD")
    fates = calls.fates("TrainingClient.load_state", [path, token])
    assert fates.parameters["weights_access_token"].kind == "warns"
    assert "is ignored" in fates.parameters["weights_access_token"].text
    fates = calls.fates("RestClient.get_audit_log", [])
    assert fates.plain.kind == "refused"


def test_fates_find_a_parameter_that_is_dropped(monkeypatch, score):
    fates = replace_scoring(
        monkeypatch, lambda self, prompt, prompt_logprobs_last_n=None: score(self, prompt)
    )
    assert fates.parameters["prompt_logprobs_last_n"] == calls.Outcome("broken", "has no effect")


def test_fates_find_a_parameter_in_another_place(monkeypatch, score):
    def moved(self: Any, prompt: Any, other: Any = None, prompt_logprobs_last_n: Any = None) -> Any:
        return score(self, prompt, prompt_logprobs_last_n)

    fates = replace_scoring(monkeypatch, moved)
    assert "by its place" in fates.parameters["prompt_logprobs_last_n"].text


def test_fates_find_another_default(monkeypatch, score):
    fates = replace_scoring(
        monkeypatch,
        lambda self, prompt, prompt_logprobs_last_n=2: score(self, prompt, prompt_logprobs_last_n),
    )
    assert fates.parameters["prompt_logprobs_last_n"].text.startswith("its default, None")


def test_fates_find_a_parameter_that_is_not_there(monkeypatch, score):
    fates = replace_scoring(monkeypatch, lambda self, prompt: score(self, prompt))
    assert "prompt_logprobs_last_n" in fates.parameters["prompt_logprobs_last_n"].text
    assert fates.parameters["prompt_logprobs_last_n"].kind == "broken"


def test_fates_find_an_accident_that_looks_like_a_refusal(monkeypatch):
    fates = replace_scoring(monkeypatch, lambda self, prompt, prompt_logprobs_last_n=None: int("x"))
    assert fates.plain.kind == "broken"
    assert "ValueError" in fates.plain.text


def test_recorder_answers_in_the_place_of_a_server_and_writes_down_what_was_asked():
    recorder = Recorder()
    with recorder.in_place():
        service = tinker_compat.ServiceClient(base_url="grpc://localhost:1")
        training = service.create_lora_training_client("model", rank=7).result(10)
        passed = training.optim_step(tinker.AdamParams()).result(10)
    assert passed.metrics is None or isinstance(passed.metrics, dict)
    assert [line.split(" ")[0] for line in recorder.sent] == [
        "sessions.CreateSession",
        "catalog.ListModels",
        "trainer.OptimStep",
    ]
    assert "rank: 7" in recorder.sent[0]


def observed(
    names: dict[str, Name], fates: dict[str, calls.Fates] | None = None, installed: str = "1"
) -> Observation:
    return Observation(installed, Surface(installed, names), {"1": fates or {}}, {})


def compared(theirs: Name, ours: Name | None, **more: Any) -> list[Finding]:
    names = {"path": ours} if ours is not None else {}
    return compare(Surface("1", {"path": theirs}), observed(names, **more))


def test_compare_finds_what_is_not_there():
    (finding,) = compared(Name("class", "path"), None)
    assert finding == Finding("path", Verdict.GAP, "is not there")


def test_compare_takes_genuine_objects_for_the_same():
    (finding,) = compared(Name("class", "path"), Name("class", "path", is_genuine=True))
    assert finding.verdict is Verdict.SAME


def test_compare_tells_changes_of_tinkers_own_from_ours():
    theirs = Name("class", "path", members={"tokens": Member("property")})
    (finding,) = compared(theirs, Name("class", "path", is_genuine=True), installed="2")
    assert finding == Finding("path", Verdict.CHANGED, "no tokens")
    (finding,) = compared(theirs, Name("class", "path"), installed="2")
    assert finding == Finding("path", Verdict.GAP, "no tokens")


def test_compare_finds_two_names_that_are_two_objects():
    theirs = {"A": Name("class", "A"), "types.A": Name("class", "A")}
    ours = {"A": Name("class", "A"), "types.A": Name("class", "types.A")}
    found = compare(Surface("1", theirs), observed(ours))
    assert found[1] == Finding("types.A", Verdict.GAP, "is another object than A")


def test_compare_finds_a_method_that_is_no_coroutine():
    theirs = Name("class", "SamplingClient", members={"sample_async": Member("coroutine")})
    ours = Name("class", "SamplingClient", members={"sample_async": Member("method")})
    holder = (Parameter("holder", "POSITIONAL_OR_KEYWORD"),)
    theirs = Name("class", "SamplingClient", parameters=holder, members=theirs.members)
    found = compare(Surface("1", {"SamplingClient": theirs}), observed({"SamplingClient": ours}))
    assert (
        Finding("SamplingClient.sample_async", Verdict.GAP, "is a method, not a coroutine") in found
    )


def test_compare_calls_more_parameters_and_fewer_needed_ones_a_superset():
    theirs = Name(
        "class",
        "SamplingClient",
        parameters=(Parameter("holder", "POSITIONAL_OR_KEYWORD"),),
        members={"score": Member("method", (PROMPT,))},
    )
    optional = Parameter("prompt", "POSITIONAL_OR_KEYWORD", "None")
    ours = Name("class", "SamplingClient", members={"score": Member("method", (optional, LAST_N))})
    fates = {"SamplingClient.score": calls.Fates(ACCEPTED, {"prompt": ACCEPTED})}
    found = compare(
        Surface("1", {"SamplingClient": theirs}), observed({"SamplingClient": ours}, fates)
    )
    superset = [f.subject for f in found if f.verdict is Verdict.SUPERSET]
    assert superset == ["SamplingClient.score", "SamplingClient.score(prompt)"]
