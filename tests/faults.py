"""Faults between a client and a real server, for the hook of `tests.proxy.Proxy`.

    with injected(server, [Fault("slow_down", method="PUT", times=3)]) as faults:
        ...

A fault strikes requests that match it, from the ``after``-th on, ``times`` times.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.proxy import Exchange, Hook

__all__ = ["FAULTS", "REFUSALS", "TRANSIENT", "Fault", "Faults", "injected"]

FOREVER = 1 << 30

Act = Callable[[Exchange, Hook, threading.Event], None]


def _refusal(status: int, code: str, **headers: str) -> Act:
    """What S3 and GCS answer in XML and JSON."""

    def act(exchange: Exchange, forward: Hook, released: threading.Event) -> None:
        extra = {name.replace("_", "-"): value for name, value in headers.items()}
        if exchange.path.startswith(("/storage/v1/", "/upload/", "/download/")):
            reason = {"errors": [{"reason": code}], "code": status, "message": f"{code}: told so"}
            body, kind = json.dumps({"error": reason}), "application/json"
        else:
            body = (
                f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told so</Message></Error>"
            )
            kind = "application/xml"
        exchange.answer(status, body.encode(), {"Content-Type": kind, **extra})

    return act


def _reset(exchange: Exchange, forward: Hook, released: threading.Event) -> None:
    exchange.drop()


def _reset_in_request(exchange: Exchange, forward: Hook, released: threading.Event) -> None:
    """Half of the body reaches the server."""
    length = int(exchange.headers.get("Content-Length") or 0)
    upstream = exchange._handler.proxy.connect()
    upstream.putrequest(exchange.method, exchange.path, skip_host=True, skip_accept_encoding=True)
    for name, value in exchange.headers.items():
        if name.lower() not in ("connection", "expect"):
            upstream.putheader(name, value)
    upstream.endheaders()
    if length:
        upstream.send(next(exchange.body(), b"")[: length // 2])
    upstream.close()
    exchange.drop()


def _lost_answer(exchange: Exchange, forward: Hook, released: threading.Event) -> None:
    """The server does it; nobody hears of it."""
    exchange.forward = exchange.send  # type: ignore[method-assign,assignment]
    forward(exchange)
    exchange.drop()


def _changing(relay: Callable[[Exchange, http.client.HTTPResponse], None]) -> Act:
    def act(exchange: Exchange, forward: Hook, released: threading.Event) -> None:
        exchange.forward = lambda: relay(exchange, exchange.send())  # type: ignore[method-assign]
        forward(exchange)

    return act


def _cut(exchange: Exchange, answer: http.client.HTTPResponse) -> None:
    """Fewer bytes than the head of the answer says; one that has none gets such a head."""
    length = int(answer.getheader("Content-Length") or 0)
    if length == 0:
        exchange.request.status = answer.status
        exchange._handler.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "connection"):
                exchange._handler.send_header(name, value)
        exchange._handler.send_header("Content-Length", "100")
        exchange._handler.end_headers()
        exchange.drop()
    else:
        exchange.relay(answer, limit=length // 2)
        exchange.drop()


def _flip(data: bytes) -> bytes:
    if not data:
        return data
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def _stall(exchange: Exchange, forward: Hook, released: threading.Event) -> None:
    """Neither answer nor end."""
    released.wait(600)
    exchange.drop()


def _stall_in_answer(exchange: Exchange, answer: http.client.HTTPResponse) -> None:
    _cut_head(exchange, answer)


def _cut_head(exchange: Exchange, answer: http.client.HTTPResponse) -> None:
    exchange.relay(answer, limit=max(int(answer.getheader("Content-Length") or 2) // 2, 1))
    exchange._handler.wfile.flush()


def _stalling_in_answer(exchange: Exchange, forward: Hook, released: threading.Event) -> None:
    _changing(_stall_in_answer)(exchange, forward, released)
    released.wait(600)
    exchange.drop()


TRANSIENT: dict[str, Act] = {
    "error_500": _refusal(500, "InternalError"),
    "slow_down": _refusal(503, "SlowDown"),
    "throttled": _refusal(429, "TooManyRequests", Retry_After="1"),
    "unavailable": _refusal(503, "ServiceUnavailable", Retry_After="1"),
    "request_timeout": _refusal(400, "RequestTimeout"),
    "reset": _reset,
    "reset_in_request": _reset_in_request,
    "lost_answer": _lost_answer,
    "cut_answer": _changing(_cut),
    "stall": _stall,
    "stall_in_answer": _stalling_in_answer,
}
"""What ends by itself."""

REFUSALS: dict[str, Act] = {
    "expired_token": _refusal(400, "ExpiredToken"),
    "expired_403": _refusal(403, "ExpiredToken"),
    "invalid_key": _refusal(403, "InvalidAccessKeyId"),
    "access_denied": _refusal(403, "AccessDenied"),
    "unauthorized": _refusal(401, "Unauthorized"),
    "full_507": _refusal(507, "InsufficientStorage"),
    "quota": _refusal(403, "QuotaExceeded"),
    "clock_skew": _refusal(403, "RequestTimeTooSkewed"),
}
"""What somebody has to do something about."""

FAULTS: dict[str, Act] = {
    **TRANSIENT,
    **REFUSALS,
    "wrong_byte": _changing(lambda exchange, answer: exchange.relay(answer, edit=_flip)),
}


@dataclass(slots=True)
class Fault:
    """One fault.

    Attributes
    ----------
    name : str
        Of `FAULTS`.
    after : int
        Requests that match and are let through before.
    times : int
        Requests that it strikes.
    method : str
        Only these; empty for all.
    part : str
        Of the path of requests that match.
    struck : int
        So many it struck.
    """

    name: str
    after: int = 0
    times: int = FOREVER
    method: str = ""
    part: str = ""
    seen: int = 0
    struck: int = 0

    def strikes(self, exchange: Exchange) -> bool:
        if self.method not in ("", exchange.method) or self.part not in unquote(exchange.path):
            return False
        self.seen += 1
        if self.after < self.seen <= self.after + self.times:
            self.struck += 1
            return True
        return False


@dataclass(slots=True)
class Faults:
    """A hook that lets `Fault` s strike, one per request."""

    forward: Hook
    faults: Sequence[Fault]
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, exchange: Exchange) -> None:
        with self.lock:
            struck = [fault for fault in self.faults if fault.strikes(exchange)]
        if struck:
            FAULTS[struck[0].name](exchange, self.forward, self.released)
        else:
            self.forward(exchange)

    @property
    def struck(self) -> int:
        return sum(fault.struck for fault in self.faults)


def _forward(exchange: Exchange) -> None:
    """By the exchange's own way, which a fault may have changed."""
    exchange.forward()


@contextmanager
def injected(server: Any, faults: Sequence[Fault]) -> Iterator[Faults]:
    """Put faults between a server of `tests.servers` and its clients."""
    before = server.proxy.hook
    forward = _forward if before is Exchange.forward else before
    hook = server.proxy.hook = Faults(forward, faults)
    try:
        yield hook
    finally:
        server.proxy.hook = before
        hook.released.set()
