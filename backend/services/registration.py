"""Puts the servicers on a gRPC server, with standard health and reflection beside them."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from backend.services.catalog_service import CatalogService
from backend.services.checkpoint_service import CheckpointService
from backend.services.generator_service import GeneratorService
from backend.services.model_resource_service import ModelResourceService
from backend.services.operation_service import OperationService
from backend.services.session_service import SessionService
from backend.services.trainer_service import TrainerService
from together_post_training.v1 import (
    catalog_pb2,
    catalog_pb2_grpc,
    checkpoints_pb2,
    checkpoints_pb2_grpc,
    generator_pb2,
    generator_pb2_grpc,
    model_resources_pb2,
    model_resources_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

SERVICE_NAMES = tuple(
    service.full_name
    for file in (
        catalog_pb2,
        checkpoints_pb2,
        generator_pb2,
        model_resources_pb2,
        operations_pb2,
        sessions_pb2,
        trainer_pb2,
    )
    for service in file.DESCRIPTOR.services_by_name.values()
)


def add_services(
    server: grpc.aio.Server,
    catalog: CatalogService,
    checkpoints: CheckpointService,
    generator: GeneratorService,
    model_resources: ModelResourceService,
    operations: OperationService,
    sessions: SessionService,
    trainer: TrainerService,
) -> None:
    catalog_pb2_grpc.add_CatalogServiceServicer_to_server(catalog, server)
    checkpoints_pb2_grpc.add_CheckpointServiceServicer_to_server(checkpoints, server)
    generator_pb2_grpc.add_GeneratorServiceServicer_to_server(generator, server)
    model_resources_pb2_grpc.add_ModelResourceServiceServicer_to_server(model_resources, server)
    operations_pb2_grpc.add_OperationServiceServicer_to_server(operations, server)
    sessions_pb2_grpc.add_SessionServiceServicer_to_server(sessions, server)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server)


class Health:
    """grpc.health.v1: of the server ("") and of each service; not serving until told."""

    def __init__(self, server: grpc.aio.Server) -> None:
        # `health.aio` is set where the module is loaded.
        self._servicer = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        self._has_failed = False

    async def fail(self) -> None:
        """Not serving, whatever is said later."""
        self._has_failed = True
        await self.set_serving(False)

    async def set_serving(self, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        is_well = is_serving and not self._has_failed
        state = status.SERVING if is_well else status.NOT_SERVING
        for name in ("", *SERVICE_NAMES):
            await self._servicer.set(name, state)


def add_reflection(server: grpc.aio.Server) -> None:
    names = (*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
