"""The HTTP layer alone: TLS, proxies, redirects, pooled connections."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.errors import RemoteError
from coldsnap.ship.http import Body, Http
from coldsnap.ship.limits import Limits
from coldsnap.ship.secret import Secret
from coldsnap.testing.web import Lie, Reply, Request, Web

CERTIFICATE = Path(__file__).parent / "data" / "throw-away-server.pem"
LIMITS = Limits(attempts=1)


class Echo(Web):
    """Answers with what it was sent, or with its own path."""

    def handle(self, request: Request) -> Reply:
        return Reply(data=request.body() or request.path.encode())


@pytest.fixture
def secure() -> Iterator[Echo]:
    """A server over TLS with a certificate that nobody trusts by default."""
    web = Echo()
    web.certificate = CERTIFICATE
    with web:
        yield web


def trusting() -> Http:
    return Http(LIMITS, context=ssl.create_default_context(cafile=str(CERTIFICATE)))


def test_tls_with_a_trusted_certificate(secure: Echo) -> None:
    data = bytes(range(256)) * 5000
    with trusting() as http:
        for _ in range(2):
            with http.send("GET", f"{secure.url}/hello", what="say hello") as answer:
                assert answer.document(100) == b"/hello"
        body = Body(size=len(data), pieces=lambda: iter([data[:7], data[7:]]))
        with http.send("PUT", f"{secure.url}/x", what="take it", body=body) as answer:
            assert answer.document(1 << 22) == data


def test_an_untrusted_certificate_is_refused_and_sees_nothing(secure: Echo) -> None:
    with Http(LIMITS) as http, pytest.raises(RemoteError) as caught:
        http.send("GET", secure.url, what="say hello", headers={"Authorization": Secret("Bearer planted")})
    assert caught.value.reason == "unreachable"
    assert "certificate" in str(caught.value).lower()
    assert secure.asked == []


def test_a_redirect_out_of_tls_is_refused(secure: Echo) -> None:
    with Echo() as plain, trusting() as http:
        secure.lies.append(Lie(what="status", status=302, headers={"Location": f"{plain.url}/x"}))
        with pytest.raises(RemoteError) as caught:
            http.send("GET", secure.url, what="say hello")
        assert caught.value.reason == "unsafe_redirect"
        assert plain.asked == []


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "gopher://x/y", "http://x:99999/", "http://[", "http://x:y/", "/\u00e9", "/a b"]
)
def test_a_redirect_to_no_web_address_is_refused(location: str) -> None:
    with Echo() as web, Http(LIMITS) as http:
        web.lies.append(Lie(what="status", status=302, headers={"Location": location}))
        with pytest.raises(RemoteError) as caught:
            http.send("GET", web.url, what="say hello")
        assert caught.value.reason == "bad_answer"


def test_a_proxy_is_asked_in_the_servers_place() -> None:
    with Echo() as proxy, Http(LIMITS, proxy=lambda url: proxy.url if "nowhere" in url else None) as http:
        with http.send("GET", "http://nowhere.invalid/x", what="say hello") as answer:
            assert answer.document(100) == b"/x"
        assert ("host", "nowhere.invalid") in {(name, value) for _, name, value in proxy.seen_headers}
        with http.send("GET", f"{proxy.url}/y", what="say hello") as answer:
            assert answer.document(100) == b"/y"


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    with Echo() as web, Http(LIMITS) as http:
        with http.send("GET", f"{web.url}/1", what="say hello") as answer:
            answer.document(100)
        web.lies.append(Lie(what="close", times=1))
        with http.send("GET", f"{web.url}/2", what="say hello") as answer:
            assert answer.document(100) == b"/2"
        assert web.asked == ["GET /1", "GET /2", "GET /2"]


def test_a_document_has_a_limit_and_is_json_or_named() -> None:
    with Echo() as web, Http(LIMITS) as http:
        with http.send("GET", f"{web.url}/long", what="say") as answer, pytest.raises(RemoteError) as caught:
            answer.document(3)
        assert caught.value.reason == "wrong_length"
        with http.send("GET", f"{web.url}/no-json", what="say") as answer, pytest.raises(RemoteError) as caught:
            answer.json(100)
        assert caught.value.reason == "bad_answer"


def test_what_a_server_says_is_shown_without_what_was_sent() -> None:
    class Parrot(Web):
        def handle(self, request: Request) -> Reply:
            token = request.headers["authorization"]
            return Reply.of({"error": f"I do not like {token}, nor {token.split()[1]}; see http://x/y?sig=abc"}, 403)

    with Parrot() as web, Http(LIMITS) as http, pytest.raises(RemoteError) as caught:
        http.send("GET", web.url, what="say hello", headers={"Authorization": Secret("Bearer planted-token")})
    said = f"{caught.value} {caught.value.facts}"
    assert "I do not like" in said
    assert "planted-token" not in said
    assert "sig=abc" not in said
