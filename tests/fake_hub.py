"""A model hub on this machine: the requests that a download makes, with faults on demand.

Large files are answered with a redirect to a second server of another origin, as the public hub does.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/model"
PIECE = 1 << 16


def git_sha1(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Request:
    server: str
    path: str
    first_byte: int
    authorization: str | None
    sent: int = 0


@dataclass
class FakeHub:
    files: dict[str, bytes]
    repo: str = REPO
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str | None = None
    served: dict[str, bytes] = field(default_factory=dict)
    """What is sent instead of a file's content."""
    drops: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """For each file, the connections that end after so many bytes: by 'close' or by 'reset'."""
    bytes_per_second: float = 0.0
    ignores_ranges: bool = False
    down: bool = False
    requests: list[Request] = field(default_factory=list)
    endpoint: str = ""
    cdn: str = ""

    def is_large(self, name):
        return name.endswith((".safetensors", ".model"))

    def listing(self):
        siblings = []
        for name, content in self.files.items():
            entry = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
            if self.is_large(name):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        return siblings

    def of(self, name):
        """Requests in which content of this file was sent, or was to be."""
        server = "cdn" if self.is_large(name) else "hub"
        return [r for r in self.requests if r.server == server and r.path.endswith("/" + name)]

    def sent(self, name):
        return sum(request.sent for request in self.of(name))


@contextmanager
def running(hub):
    servers = [_server(hub, "hub"), _server(hub, "cdn")]
    hub.endpoint, hub.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


def _server(hub, kind):
    class Handler(_Handler):
        pass

    Handler.hub, Handler.kind = hub, kind
    return _Server(("127.0.0.1", 0), Handler)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass  # A client that goes away is what is tested.


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(found[1]) if found and not hub.ignores_ranges else 0
        request = Request(self.kind, path, first, self.headers.get("Authorization"))
        hub.requests.append(request)
        if hub.down:
            self._answer(503, b"")
        elif self.kind == "cdn":
            self._send(path.rsplit("/", 1)[1], request)
        elif self._may_read(request):
            self._hub(path, request)

    def _may_read(self, request):
        hub = self.hub
        if hub.token is None or request.authorization == f"Bearer {hub.token}":
            return True
        if request.authorization is None:
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        else:
            self._answer(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        return False

    def _hub(self, path, request):
        hub = self.hub
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path)
        content = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path)
        if listing:
            repo, revision = listing.groups()
            assert parse_qs(urlsplit(self.path).query).get("blobs", ["false"])[0].lower() == "true"
            if repo != hub.repo:
                self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif revision not in hub.revisions and revision not in hub.revisions.values():
                self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                body = {"id": repo, "sha": hub.revisions.get(revision, revision), "siblings": hub.listing()}
                self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        elif content and content[1] == hub.repo and content[2] in hub.revisions.values():
            name = content[3]
            if name not in hub.files:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            elif hub.is_large(name):
                self._answer(302, b"", {"Location": f"{hub.cdn}/blobs/{name}?Signature=secret"})
            else:
                self._send(name, request)
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _send(self, name, request):
        hub = self.hub
        content = hub.served.get(name, hub.files[name])
        drops = hub.drops.get(name)
        end, how = drops.pop(0) if drops else (len(content), None)
        body = memoryview(content)[request.first_byte :]
        self.send_response(206 if request.first_byte else 200)
        self.send_header("Content-Length", str(len(body)))
        if request.first_byte:
            self.send_header("Content-Range", f"bytes {request.first_byte}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        for start in range(0, min(len(body), end), PIECE):
            piece = body[start : min(start + PIECE, end)]
            try:
                self.wfile.write(piece)
            except OSError:
                self.close_connection = True
                return
            request.sent += len(piece)
            if hub.bytes_per_second:
                time.sleep(len(piece) / hub.bytes_per_second)
        if how == "reset":
            time.sleep(0.1)  # What was sent has to arrive before the reset discards it.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = how is not None

    def _answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
