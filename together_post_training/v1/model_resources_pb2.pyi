import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelResourceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_RESOURCE_STATE_UNSPECIFIED: _ClassVar[ModelResourceState]
    MODEL_RESOURCE_STATE_CREATING: _ClassVar[ModelResourceState]
    MODEL_RESOURCE_STATE_READY: _ClassVar[ModelResourceState]
    MODEL_RESOURCE_STATE_ERROR: _ClassVar[ModelResourceState]
MODEL_RESOURCE_STATE_UNSPECIFIED: ModelResourceState
MODEL_RESOURCE_STATE_CREATING: ModelResourceState
MODEL_RESOURCE_STATE_READY: ModelResourceState
MODEL_RESOURCE_STATE_ERROR: ModelResourceState

class ModelResource(_message.Message):
    __slots__ = ("id", "base_model", "state", "create_time", "max_lora_rank", "max_seq_length", "vocab_size", "num_sessions", "full_weights_session", "num_generator_replicas")
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FULL_WEIGHTS_SESSION_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATOR_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    id: str
    base_model: str
    state: ModelResourceState
    create_time: _timestamp_pb2.Timestamp
    max_lora_rank: int
    max_seq_length: int
    vocab_size: int
    num_sessions: int
    full_weights_session: str
    num_generator_replicas: int
    def __init__(self, id: _Optional[str] = ..., base_model: _Optional[str] = ..., state: _Optional[_Union[ModelResourceState, str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., max_lora_rank: _Optional[int] = ..., max_seq_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_sessions: _Optional[int] = ..., full_weights_session: _Optional[str] = ..., num_generator_replicas: _Optional[int] = ...) -> None: ...

class CreateModelResourceRequest(_message.Message):
    __slots__ = ("base_model",)
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    def __init__(self, base_model: _Optional[str] = ...) -> None: ...

class GetModelResourceRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ListModelResourcesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelResourcesResponse(_message.Message):
    __slots__ = ("model_resources",)
    MODEL_RESOURCES_FIELD_NUMBER: _ClassVar[int]
    model_resources: _containers.RepeatedCompositeFieldContainer[ModelResource]
    def __init__(self, model_resources: _Optional[_Iterable[_Union[ModelResource, _Mapping]]] = ...) -> None: ...

class ExtendModelResourceExpiryRequest(_message.Message):
    __slots__ = ("id", "seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    seconds: int
    def __init__(self, id: _Optional[str] = ..., seconds: _Optional[int] = ...) -> None: ...

class StopModelResourceRequest(_message.Message):
    __slots__ = ("id", "force")
    ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    id: str
    force: bool
    def __init__(self, id: _Optional[str] = ..., force: bool = ...) -> None: ...
