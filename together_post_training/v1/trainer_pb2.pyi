import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from together_post_training.v1 import data_pb2 as _data_pb2
from together_post_training.v1 import operations_pb2 as _operations_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightSyncType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_SYNC_TYPE_UNSPECIFIED: _ClassVar[WeightSyncType]
    WEIGHT_SYNC_TYPE_SYNCHRONOUS: _ClassVar[WeightSyncType]
    WEIGHT_SYNC_TYPE_BACKGROUND_PUBLISH: _ClassVar[WeightSyncType]
    WEIGHT_SYNC_TYPE_PIPELINE: _ClassVar[WeightSyncType]

class CheckpointKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKPOINT_KIND_UNSPECIFIED: _ClassVar[CheckpointKind]
    CHECKPOINT_KIND_TRAINING: _ClassVar[CheckpointKind]
    CHECKPOINT_KIND_INFERENCE: _ClassVar[CheckpointKind]
    CHECKPOINT_KIND_EXTERNAL: _ClassVar[CheckpointKind]
WEIGHT_SYNC_TYPE_UNSPECIFIED: WeightSyncType
WEIGHT_SYNC_TYPE_SYNCHRONOUS: WeightSyncType
WEIGHT_SYNC_TYPE_BACKGROUND_PUBLISH: WeightSyncType
WEIGHT_SYNC_TYPE_PIPELINE: WeightSyncType
CHECKPOINT_KIND_UNSPECIFIED: CheckpointKind
CHECKPOINT_KIND_TRAINING: CheckpointKind
CHECKPOINT_KIND_INFERENCE: CheckpointKind
CHECKPOINT_KIND_EXTERNAL: CheckpointKind

class ForwardRequest(_message.Message):
    __slots__ = ("session", "sequence", "loss", "samples")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    session: str
    sequence: int
    loss: _data_pb2.LossConfig
    samples: _containers.RepeatedCompositeFieldContainer[_data_pb2.Sample]
    def __init__(self, session: _Optional[str] = ..., sequence: _Optional[int] = ..., loss: _Optional[_Union[_data_pb2.LossConfig, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[_data_pb2.Sample, _Mapping]]] = ...) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("session", "sequence", "loss", "samples", "failures_seen_through", "num_chunks")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_SEEN_THROUGH_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    session: str
    sequence: int
    loss: _data_pb2.LossConfig
    samples: _containers.RepeatedCompositeFieldContainer[_data_pb2.Sample]
    failures_seen_through: int
    num_chunks: int
    def __init__(self, session: _Optional[str] = ..., sequence: _Optional[int] = ..., loss: _Optional[_Union[_data_pb2.LossConfig, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[_data_pb2.Sample, _Mapping]]] = ..., failures_seen_through: _Optional[int] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class CustomForwardBackwardRequest(_message.Message):
    __slots__ = ("session", "sequence", "samples", "gradients", "failures_seen_through", "num_chunks")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_SEEN_THROUGH_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    session: str
    sequence: int
    samples: _containers.RepeatedCompositeFieldContainer[_data_pb2.Sample]
    gradients: _containers.RepeatedCompositeFieldContainer[_data_pb2.Tensor]
    failures_seen_through: int
    num_chunks: int
    def __init__(self, session: _Optional[str] = ..., sequence: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[_data_pb2.Sample, _Mapping]]] = ..., gradients: _Optional[_Iterable[_Union[_data_pb2.Tensor, _Mapping]]] = ..., failures_seen_through: _Optional[int] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class OptimStepRequest(_message.Message):
    __slots__ = ("session", "sequence", "adam", "muon", "dimuon", "failures_seen_through")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    MUON_FIELD_NUMBER: _ClassVar[int]
    DIMUON_FIELD_NUMBER: _ClassVar[int]
    FAILURES_SEEN_THROUGH_FIELD_NUMBER: _ClassVar[int]
    session: str
    sequence: int
    adam: AdamParams
    muon: MuonParams
    dimuon: DimuonParams
    failures_seen_through: int
    def __init__(self, session: _Optional[str] = ..., sequence: _Optional[int] = ..., adam: _Optional[_Union[AdamParams, _Mapping]] = ..., muon: _Optional[_Union[MuonParams, _Mapping]] = ..., dimuon: _Optional[_Union[DimuonParams, _Mapping]] = ..., failures_seen_through: _Optional[int] = ...) -> None: ...

class AdamParams(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    GRAD_CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., grad_clip_norm: _Optional[float] = ...) -> None: ...

class MuonParams(_message.Message):
    __slots__ = ("learning_rate", "momentum", "newton_schulz_steps", "weight_decay", "grad_clip_norm", "adam")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    NEWTON_SCHULZ_STEPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    GRAD_CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    momentum: float
    newton_schulz_steps: int
    weight_decay: float
    grad_clip_norm: float
    adam: AdamParams
    def __init__(self, learning_rate: _Optional[float] = ..., momentum: _Optional[float] = ..., newton_schulz_steps: _Optional[int] = ..., weight_decay: _Optional[float] = ..., grad_clip_norm: _Optional[float] = ..., adam: _Optional[_Union[AdamParams, _Mapping]] = ...) -> None: ...

class DimuonParams(_message.Message):
    __slots__ = ("learning_rate", "beta1", "grad_clip_norm")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    GRAD_CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    grad_clip_norm: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., grad_clip_norm: _Optional[float] = ...) -> None: ...

class WeightsSyncRequest(_message.Message):
    __slots__ = ("session", "sequence", "type")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    session: str
    sequence: int
    type: WeightSyncType
    def __init__(self, session: _Optional[str] = ..., sequence: _Optional[int] = ..., type: _Optional[_Union[WeightSyncType, str]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("session", "sequence", "kind", "name", "ttl", "overwrite", "user_metadata", "age_recipients")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    AGE_RECIPIENTS_FIELD_NUMBER: _ClassVar[int]
    session: str
    sequence: int
    kind: CheckpointKind
    name: str
    ttl: _duration_pb2.Duration
    overwrite: bool
    user_metadata: _containers.ScalarMap[str, str]
    age_recipients: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[str] = ..., sequence: _Optional[int] = ..., kind: _Optional[_Union[CheckpointKind, str]] = ..., name: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., overwrite: bool = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., age_recipients: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadCheckpointRequest(_message.Message):
    __slots__ = ("session", "sequence", "path", "optimizer")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    session: str
    sequence: int
    path: str
    optimizer: bool
    def __init__(self, session: _Optional[str] = ..., sequence: _Optional[int] = ..., path: _Optional[str] = ..., optimizer: bool = ...) -> None: ...
