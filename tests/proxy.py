"""A reverse proxy for tests: it records every request, and a hook may do what it likes with each.

One thread per connection, bodies are streamed. The client's ``Host`` is passed on, so that signatures
stay good::

    with Proxy("http://127.0.0.1:8333") as proxy:
        proxy.hook = lambda exchange: exchange.answer(503) if exchange.method == "PUT" else exchange.forward()
"""

from __future__ import annotations

import http.client
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

__all__ = ["Exchange", "Hook", "Proxy", "Request"]

_BLOCK = 256 << 10
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "proxy-connection", "te"}


@dataclass(slots=True)
class Request:
    """One HTTP request, as it was seen.

    Attributes
    ----------
    method : str
    path : str
        With the query, as the client sent it.
    range : str
        The ``Range`` header; empty without one.
    sent : int, bytes
        Body of the request.
    status : int
        Of the answer; 0 as long as there is none, and where the connection was dropped.
    nbytes : int
        Body of the answer, in bytes.
    """

    method: str
    path: str
    range: str = ""
    sent: int = 0
    status: int = 0
    nbytes: int = 0


class Exchange:
    """A request that waits for its answer. A hook calls `forward`, or the steps that it consists of.

    Attributes
    ----------
    method, path : str
    headers : mapping of str to str
    request : Request
        What is recorded of it.
    """

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler
        self._upstream: http.client.HTTPConnection | None = None
        self._body_left = True
        self.method = handler.command
        self.path = handler.path
        self.headers = handler.headers
        self.request = Request(
            self.method, self.path, self.headers.get("Range", ""), self._content_length()
        )

    def forward(self) -> None:
        """Let the server answer."""
        self.relay(self.send())

    def send(self) -> http.client.HTTPResponse:
        """Send the request to the server and wait for the head of its answer."""
        upstream = self._upstream = self._handler.proxy.connect()
        upstream.putrequest(self.method, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP_BY_HOP:
                upstream.putheader(name, value)
        chunked = self._is_chunked()
        if chunked:
            upstream.putheader("Transfer-Encoding", "chunked")
        upstream.putheader("Connection", "close")
        upstream.endheaders()
        for block in self.body():
            upstream.send(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
        if chunked:
            upstream.send(b"0\r\n\r\n")
        return upstream.getresponse()

    def body(self) -> Iterator[bytes]:
        """The request's body in blocks, once."""
        if not self._body_left:
            return
        self._body_left = False
        read = self._handler.rfile.read
        if self._is_chunked():
            while size := int(self._handler.rfile.readline().split(b";")[0], 16):
                self.request.sent += size
                yield read(size)
                self._handler.rfile.readline()
            self._handler.rfile.readline()
            return
        left = self._content_length()
        while left:
            block = read(min(left, _BLOCK))
            if not block:
                raise ConnectionError("the client ended in the middle of its request")
            left -= len(block)
            yield block

    def relay(
        self,
        answer: http.client.HTTPResponse,
        *,
        limit: int | None = None,
        edit: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Pass the server's answer on.

        With ``limit`` only so many bytes of its body, then hang up. ``edit`` changes bytes of the body, and
        keeps their number.
        """
        length = answer.getheader("Content-Length")
        bodiless = self.method == "HEAD" or answer.status in (204, 304)
        self.request.status = answer.status
        if length is not None and not bodiless:
            self.request.nbytes = int(length) if limit is None else min(limit, int(length))
        self._handler.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self._handler.send_header(name, value)
        chunked = length is None and not bodiless
        if chunked:
            self._handler.send_header("Transfer-Encoding", "chunked")
        self._handler.end_headers()
        if not bodiless:
            read = answer.read if edit is None else io.BytesIO(edit(answer.read())).read
            self._relay_body(read, limit, chunked=chunked)

    def answer(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer in the server's place."""
        for _ in self.body():
            pass
        self.request.status, self.request.nbytes = status, len(body)
        self._handler.send_response_only(status)
        for name, value in (headers or {}).items():
            self._handler.send_header(name, value)
        self._handler.send_header("Content-Length", str(len(body)))
        self._handler.end_headers()
        if self.method != "HEAD":
            self._handler.wfile.write(body)

    def drop(self) -> None:
        """Hang up without an answer."""
        self._handler.close_connection = True

    def close(self) -> None:
        """Let go of the server; what was not read of the request would be taken for the next one."""
        if self._upstream is not None:
            self._upstream.close()
        if self._body_left and (self._content_length() or self._is_chunked()):
            self._handler.close_connection = True

    # ------------------------------------------------------------------ internal

    def _relay_body(
        self, read: Callable[[int], bytes], limit: int | None, *, chunked: bool
    ) -> None:
        write = self._handler.wfile.write
        left = limit
        while block := read(_BLOCK if left is None else min(left, _BLOCK)):
            if chunked:
                self.request.nbytes += len(block)
            write(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
            left = None if left is None else left - len(block)
        if left is not None:
            self._handler.close_connection = True
        elif chunked:
            write(b"0\r\n\r\n")

    def _content_length(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def _is_chunked(self) -> bool:
        return "chunked" in (self.headers.get("Transfer-Encoding") or "").lower()


Hook = Callable[[Exchange], None]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 64 << 10
    disable_nagle_algorithm = True
    proxy: Proxy

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _exchange(self) -> None:
        exchange = Exchange(self)
        self.proxy.requests.append(exchange.request)
        try:
            self.proxy.hook(exchange)
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # either side hung up
        finally:
            exchange.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _exchange

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed in mid-request are what tests are about."""


class Proxy:
    """A proxy on a free port of the loopback interface, from construction to `stop`.

    Parameters
    ----------
    upstream : str, optional
        ``http://host:port`` of the server; may be set later.

    Attributes
    ----------
    endpoint : str
    requests : list of Request
        In the order in which they arrived.
    hook : callable
        Receives every `Exchange`, in the thread of its connection.
    """

    def __init__(self, upstream: str = "") -> None:
        self.upstream = upstream
        self.requests: list[Request] = []
        self.hook: Hook = Exchange.forward
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def connect(self) -> http.client.HTTPConnection:
        """A new connection to the server."""
        return http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=120)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
