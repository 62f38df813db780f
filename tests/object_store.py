"""A real S3 server on the loopback interface (moto's), and the faults that a test makes it answer with."""

from __future__ import annotations

import functools
import io
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiobotocore.httpsession import AIOHTTPSession
from botocore.loaders import JSONFileLoader
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from fsdptrain.run_folder.storage import object_path

Answer = tuple[str, str]  # status line, code in the body
Fault = Callable[[str, str], Answer | None]  # (method, path) → what to answer instead, or None
BUCKET = "bucket"
SLOW_DOWN = ("503 Slow Down", "SlowDown")
INTERNAL = ("500 Internal Server Error", "InternalError")
EXPIRED = ("400 Bad Request", "ExpiredToken")
FORBIDDEN = ("403 Forbidden", "AccessDenied")
REFUSALS = {  # the answer, and a pattern of what it is called
    "expired credentials": (EXPIRED, "the credentials(, which)? may have expired"),
    "no rights": (FORBIDDEN, "access is refused: check the credentials"),
    "500": (INTERNAL, "the store reports an error"),
    "503": (SLOW_DOWN, "the store reports an error"),
}


class SilentHandler(WSGIRequestHandler):
    """A handler that prints nothing."""

    def log(self, *_: Any, **__: Any) -> None: ...


@dataclass
class ObjectStore:
    """The server's address, the requests it got, and the fault that it has now."""

    url: str = ""
    fault: Fault | None = None
    received: bool = False  # whether a request has arrived whole before it is looked at
    requests: list[str] = field(default_factory=list)  # METHOD /path

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which libraries use this server."""
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    @contextmanager
    def failing(self, fault: Fault, received: bool = False) -> Iterator[None]:
        """Answer with a fault inside; `received`: only when a request has arrived whole, also if its sender freezes."""
        self.requests.clear()
        self.fault, self.received = fault, received
        try:
            yield
        finally:
            self.fault, self.received = None, False

    def times(self, count: int, answer: Answer, words: str = "") -> Any:
        """Answer the first `count` requests that contain `words` with an error."""
        left = [count]

        def fault(method: str, path: str) -> Answer | None:
            if words in f"{method} {path}" and left[0]:
                left[0] -= 1
                return answer
            return None

        return self.failing(fault)

    def slow(self, seconds: float, words: str = "") -> Any:
        """Answer requests that contain `words` late."""

        def fault(method: str, path: str) -> None:
            if words in f"{method} {path}":
                time.sleep(seconds)

        return self.failing(fault)


def serve_here() -> Iterator[ObjectStore]:
    """Run a server for this process and those it starts, which find it in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        # Every place has a client of its own, and each would read certificates and descriptions of the service again.
        certificates, load_file = ssl.create_default_context(), functools.cache(JSONFileLoader().load_file)
        patch.setattr(AIOHTTPSession, "_build_verify_context", lambda _: certificates)
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: load_file(path))
        for store in serve():
            for name, value in store.environment.items():
                patch.setenv(name, value)
            object_path(f"s3://{BUCKET}/x").fs.makedirs(BUCKET, exist_ok=True)  # of an earlier server of this process
            yield store


def serve() -> Iterator[ObjectStore]:
    """Run a server with an empty bucket, in a thread."""
    store, moto = ObjectStore(), DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start: Any) -> Any:
        store.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        if store.received and (length := int(environ.get("CONTENT_LENGTH") or 0)):
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        answer = store.fault(*store.requests[-1].split(" ", 1)) if store.fault else None
        if answer is None:
            return moto(environ, start)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(answer[0], [("Content-Type", "application/xml")])
        if environ["REQUEST_METHOD"] == "HEAD":
            return []
        return [f"<Error><Code>{answer[1]}</Code><Message>{answer[1]}: injected</Message></Error>".encode()]

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=SilentHandler)
    store.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield store
    server.shutdown()
