"""Requests that do not parse are refused in a word; what comes and goes is counted.

gRPC would answer "unexpected" and log a traceback for each of them, so that any stranger could fill our disk.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from dilocox.transport.traffic import Traffic

__all__ = ["WellFormed"]

Context = grpc.aio.ServicerContext[Any, Any]
Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class WellFormed(grpc.aio.ServerInterceptor):
    """Handlers see only requests that parsed."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    async def intercept_service(self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        path = handler_call_details.method
        parse = self._traffic.counting("received", path, handler.request_deserializer)
        write = self._traffic.counting("sent", path, handler.response_serializer)

        def tried(raw: bytes) -> Message | None:
            try:
                return parse(raw)
            except DecodeError:
                return None

        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(_parts(handler.stream_unary), tried, write)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(_one(handler.unary_stream), tried, write)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(_parts(handler.stream_stream), tried, write)
        return grpc.unary_unary_rpc_method_handler(_one(handler.unary_unary), tried, write)


async def _refuse(context: Context) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request does not parse")


def _one(behaviour: Any) -> Any:
    async def guarded(request: Message | None, context: Context) -> Any:
        if request is None:
            await _refuse(context)
        return await behaviour(request, context)

    async def yielding(request: Message | None, context: Context) -> AsyncIterator[Message]:
        if request is None:
            await _refuse(context)
        async for reply in behaviour(request, context):
            yield reply

    return yielding if inspect.isasyncgenfunction(behaviour) else guarded


def _parts(behaviour: Any) -> Any:
    async def parsed(requests: AsyncIterator[Message | None], context: Context) -> AsyncIterator[Message]:
        async for request in requests:
            if request is None:
                await _refuse(context)
            else:
                yield request

    async def guarded(requests: AsyncIterator[Message | None], context: Context) -> Any:
        return await behaviour(parsed(requests, context), context)

    async def yielding(requests: AsyncIterator[Message | None], context: Context) -> AsyncIterator[Message]:
        async with aclosing(behaviour(parsed(requests, context), context)) as replies:
            async for reply in replies:
                yield reply

    return yielding if inspect.isasyncgenfunction(behaviour) else guarded
