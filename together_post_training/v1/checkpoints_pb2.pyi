import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from together_post_training.v1 import sessions_pb2 as _sessions_pb2
from together_post_training.v1 import trainer_pb2 as _trainer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Checkpoint(_message.Message):
    __slots__ = ("path", "kind", "session", "base_model", "lora", "policy_version", "has_optimizer", "size_bytes", "create_time", "expire_time", "user_metadata", "full_weights", "optimizer", "is_public", "files", "copied_from")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    FULL_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    IS_PUBLIC_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    COPIED_FROM_FIELD_NUMBER: _ClassVar[int]
    path: str
    kind: _trainer_pb2.CheckpointKind
    session: str
    base_model: str
    lora: _sessions_pb2.LoraConfig
    policy_version: int
    has_optimizer: bool
    size_bytes: int
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    user_metadata: _containers.ScalarMap[str, str]
    full_weights: _sessions_pb2.FullWeightsConfig
    optimizer: _sessions_pb2.OptimizerConfig
    is_public: bool
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    copied_from: str
    def __init__(self, path: _Optional[str] = ..., kind: _Optional[_Union[_trainer_pb2.CheckpointKind, str]] = ..., session: _Optional[str] = ..., base_model: _Optional[str] = ..., lora: _Optional[_Union[_sessions_pb2.LoraConfig, _Mapping]] = ..., policy_version: _Optional[int] = ..., has_optimizer: bool = ..., size_bytes: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., full_weights: _Optional[_Union[_sessions_pb2.FullWeightsConfig, _Mapping]] = ..., optimizer: _Optional[_Union[_sessions_pb2.OptimizerConfig, _Mapping]] = ..., is_public: bool = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., copied_from: _Optional[str] = ...) -> None: ...

class CheckpointFile(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class GetCheckpointRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("session", "page_size", "page_token")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session: str
    page_size: int
    page_token: str
    def __init__(self, session: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints", "next_page_token")
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    next_page_token: str
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteCheckpointRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class DeleteCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetCheckpointTtlRequest(_message.Message):
    __slots__ = ("path", "ttl")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    path: str
    ttl: _duration_pb2.Duration
    def __init__(self, path: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PublishCheckpointRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class UnpublishCheckpointRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class CopyCheckpointRequest(_message.Message):
    __slots__ = ("path", "session", "ttl")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    path: str
    session: str
    ttl: _duration_pb2.Duration
    def __init__(self, path: _Optional[str] = ..., session: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DownloadCheckpointRequest(_message.Message):
    __slots__ = ("path", "filename", "offset")
    PATH_FIELD_NUMBER: _ClassVar[int]
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    path: str
    filename: str
    offset: int
    def __init__(self, path: _Optional[str] = ..., filename: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class DownloadCheckpointResponse(_message.Message):
    __slots__ = ("filename", "offset", "data", "size_bytes")
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    filename: str
    offset: int
    data: bytes
    size_bytes: int
    def __init__(self, filename: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...
