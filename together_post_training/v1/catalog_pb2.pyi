from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "max_context_length", "trainable", "sampleable", "loaded", "architecture", "vocab_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLEABLE_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_context_length: int
    trainable: bool
    sampleable: bool
    loaded: bool
    architecture: str
    vocab_size: int
    def __init__(self, name: _Optional[str] = ..., max_context_length: _Optional[int] = ..., trainable: bool = ..., sampleable: bool = ..., loaded: bool = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("base_model",)
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    def __init__(self, base_model: _Optional[str] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("files", "digest")
    class File(_message.Message):
        __slots__ = ("filename", "data")
        FILENAME_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        filename: str
        data: bytes
        def __init__(self, filename: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...
    FILES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[GetTokenizerResponse.File]
    digest: str
    def __init__(self, files: _Optional[_Iterable[_Union[GetTokenizerResponse.File, _Mapping]]] = ..., digest: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "max_chunk_samples", "max_chunk_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    max_chunk_samples: int
    max_chunk_bytes: int
    def __init__(self, version: _Optional[str] = ..., max_chunk_samples: _Optional[int] = ..., max_chunk_bytes: _Optional[int] = ...) -> None: ...
