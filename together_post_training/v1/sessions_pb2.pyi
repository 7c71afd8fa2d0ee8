import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_RUNNING: _ClassVar[SessionState]
    SESSION_STATE_STOPPED: _ClassVar[SessionState]
    SESSION_STATE_LOST: _ClassVar[SessionState]

class MuonScalingStrategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MUON_SCALING_STRATEGY_UNSPECIFIED: _ClassVar[MuonScalingStrategy]
    MUON_SCALING_STRATEGY_MATCH_ADAM: _ClassVar[MuonScalingStrategy]
    MUON_SCALING_STRATEGY_ORIGINAL: _ClassVar[MuonScalingStrategy]
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_RUNNING: SessionState
SESSION_STATE_STOPPED: SessionState
SESSION_STATE_LOST: SessionState
MUON_SCALING_STRATEGY_UNSPECIFIED: MuonScalingStrategy
MUON_SCALING_STRATEGY_MATCH_ADAM: MuonScalingStrategy
MUON_SCALING_STRATEGY_ORIGINAL: MuonScalingStrategy

class Session(_message.Message):
    __slots__ = ("id", "base_model", "model_resource", "state", "lora", "policy_version", "last_sequence", "create_time", "last_request_time", "user_metadata", "resumed_from", "display_name", "full_weights", "optimizer")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_RESOURCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_TIME_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FROM_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    FULL_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    id: str
    base_model: str
    model_resource: str
    state: SessionState
    lora: LoraConfig
    policy_version: int
    last_sequence: int
    create_time: _timestamp_pb2.Timestamp
    last_request_time: _timestamp_pb2.Timestamp
    user_metadata: _containers.ScalarMap[str, str]
    resumed_from: str
    display_name: str
    full_weights: FullWeightsConfig
    optimizer: OptimizerConfig
    def __init__(self, id: _Optional[str] = ..., base_model: _Optional[str] = ..., model_resource: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., lora: _Optional[_Union[LoraConfig, _Mapping]] = ..., policy_version: _Optional[int] = ..., last_sequence: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_request_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., resumed_from: _Optional[str] = ..., display_name: _Optional[str] = ..., full_weights: _Optional[_Union[FullWeightsConfig, _Mapping]] = ..., optimizer: _Optional[_Union[OptimizerConfig, _Mapping]] = ...) -> None: ...

class LoraConfig(_message.Message):
    __slots__ = ("rank", "alpha", "seed", "train_attn", "train_mlp", "train_unembed", "dropout", "target_modules")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TRAIN_ATTN_FIELD_NUMBER: _ClassVar[int]
    TRAIN_MLP_FIELD_NUMBER: _ClassVar[int]
    TRAIN_UNEMBED_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    alpha: float
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    dropout: float
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., seed: _Optional[int] = ..., train_attn: bool = ..., train_mlp: bool = ..., train_unembed: bool = ..., dropout: _Optional[float] = ..., target_modules: _Optional[_Iterable[str]] = ...) -> None: ...

class FullWeightsConfig(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OptimizerConfig(_message.Message):
    __slots__ = ("adamw", "muon", "dimuon")
    ADAMW_FIELD_NUMBER: _ClassVar[int]
    MUON_FIELD_NUMBER: _ClassVar[int]
    DIMUON_FIELD_NUMBER: _ClassVar[int]
    adamw: AdamWConfig
    muon: MuonConfig
    dimuon: DimuonConfig
    def __init__(self, adamw: _Optional[_Union[AdamWConfig, _Mapping]] = ..., muon: _Optional[_Union[MuonConfig, _Mapping]] = ..., dimuon: _Optional[_Union[DimuonConfig, _Mapping]] = ...) -> None: ...

class AdamWConfig(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MuonConfig(_message.Message):
    __slots__ = ("scaling_strategy",)
    SCALING_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    scaling_strategy: MuonScalingStrategy
    def __init__(self, scaling_strategy: _Optional[_Union[MuonScalingStrategy, str]] = ...) -> None: ...

class DimuonConfig(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("id", "base_model", "lora", "full_weights", "optimizer", "resume_from", "load_optimizer", "user_metadata", "display_name")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    FULL_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    LOAD_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    id: str
    base_model: str
    lora: LoraConfig
    full_weights: FullWeightsConfig
    optimizer: OptimizerConfig
    resume_from: str
    load_optimizer: bool
    user_metadata: _containers.ScalarMap[str, str]
    display_name: str
    def __init__(self, id: _Optional[str] = ..., base_model: _Optional[str] = ..., lora: _Optional[_Union[LoraConfig, _Mapping]] = ..., full_weights: _Optional[_Union[FullWeightsConfig, _Mapping]] = ..., optimizer: _Optional[_Union[OptimizerConfig, _Mapping]] = ..., resume_from: _Optional[str] = ..., load_optimizer: bool = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., display_name: _Optional[str] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class HeartbeatSessionRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class HeartbeatSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopSessionRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...
