"""Filter of requests: a call beyond its caller's budget or with a request that does not parse is refused; bytes are counted.

For a request that does not parse gRPC would answer "unexpected" and log a traceback, so that any stranger could fill our disk.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from dilocox.protocol.errors import RemoteError
from dilocox.transport.callers import Callers
from dilocox.transport.connection_limits import ConnectionLimits, endpoint_of
from dilocox.transport.traffic import Traffic

__all__ = ["WellFormed"]

Context = grpc.aio.ServicerContext[Any, Any]
Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
Account = Callable[[int], None]
"""Called with the size of each request, in bytes."""


class WellFormed(grpc.aio.ServerInterceptor):
    """Passes calls within the budget of their caller on to their handlers, with requests that parsed."""

    def __init__(self, traffic: Traffic, callers: Callers | None, connections: ConnectionLimits) -> None:
        """`callers`: verifies who calls; None: every caller is unknown."""
        self._traffic, self._callers, self._connections = traffic, callers, connections

    async def intercept_service(self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        path = handler_call_details.method
        call = _Filter(self, self._traffic.counting("received", path, handler.request_deserializer))
        write = self._traffic.counting("sent", path, handler.response_serializer)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(call.parts(handler.stream_unary), None, write)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(call.one(handler.unary_stream), None, write)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(call.parts(handler.stream_stream), None, write)
        return grpc.unary_unary_rpc_method_handler(call.one(handler.unary_unary), None, write)

    async def admit(self, context: Context) -> Account:
        """Take the call from its caller's budget, and return what accounts for its bytes. Ends the call where none is left."""
        endpoint = endpoint_of(context.peer())
        if endpoint is None:
            return lambda size: None
        peer = self._callers.remembered(context) if self._callers is not None else ""
        seconds = self._connections.table.admit(endpoint, peer if peer and self._connections.is_known(peer) else "")
        if seconds is None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls: wait, and call less often")
        elif seconds:
            await asyncio.sleep(seconds)
        if not peer and self._is_known(context):  # within the budget a signature may be verified
            self._connections.table.trust(endpoint)
        return partial(self._connections.table.account, endpoint)

    def _is_known(self, context: Context) -> bool:
        """Verify the caller's credential, and return whether the run knows it."""
        try:
            peer = self._callers.peer(context) if self._callers is not None else ""
        except RemoteError:  # the handler ends the call
            return False
        return bool(peer) and self._connections.is_known(peer)


class _Filter:
    """Wraps the handler of one call."""

    def __init__(self, filter: WellFormed, parse: Callable[[bytes], Message]) -> None:
        self._filter, self._parse = filter, parse

    async def _parsed(self, raw: bytes, account: Account, context: Context) -> Message:
        account(len(raw))
        try:
            return self._parse(raw)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request does not parse")
            raise

    def one(self, behaviour: Any) -> Any:
        async def guarded(raw: bytes, context: Context) -> Any:
            account = await self._filter.admit(context)
            return await behaviour(await self._parsed(raw, account, context), context)

        async def yielding(raw: bytes, context: Context) -> AsyncIterator[Message]:
            account = await self._filter.admit(context)
            async for reply in behaviour(await self._parsed(raw, account, context), context):
                yield reply

        return yielding if inspect.isasyncgenfunction(behaviour) else guarded

    def parts(self, behaviour: Any) -> Any:
        async def parsed(requests: AsyncIterator[bytes], account: Account, context: Context) -> AsyncIterator[Message]:
            async for raw in requests:
                yield await self._parsed(raw, account, context)

        async def guarded(requests: AsyncIterator[bytes], context: Context) -> Any:
            account = await self._filter.admit(context)
            return await behaviour(parsed(requests, account, context), context)

        async def yielding(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Message]:
            account = await self._filter.admit(context)
            async with aclosing(behaviour(parsed(requests, account, context), context)) as replies:
                async for reply in replies:
                    yield reply

        return yielding if inspect.isasyncgenfunction(behaviour) else guarded
