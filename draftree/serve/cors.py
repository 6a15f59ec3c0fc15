"""Which pages of other origins may connect: Starlette's rules, and 204 for every OPTIONS request.

In: a request. Out: headers for browsers, spelled as everyone writes them, since some programs look
for that spelling alone; OPTIONS never reaches the application.
"""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

_METHOD = "access-control-request-method"  # what a browser sends with it


class Cors(CORSMiddleware):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def spell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [(_spell(name), value) for name, value in message["headers"]]
            await send(message)

        is_asked = scope["type"] == "http" and scope["method"] == "OPTIONS"
        if is_asked and _METHOD not in Headers(scope=scope):
            await Response(status_code=204, headers=self.preflight_headers)(scope, receive, spell)
        else:
            await super().__call__(scope, receive, spell)

    def preflight_response(self, request_headers: Headers) -> Response:
        found = super().preflight_response(request_headers)
        if found.status_code != 200:
            return found
        del found.headers["content-length"], found.headers["content-type"]
        return Response(status_code=204, headers=found.headers)


def _spell(name: bytes) -> bytes:
    return name.title() if name.startswith(b"access-control-") else name
