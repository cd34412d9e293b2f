"""Answers replicas of the same cluster that ask for pages: reads the ask, lends the pages, and sends them.

Nothing is done for who does not have the cluster's token. What is read is bounded before it is read, what is sent by
the bytes of the setting `fetch_bytes` and in time, and few are answered at once, since pages that are lent cannot be
evicted meanwhile.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mlxr.cluster.page_wire import MAX_ASK_BYTES, Ask
from mlxr.cluster.peers import TOKEN, Peers
from mlxr.core.errors import EngineStopped
from mlxr.engine.page_exchange import PageExchange

logger = logging.getLogger(__name__)
MAX_LOANS = 4
GRACE_S = 1.0  # beyond the time that the asker waits


class Refused(Exception):  # an answer with a status, not an error of ours
    """The ask is answered with `status`."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


class Lender:
    """Lends the pages of `peers.exchange`."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._loans = peers, 0

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request for pages."""
        try:
            exchange = self._check(scope)
            self._loans += 1
            try:
                async with asyncio.timeout(self._peers.timeout_s + GRACE_S):
                    ask = await _read_ask(receive)
                    if ask.models != exchange.models:
                        raise Refused(409, "pages of another model")
                    await self._send_pages(exchange, ask, send)
            finally:
                self._loans -= 1
        except Refused as refused:
            await JSONResponse({"error": refused.reason}, refused.status)(scope, receive, send)
        except EngineStopped:
            await JSONResponse({"error": "stopping"}, 503)(scope, receive, send)
        except TimeoutError:  # the connection is closed in the middle
            logger.warning("a replica did not take its pages in time")

    def _check(self, scope: Scope) -> PageExchange:
        headers = dict(scope["headers"])
        if not self._peers.admits(headers.get(TOKEN, b"").decode("latin-1")):
            raise Refused(403, "not of this cluster")
        if scope["method"] != "POST":
            raise Refused(405, "POST what is wanted")
        if self._peers.exchange is None:
            raise Refused(409, "this replica shares no pages")
        if self._loans >= MAX_LOANS:
            raise Refused(503, "too many fetch pages at the moment")
        return self._peers.exchange

    async def _send_pages(self, exchange: PageExchange, ask: Ask, send: Send) -> None:
        max_bytes = min(ask.max_bytes, self._peers.max_bytes)
        async with exchange.lend(ask.names, ask.lack, max_bytes) as loan:
            headers = [(b"content-type", b"application/octet-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for lent in loan.pages:
                read = await exchange.read(lent)
                if read is None:
                    break
                header, payload = read
                await send({"type": "http.response.body", "body": header, "more_body": True})
                await send({"type": "http.response.body", "body": payload.tobytes(), "more_body": True})
                self._peers.counts.lent_pages.inc()
                self._peers.counts.lent_bytes.inc(payload.nbytes)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read_ask(receive: Receive) -> Ask:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "the ask broke off")
        body += message.get("body", b"")
        if len(body) > MAX_ASK_BYTES:
            raise Refused(413, f"an ask has at most {MAX_ASK_BYTES} bytes")
        if not message.get("more_body", False):
            break
    try:
        return Ask.parse(bytes(body))
    except ValueError as error:
        raise Refused(400, str(error)) from None
