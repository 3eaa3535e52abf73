"""Filter of requests: rejects calls beyond their caller's budget and requests that do not parse, and counts bytes.

For a request that does not parse gRPC would answer "unexpected" and log a traceback, so any unknown peer could fill the
disk.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from dilocox.protocol.errors import RemoteError
from dilocox.transport.limits.addresses import Endpoint, endpoint_of
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.limits.connection_limits import ConnectionLimits, ConnectionTable
from dilocox.transport.limits.traffic import Traffic

__all__ = ["WellFormed"]

Context = grpc.aio.ServicerContext[Any, Any]
Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class WellFormed(grpc.aio.ServerInterceptor):
    """Passes calls within the budget of their caller on to their handlers, with requests that parsed."""

    def __init__(self, traffic: Traffic, callers: CallerAuth | None, connections: ConnectionLimits) -> None:
        """`callers`: verifies who calls; None: every caller is unknown."""
        self._traffic, self._callers, self._connections = traffic, callers, connections

    async def intercept_service(self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        path = handler_call_details.method
        call = _Filter(self, self._traffic.counting("received", path, handler.request_deserializer))
        write = self._traffic.counting("sent", path, handler.response_serializer)
        # A handler of one request gets it as a stream too: its call is admitted by its headers, before its message is read.
        if handler.unary_unary is not None or handler.stream_unary is not None:
            behaviour = handler.stream_unary or call.only_request(handler.unary_unary)
            return grpc.stream_unary_rpc_method_handler(call.guarded(behaviour), None, write)
        behaviour = handler.stream_stream or call.only_request(handler.unary_stream)
        return grpc.stream_stream_rpc_method_handler(call.guarded(behaviour), None, write)

    async def admit(self, context: Context) -> "_Admitted":
        """Take the call from its caller's budget. Ends the call where none is left."""
        endpoint = endpoint_of(context.peer())
        if endpoint is None:
            return _Admitted()
        table = self._connections.table
        peer = self._callers.remembered(context) if self._callers is not None else ""
        seconds = table.admit(endpoint, peer if peer and self._connections.is_known(peer) else "")
        if seconds is None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls: wait, and call less often")
        call = _Admitted(table, endpoint)
        context.add_done_callback(cast("Any", call.end))  # after its reply was sent, which a caller that reads nothing delays
        if seconds:
            await asyncio.sleep(seconds)
        if not peer:  # within the budget a signature may be verified
            table.trust(endpoint, self._verified(context))
        return call

    def _verified(self, context: Context) -> str:
        """Verify the caller's credential, and return its peer id; empty where the run does not know it."""
        try:
            peer = self._callers.peer(context) if self._callers is not None else ""
        except RemoteError:  # the handler ends the call
            return ""
        return peer if peer and self._connections.is_known(peer) else ""


class _Admitted:
    """Call in progress, in the table of connections."""

    def __init__(self, table: ConnectionTable | None = None, endpoint: Endpoint | None = None) -> None:
        """Without a table nothing is counted: the caller has no TCP address."""
        self._table, self._endpoint, self._reply = table, endpoint, 0
        self._run(1)

    def request(self, size: int) -> None:
        """Account for the bytes of a request."""
        if self._table is not None and self._endpoint is not None:
            self._table.account(self._endpoint, size)

    def reply(self, size: int) -> None:
        """Count the bytes of a reply until the call ends."""
        self._reply += size
        self._run(0, size)

    def end(self, context: Any) -> None:
        self._run(-1, -self._reply)

    def _run(self, calls: int, reply: int = 0) -> None:
        if self._table is not None and self._endpoint is not None:
            self._table.run(self._endpoint, calls, reply)


class _Filter:
    """Wraps the handler of one call."""

    def __init__(self, filter: WellFormed, parse: Callable[[bytes], Message]) -> None:
        self._filter, self._parse = filter, parse

    def guarded(self, behaviour: Any) -> Any:
        """Return a handler of a stream of raw requests, which admits the call and parses them."""

        async def parsed(requests: AsyncIterator[bytes], call: _Admitted, context: Context) -> AsyncIterator[Message]:
            async for raw in requests:
                call.request(len(raw))
                try:
                    message = self._parse(raw)
                except DecodeError:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request does not parse")
                    raise
                yield message

        async def replying(requests: AsyncIterator[bytes], context: Context) -> Any:
            call = await self._filter.admit(context)
            reply = await behaviour(parsed(requests, call, context), context)
            if reply is not None:
                call.reply(reply.ByteSize())
            return reply

        async def yielding(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Message]:
            call = await self._filter.admit(context)
            async with aclosing(behaviour(parsed(requests, call, context), context)) as replies:
                async for reply in replies:
                    yield reply

        return yielding if inspect.isasyncgenfunction(behaviour) else replying

    def only_request(self, behaviour: Any) -> Any:
        """Return a handler of a stream of requests for one of a single request."""

        async def first(requests: AsyncIterator[Message], context: Context) -> Message:
            async for request in requests:
                return request
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
            raise AssertionError

        async def replying(requests: AsyncIterator[Message], context: Context) -> Any:
            return await behaviour(await first(requests, context), context)

        async def yielding(requests: AsyncIterator[Message], context: Context) -> AsyncIterator[Message]:
            async with aclosing(behaviour(await first(requests, context), context)) as replies:
                async for reply in replies:
                    yield reply

        return yielding if inspect.isasyncgenfunction(behaviour) else replying
