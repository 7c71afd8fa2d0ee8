import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from together_post_training.v1 import data_pb2 as _data_pb2
from together_post_training.v1 import errors_pb2 as _errors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OperationKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_KIND_UNSPECIFIED: _ClassVar[OperationKind]
    OPERATION_KIND_FORWARD: _ClassVar[OperationKind]
    OPERATION_KIND_FORWARD_BACKWARD: _ClassVar[OperationKind]
    OPERATION_KIND_CUSTOM_FORWARD_BACKWARD: _ClassVar[OperationKind]
    OPERATION_KIND_OPTIM_STEP: _ClassVar[OperationKind]
    OPERATION_KIND_WEIGHTS_SYNC: _ClassVar[OperationKind]
    OPERATION_KIND_SAVE_CHECKPOINT: _ClassVar[OperationKind]
    OPERATION_KIND_LOAD_CHECKPOINT: _ClassVar[OperationKind]

class OperationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_STATE_UNSPECIFIED: _ClassVar[OperationState]
    OPERATION_STATE_HELD: _ClassVar[OperationState]
    OPERATION_STATE_QUEUED: _ClassVar[OperationState]
    OPERATION_STATE_RUNNING: _ClassVar[OperationState]
    OPERATION_STATE_SUCCEEDED: _ClassVar[OperationState]
    OPERATION_STATE_FAILED: _ClassVar[OperationState]
    OPERATION_STATE_CANCELLED: _ClassVar[OperationState]
OPERATION_KIND_UNSPECIFIED: OperationKind
OPERATION_KIND_FORWARD: OperationKind
OPERATION_KIND_FORWARD_BACKWARD: OperationKind
OPERATION_KIND_CUSTOM_FORWARD_BACKWARD: OperationKind
OPERATION_KIND_OPTIM_STEP: OperationKind
OPERATION_KIND_WEIGHTS_SYNC: OperationKind
OPERATION_KIND_SAVE_CHECKPOINT: OperationKind
OPERATION_KIND_LOAD_CHECKPOINT: OperationKind
OPERATION_STATE_UNSPECIFIED: OperationState
OPERATION_STATE_HELD: OperationState
OPERATION_STATE_QUEUED: OperationState
OPERATION_STATE_RUNNING: OperationState
OPERATION_STATE_SUCCEEDED: OperationState
OPERATION_STATE_FAILED: OperationState
OPERATION_STATE_CANCELLED: OperationState

class Operation(_message.Message):
    __slots__ = ("name", "kind", "state", "create_time", "start_time", "end_time", "error", "forward_backward", "optim_step", "weights_sync", "save_checkpoint", "load_checkpoint", "warnings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    OPTIM_STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SYNC_FIELD_NUMBER: _ClassVar[int]
    SAVE_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LOAD_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: OperationKind
    state: OperationState
    create_time: _timestamp_pb2.Timestamp
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    error: _errors_pb2.Error
    forward_backward: ForwardBackwardResult
    optim_step: OptimStepResult
    weights_sync: WeightsSyncResult
    save_checkpoint: SaveCheckpointResult
    load_checkpoint: LoadCheckpointResult
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[OperationKind, str]] = ..., state: _Optional[_Union[OperationState, str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.Error, _Mapping]] = ..., forward_backward: _Optional[_Union[ForwardBackwardResult, _Mapping]] = ..., optim_step: _Optional[_Union[OptimStepResult, _Mapping]] = ..., weights_sync: _Optional[_Union[WeightsSyncResult, _Mapping]] = ..., save_checkpoint: _Optional[_Union[SaveCheckpointResult, _Mapping]] = ..., load_checkpoint: _Optional[_Union[LoadCheckpointResult, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class ForwardBackwardResult(_message.Message):
    __slots__ = ("loss_fn_outputs", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LOSS_FN_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    loss_fn_outputs: _containers.RepeatedCompositeFieldContainer[LossFnOutput]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, loss_fn_outputs: _Optional[_Iterable[_Union[LossFnOutput, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class LossFnOutput(_message.Message):
    __slots__ = ("tensors",)
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _data_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_data_pb2.Tensor, _Mapping]] = ...) -> None: ...
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.MessageMap[str, _data_pb2.Tensor]
    def __init__(self, tensors: _Optional[_Mapping[str, _data_pb2.Tensor]] = ...) -> None: ...

class OptimStepResult(_message.Message):
    __slots__ = ("policy_version", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, policy_version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class WeightsSyncResult(_message.Message):
    __slots__ = ("snapshot", "policy_version", "is_pending")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_PENDING_FIELD_NUMBER: _ClassVar[int]
    snapshot: str
    policy_version: int
    is_pending: bool
    def __init__(self, snapshot: _Optional[str] = ..., policy_version: _Optional[int] = ..., is_pending: bool = ...) -> None: ...

class SaveCheckpointResult(_message.Message):
    __slots__ = ("path", "policy_version")
    PATH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    policy_version: int
    def __init__(self, path: _Optional[str] = ..., policy_version: _Optional[int] = ...) -> None: ...

class LoadCheckpointResult(_message.Message):
    __slots__ = ("path", "policy_version")
    PATH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    policy_version: int
    def __init__(self, path: _Optional[str] = ..., policy_version: _Optional[int] = ...) -> None: ...

class GetOperationRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class WaitOperationRequest(_message.Message):
    __slots__ = ("name", "timeout_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    timeout_s: float
    def __init__(self, name: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ListOperationsRequest(_message.Message):
    __slots__ = ("session", "page_size", "page_token")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session: str
    page_size: int
    page_token: str
    def __init__(self, session: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListOperationsResponse(_message.Message):
    __slots__ = ("operations", "next_page_token")
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    next_page_token: str
    def __init__(self, operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelOperationRequest(_message.Message):
    __slots__ = ("name", "cause")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    name: str
    cause: str
    def __init__(self, name: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...
