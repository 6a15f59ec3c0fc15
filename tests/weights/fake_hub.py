"""A model hub on this machine, as much of it as a download needs; it can refuse and break off."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FakeHub:
    """Files by `org/repo/name`; repositories in gated answer as gated ones do."""

    files: dict[str, bytes] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "right-token"
    cut_at: int | None = None  # break the connection at this byte, once
    stop_at: int | None = None  # never send more than this many bytes
    ranges: list[str] = field(default_factory=list)
    etags: dict[str, str] = field(default_factory=dict)  # by file, others have their SHA-256
    endpoint: str = ""

    def respond(self, handler: BaseHTTPRequestHandler, has_body: bool) -> None:
        repo, _, rest = handler.path.lstrip("/").partition("/resolve/")
        name = rest.partition("/")[2]  # after the revision
        known = {path.rsplit("/", 1)[0] for path in self.files} | self.gated
        authorised = handler.headers.get("Authorization") == f"Bearer {self.token}"
        if repo in self.gated and not authorised:
            return self._refuse(handler, 401, "GatedRepo")
        if repo not in known:
            return self._refuse(handler, 401, "RepoNotFound")
        data = self.files.get(f"{repo}/{name}")
        if data is None:
            return self._refuse(handler, 404, "EntryNotFound")
        start = 0
        if requested := handler.headers.get("Range"):
            self.ranges.append(requested)
            start = int(requested.removeprefix("bytes=").split("-")[0])
        handler.send_response(206 if requested else 200)
        etag = self.etags.get(f"{repo}/{name}", hashlib.sha256(data).hexdigest())
        handler.send_header("ETag", f'"{etag}"')
        handler.send_header("X-Repo-Commit", "0" * 40)
        handler.send_header("Content-Length", str(len(data) - start))
        if requested:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.end_headers()
        if has_body:
            stop, self.cut_at = self.stop_at or self.cut_at or len(data), None
            handler.wfile.write(data[start:stop])
            handler.close_connection = True

    @staticmethod
    def _refuse(handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
        handler.send_response(status)
        handler.send_header("X-Error-Code", code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            hub.respond(self, has_body=False)

        def do_GET(self) -> None:
            hub.respond(self, has_body=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
