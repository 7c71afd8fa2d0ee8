"""ModelResourceService: base models in memory."""

from __future__ import annotations

import grpc.aio

from backend.resources.resources import Resources
from together_post_training.errors import Reason, fail
from together_post_training.v1 import model_resources_pb2 as pb
from together_post_training.v1 import model_resources_pb2_grpc

Context = grpc.aio.ServicerContext


class ModelResourceService(model_resources_pb2_grpc.ModelResourceServiceServicer):
    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    async def CreateModelResource(self, request: pb.CreateModelResourceRequest, context: Context):
        return (await self._resources.get(request.base_model)).message()

    async def GetModelResource(self, request: pb.GetModelResourceRequest, context: Context):
        return self._resources.by_id(request.id).message()

    async def ListModelResources(self, request: pb.ListModelResourcesRequest, context: Context):
        return pb.ListModelResourcesResponse(
            model_resources=[resource.message() for resource in self._resources.all_ready()]
        )

    async def ExtendModelResourceExpiry(
        self, request: pb.ExtendModelResourceExpiryRequest, context: Context
    ):
        raise fail(
            Reason.UNIMPLEMENTED,
            "ExtendModelResourceExpiry: model resources of this server do not expire; there is nothing to extend.",
        )

    async def StopModelResource(self, request: pb.StopModelResourceRequest, context: Context):
        raise fail(
            Reason.UNIMPLEMENTED,
            "StopModelResource: a model resource of this server lives as long as the server. Stop the server instead.",
        )
