"""The proxy that stands before test servers."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

import pytest

from tests.proxy import Exchange, Proxy, Request


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        body = self.headers["Host"].encode() + b" " + body
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_response(206 if self.headers["Range"] else 200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "12345")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    server.daemon_threads = True
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    with Proxy(f"http://127.0.0.1:{server.server_address[1]}") as found:
        yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=10)
    yield connection
    connection.close()


def test_passes_everything_on_and_records_it(
    proxy: Proxy, client: http.client.HTTPConnection
) -> None:
    host = urlsplit(proxy.endpoint).netloc.encode()
    for _ in range(2):  # over one connection
        client.request("PUT", "/a?b=1", b"x" * 1000)
        assert client.getresponse().read() == host + b" " + b"x" * 1000
    client.request("GET", "/c", headers={"Range": "bytes=1-5"})
    assert client.getresponse().read() == b"abcde"
    client.request("HEAD", "/c")
    answer = client.getresponse()
    assert (answer.read(), answer.getheader("Content-Length")) == (b"", "12345")
    client.request("PUT", "/d", iter([b"12", b"345"]), encode_chunked=True)
    assert client.getresponse().read() == host + b" 12345"
    put = Request("PUT", "/a?b=1", "", 1000, 200, 1001 + len(host))
    assert proxy.requests == [
        put,
        put,
        Request("GET", "/c", "bytes=1-5", 0, 206, 5),
        Request("HEAD", "/c", "", 0, 200, 0),
        Request("PUT", "/d", "", 5, 200, 6 + len(host)),
    ]


def test_a_hook_answers_itself(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    proxy.hook = lambda exchange: exchange.answer(503, b"slow down", {"X-Why": "test"})
    for method in ("PUT", "GET"):
        client.request(method, "/a", b"body" if method == "PUT" else None)
        answer = client.getresponse()
        assert (answer.status, answer.getheader("X-Why"), answer.read()) == (
            503,
            "test",
            b"slow down",
        )
    assert [r.status for r in proxy.requests] == [503, 503]


def test_a_hook_drops_and_truncates(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    proxy.hook = Exchange.drop
    client.request("PUT", "/a", b"body")
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        client.getresponse()
    client.close()
    proxy.hook = lambda exchange: exchange.relay(exchange.send(), limit=3)
    client.request("PUT", "/a", b"body")
    with pytest.raises(http.client.IncompleteRead):
        client.getresponse().read()
    assert [(r.status, r.nbytes) for r in proxy.requests] == [(0, 0), (200, 3)]
