"""Names that one version of Tinker has and the installed one lacks: ours are the names of 0.23.1 and 0.38.0 together.

What this service can honour is here as an object. What only Tinker itself could bring is listed with the version that
does, so that asking for it says so.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType

import tinker
from tinker import types

from tinker_compat import optimizer_types, response_types
from tinker_compat.auth import (
    get_tinker_token,
    raise_if_tinker_not_accessible,
    tinker_has_credentials,
)
from tinker_compat.loss_handle import LossHandle, PerDatumLossFn
from tinker_compat.rest_client import RestClient
from tinker_compat.sampling_client import BackcompatSamplingClientFuture, SamplingClient
from tinker_compat.service_client import ServiceClient
from tinker_compat.training_client import BackcompatTrainingClientFuture, TrainingClient
from tinker_compat.unsupported import AdminClient
from together_post_training import chunking


class SidecarError(tinker.TinkerError):
    """Until 0.37: of the process that Tinker's SDK sampled through. Never raised here."""


class SidecarStartupError(SidecarError):
    pass


class SidecarDiedError(SidecarError):
    pass


class SidecarIPCError(SidecarError):
    pass


class BillingError(tinker.APIStatusError):
    """Newer than 0.23. Never raised here: a server of your own has no bills."""

    status_code: int = 402


class ExperimentalWarning(FutureWarning):
    """Newer than 0.23. Of calls that may change in any release."""


CLIENTS: Mapping[str, type] = {
    client.__name__: client
    for client in (
        AdminClient,
        BackcompatSamplingClientFuture,
        BackcompatTrainingClientFuture,
        RestClient,
        SamplingClient,
        ServiceClient,
        TrainingClient,
    )
}
_AUTH: Mapping[str, Callable[..., object]] = {
    "get_tinker_token": get_tinker_token,
    "raise_if_tinker_not_accessible": raise_if_tinker_not_accessible,
    "tinker_has_credentials": tinker_has_credentials,
}
# Stand in for Tinker's in whatever module has them.
REPLACEMENTS: Mapping[str, Callable[..., object]] = {**CLIENTS, **_AUTH}

_LOSSES = {"LossHandle": LossHandle, "PerDatumLossFn": PerDatumLossFn}
_OPTIMIZERS = {
    name: getattr(optimizer_types, name)
    for name in (
        "AdamOptimizerConfig",
        "DimuonOptimizerConfig",
        "DimuonParams",
        "OptimParams",
        "OptimizerConfig",
    )
}
# By the modules that they have to themselves below `types`.
_RESPONSES = {
    "checkpoint_archive_url_response": response_types.CheckpointArchiveUrlResponse,
    "external_weights_urls_response": response_types.ExternalWeightsUrlsResponse,
    "save_weights_external_response": response_types.SaveWeightsExternalResponse,
    "whoami_response": response_types.WhoamiResponse,
}
_TOP = {
    **CLIENTS,
    **_LOSSES,
    **{name: value for name, value in _OPTIMIZERS.items() if name != "OptimizerConfig"},
    "BillingError": BillingError,
    "ExperimentalWarning": ExperimentalWarning,
    "SidecarDiedError": SidecarDiedError,
    "SidecarError": SidecarError,
    "SidecarIPCError": SidecarIPCError,
    "SidecarStartupError": SidecarStartupError,
}


def _topk() -> dict[str, object]:
    """One class under its two names: what the responses of the installed version hold."""
    for module, name in (
        ("topk_logprobs", "TopkLogprobs"),
        ("topk_prompt_logprobs", "TopkPromptLogprobs"),
    ):
        if hasattr(types, module):
            value = getattr(getattr(types, module), name)
            return {"TopkLogprobs": value, "TopkPromptLogprobs": value}
    return {}


_PUBLIC = "lib.public_interfaces"
# By module of Tinker's, "" being the package itself. A module that the installed version lacks has just these names.
ADDITIONS: Mapping[str, Mapping[str, object]] = {
    "": _TOP,
    "auth": _AUTH,
    "types": {**_OPTIMIZERS, **{value.__name__: value for value in _RESPONSES.values()}},
    **{f"types.{module}": {value.__name__: value} for module, value in _RESPONSES.items()},
    "types.optimizer": {
        **_OPTIMIZERS,
        "AdamParams": types.AdamParams,
        "OptimParamsBase": optimizer_types.OptimParamsBase,
        "OptimizerConfigBase": optimizer_types.OptimizerConfigBase,
    },
    # What a response's rows hold where there is no token.
    "types.sample_response": {"MASK_LOGPROB": -99999.0},
    "types.topk_logprobs": _topk(),
    "types.topk_prompt_logprobs": _topk(),
    "lib.experimental": {"ExperimentalWarning": ExperimentalWarning},
    _PUBLIC: {**CLIENTS, **_LOSSES},
    f"{_PUBLIC}.admin_client": {"AdminClient": AdminClient},
    f"{_PUBLIC}.backcompat_sampling_client_future": CLIENTS,
    f"{_PUBLIC}.backcompat_training_client_future": CLIENTS,
    f"{_PUBLIC}.custom_loss": _LOSSES,
    f"{_PUBLIC}.training_client": {
        "MAX_CHUNK_LEN": chunking.MAX_CHUNK_SAMPLES,
        "MAX_CHUNK_BYTES_COUNT": chunking.MAX_CHUNK_BYTES,
    },
}

_NEW = "0.38.0"
_NEW_NAMES: Mapping[str, str] = {
    "": "PromptProvenanceSpan SampledProvenanceSpan",
    "types": """
        AccessibleSearchOwner ActiveSessionStatusQuery BillingEventInfo BillingUsageEvent BillingUsageResponse
        BillingUsageSession CancelledSessionStatusQuery CheckpointBillingEvent ClientDynamicConfigResponse
        ClientFinishedSessionStatusQuery ClientSessionFinishErrored ClientSessionFinishInterrupted
        ClientSessionFinishReason ClientSessionFinishReasonType ClientSessionFinishSuccess ClientSessionFinished
        CopyWeightsRequest CopyWeightsResponse CreateCustomLossRequest CreateCustomLossResponse
        CurrentCheckpointStorageUsageItem CurrentCheckpointStorageUsageResponse CustomLossGraph CustomLossInput
        CustomLossInputRank CustomLossNode FailedSessionStatusQuery FutureCompletion FutureFailed FutureFinished
        FuturesRetrieveRequest FuturesRetrieveResponse GetBillingUsageRequest GetCurrentCheckpointStorageUsageRequest
        JoinSamplingSessionRequest JoinSamplingSessionResponse OwnSearchOwner PromptAltTokens PromptProvenanceSpan
        ProvenanceSpans SampledProvenanceSpan SamplingClientKind SamplingPrefillBillingEvent SamplingSampleBillingEvent
        SamplingSessionFuturesTarget SaveWeightsExternalRequest SaveWeightsExternalResponseInternal SearchOwner
        SessionActive SessionCancelled SessionFailed SessionFailedReason SessionFailedRequestReason
        SessionFailedSamplingSessionReason SessionFailedTrainingRunReason SessionSearchCursor SessionSearchRequest
        SessionSearchResponse SessionStatus SessionStatusQuery SessionSummary StorageBillingEvent TrainingBillingEvent
        UserSearchOwner

        billing_usage_request billing_usage_response client_dynamic_config_response copy_weights_request
        copy_weights_response create_custom_loss_request create_custom_loss_response
        current_checkpoint_storage_usage_request current_checkpoint_storage_usage_response custom_loss_graph
        custom_loss_input future_completion futures_retrieve_request
        futures_retrieve_response join_sampling_session_request join_sampling_session_response prompt_alt_tokens
        provenance_spans sampling_client_kind save_weights_external_request search_owner
        session_search_cursor session_search_request session_search_response session_status session_status_query
        session_summary
    """,
}
_NEEDS_NEW = {
    f"{module}.{name}" if module else name
    for module, names in _NEW_NAMES.items()
    for name in names.split()
}


def missing(module: str) -> dict[str, object]:
    """What the installed Tinker's module lacks of ours."""
    theirs = genuine(module)
    return {n: v for n, v in ADDITIONS.get(module, {}).items() if not hasattr(theirs, n)}


def genuine(module: str) -> ModuleType | None:
    """The installed Tinker's, if it has it."""
    fullname = f"{tinker.__name__}.{module}" if module else tinker.__name__
    try:
        found = importlib.util.find_spec(fullname)
    except ModuleNotFoundError:
        return None
    return importlib.import_module(fullname) if found is not None else None


def explain_lack(name: str) -> str | None:
    """Why a name below Tinker's, e.g. "types.SessionStatus", is not there, if a newer version has it."""
    parent, _, last = name.rpartition(".")
    if name not in _NEEDS_NEW or last in vars(genuine(parent)):
        return None
    return (
        f"tinker.{name} needs tinker {_NEW}, and {tinker.__version__} is installed: "
        "python -m pip install --upgrade tinker"
    )
