"""Servers to talk to: a fake engine behind the real application, and the real thing."""

import asyncio
import contextlib
import sys
import threading
import time
import traceback

import httpx2
import pytest

from draftree.chat import Engine
from draftree.serve.server import bind, new_server
from draftree.serve.service import ServeOptions, Service
from draftree.serve.thread import State
from tests.needs import has_browser
from tests.serve import fake
from tests.tiny import tiny_path

PATIENCE_S = 600.0  # after which something hangs: a busy machine may take minutes
# Of every call that names no other; the library's own default is five seconds.
vars(httpx2.get.__kwdefaults__["timeout"]).update(
    dict.fromkeys(("connect", "read", "write", "pool"), PATIENCE_S)
)


class Running:
    """A server in a thread of this process, on a port of its own."""

    def __init__(self, open_engine, **options):
        self.states = []
        self.service = Service(
            open_engine, ServeOptions(**{"model_id": "fake", **options}), self.states.append
        )
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = new_server(self.service)
        self.server.main_loop = self._wait_for_exit
        self._thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def start(self):
        self.service.thread.start()
        self._thread.start()
        wait_for(lambda: self.service.state is not State.LOADING, 600)  # kernels may be compiled
        wait_for(lambda: self.server.started)
        return self

    async def _wait_for_exit(self):
        """As uvicorn does, but looking more often than ten times a second."""
        await self.server.on_tick(0)
        while not self.server.should_exit:
            await asyncio.sleep(0.005)

    def stop(self):
        self.server.should_exit = True
        self._thread.join(120)
        self.service.queue.close()
        self.service.thread.join(120)
        frame = sys._current_frames().get(self._thread.ident)
        assert not self._thread.is_alive(), "".join(traceback.format_stack(frame)[-6:])


def count_jobs(running):
    """Jobs that the engine's thread can see: a place is held some time before there is a job."""
    return running.service.queue.num_waiting + len(running.service.thread.turns.jobs)


def wait_for(condition, seconds=PATIENCE_S):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def shared():
    """One server for tests that leave it as it was."""
    engine = fake.Engine()
    running = Running(engine.open).start()
    yield engine, running
    running.stop()


class BriefEngine(Engine):
    """A real engine whose replies are a few tokens, whatever is asked for."""

    def chat(self, messages, *, max_tokens, **options):
        return super().chat(messages, max_tokens=min(max_tokens, 3), **options)

    def complete(self, prompt, *, max_tokens, **options):
        return super().complete(prompt, max_tokens=min(max_tokens, 3), **options)


@contextlib.contextmanager
def run_brief_server(**more):
    """A server with a real, tiny model."""
    options = {"max_ctx": 512, "draft": "none", **more}
    running = Running(lambda: BriefEngine.open(str(tiny_path("qwen3")), **options)).start()
    try:
        assert running.service.state is State.READY
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def brief():
    with run_brief_server() as running:
        yield running


@pytest.fixture
def engine(shared):
    shared[0].__init__()
    return shared[0]


@pytest.fixture
def start(engine):
    """Starts servers on the fake engine; all are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def run(open_engine=engine.open, **options):
            running = Running(open_engine, **options)
            stack.callback(running.stop)
            return running.start()

        yield run


@pytest.fixture
def client(shared, engine):
    import httpx2

    with httpx2.Client(base_url=shared[1].url, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def server(smollm2_path):
    """The real thing, for all tests that leave it as it was; keys: one and two."""
    from tests.serve.process import Process

    options = ("--api-key", "one", "--api-key", "two", "--alias", "gpt-4o-mini", "--no-any-model")
    server = Process(*options, "--temperature", "0")
    yield server
    assert server.stop() == 0, "".join(server.lines)


@pytest.fixture(scope="session", autouse=True)
def _no_certificates():
    """Nothing here is encrypted, and reading certificates takes longer than most of the tests;
    waits are long.
    """
    import ssl

    import httpx2

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    patience = httpx2._config.DEFAULT_TIMEOUT_CONFIG
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(patience, name, 120)  # a busy machine is not a failure
        patch.setattr(httpx2._transports.default, "create_ssl_context", lambda **_: context)
        yield


if has_browser():
    from tests.serve.browser import browser, pages, served, visit  # noqa: F401
