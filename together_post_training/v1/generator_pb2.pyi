from together_post_training.v1 import data_pb2 as _data_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    STOP_REASON_STOP: _ClassVar[StopReason]
    STOP_REASON_LENGTH: _ClassVar[StopReason]
STOP_REASON_UNSPECIFIED: StopReason
STOP_REASON_STOP: StopReason
STOP_REASON_LENGTH: StopReason

class Snapshot(_message.Message):
    __slots__ = ("name", "base_model", "session", "policy_version", "path", "is_live")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IS_LIVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    base_model: str
    session: str
    policy_version: int
    path: str
    is_live: bool
    def __init__(self, name: _Optional[str] = ..., base_model: _Optional[str] = ..., session: _Optional[str] = ..., policy_version: _Optional[int] = ..., path: _Optional[str] = ..., is_live: bool = ...) -> None: ...

class OpenSnapshotRequest(_message.Message):
    __slots__ = ("base_model", "path", "live_session")
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    LIVE_SESSION_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    path: str
    live_session: str
    def __init__(self, base_model: _Optional[str] = ..., path: _Optional[str] = ..., live_session: _Optional[str] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListSnapshotsRequest(_message.Message):
    __slots__ = ("holder", "session", "page_size", "page_token")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    holder: str
    session: str
    page_size: int
    page_token: str
    def __init__(self, holder: _Optional[str] = ..., session: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSnapshotsResponse(_message.Message):
    __slots__ = ("snapshots", "next_page_token")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[Snapshot]
    next_page_token: str
    def __init__(self, snapshots: _Optional[_Iterable[_Union[Snapshot, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class HoldSnapshotsRequest(_message.Message):
    __slots__ = ("holder", "snapshots")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    snapshots: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, holder: _Optional[str] = ..., snapshots: _Optional[_Iterable[str]] = ...) -> None: ...

class HoldSnapshotsResponse(_message.Message):
    __slots__ = ("missing", "lease_s")
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[str]
    lease_s: float
    def __init__(self, missing: _Optional[_Iterable[str]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("snapshot", "prompt", "num_samples", "params", "prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs", "record_stability_info", "return_routed_experts", "prompt_logprobs_last_n", "target_prompt_logprobs", "prompt_alt_tokens_k")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_SAMPLE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RECORD_STABILITY_INFO_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_LAST_N_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ALT_TOKENS_K_FIELD_NUMBER: _ClassVar[int]
    snapshot: str
    prompt: _data_pb2.ModelInput
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool
    topk_prompt_logprobs: int
    topk_sample_logprobs: int
    record_stability_info: bool
    return_routed_experts: bool
    prompt_logprobs_last_n: int
    target_prompt_logprobs: _data_pb2.Tensor
    prompt_alt_tokens_k: int
    def __init__(self, snapshot: _Optional[str] = ..., prompt: _Optional[_Union[_data_pb2.ModelInput, _Mapping]] = ..., num_samples: _Optional[int] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., prompt_logprobs: bool = ..., topk_prompt_logprobs: _Optional[int] = ..., topk_sample_logprobs: _Optional[int] = ..., record_stability_info: bool = ..., return_routed_experts: bool = ..., prompt_logprobs_last_n: _Optional[int] = ..., target_prompt_logprobs: _Optional[_Union[_data_pb2.Tensor, _Mapping]] = ..., prompt_alt_tokens_k: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "seed", "temperature", "top_p", "top_k", "stop", "min_p")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    stop: Stop
    min_p: float
    def __init__(self, max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., min_p: _Optional[float] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("strings", "tokens")
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, strings: _Optional[_Iterable[str]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("sequences", "prompt_logprobs", "topk_prompt_logprobs", "prompt_cache_hit_tokens", "policy_version", "target_prompt_logprobs", "prompt_alt_tokens", "warnings")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ALT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SampledSequence]
    prompt_logprobs: _data_pb2.Tensor
    topk_prompt_logprobs: TopkLogprobs
    prompt_cache_hit_tokens: int
    policy_version: int
    target_prompt_logprobs: _data_pb2.Tensor
    prompt_alt_tokens: PromptAltTokens
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SampledSequence, _Mapping]]] = ..., prompt_logprobs: _Optional[_Union[_data_pb2.Tensor, _Mapping]] = ..., topk_prompt_logprobs: _Optional[_Union[TopkLogprobs, _Mapping]] = ..., prompt_cache_hit_tokens: _Optional[int] = ..., policy_version: _Optional[int] = ..., target_prompt_logprobs: _Optional[_Union[_data_pb2.Tensor, _Mapping]] = ..., prompt_alt_tokens: _Optional[_Union[PromptAltTokens, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class PromptAltTokens(_message.Message):
    __slots__ = ("tokens", "logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _data_pb2.Tensor
    logprobs: _data_pb2.Tensor
    def __init__(self, tokens: _Optional[_Union[_data_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_data_pb2.Tensor, _Mapping]] = ...) -> None: ...

class PolicySegment(_message.Message):
    __slots__ = ("policy_version", "first_token", "snapshot")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    first_token: int
    snapshot: str
    def __init__(self, policy_version: _Optional[int] = ..., first_token: _Optional[int] = ..., snapshot: _Optional[str] = ...) -> None: ...

class SampledSequence(_message.Message):
    __slots__ = ("id", "stop_reason", "tokens", "logprobs", "topk_logprobs", "policy_segments", "routed_experts_key")
    ID_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    stop_reason: StopReason
    tokens: bytes
    logprobs: bytes
    topk_logprobs: TopkLogprobs
    policy_segments: _containers.RepeatedCompositeFieldContainer[PolicySegment]
    routed_experts_key: str
    def __init__(self, id: _Optional[str] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., topk_logprobs: _Optional[_Union[TopkLogprobs, _Mapping]] = ..., policy_segments: _Optional[_Iterable[_Union[PolicySegment, _Mapping]]] = ..., routed_experts_key: _Optional[str] = ...) -> None: ...

class TopkLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs", "k", "num_rows")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    k: int
    num_rows: int
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., k: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class ComputeLogprobsRequest(_message.Message):
    __slots__ = ("snapshot", "prompt", "last_n")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    LAST_N_FIELD_NUMBER: _ClassVar[int]
    snapshot: str
    prompt: _data_pb2.ModelInput
    last_n: int
    def __init__(self, snapshot: _Optional[str] = ..., prompt: _Optional[_Union[_data_pb2.ModelInput, _Mapping]] = ..., last_n: _Optional[int] = ...) -> None: ...

class ComputeLogprobsResponse(_message.Message):
    __slots__ = ("logprobs", "warnings")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _data_pb2.Tensor
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, logprobs: _Optional[_Union[_data_pb2.Tensor, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...
