"""Interface wasi:http/proxy around the handler."""

from componentize_py_types import Err, Ok
from wit_world import exports
from wit_world.imports import types
from wit_world.imports.streams import StreamError_Closed

from handler import handle

# Bytes of one read and of one write. A host accepts at least 4 KiB.
CHUNK = 4096


class IncomingHandler(exports.IncomingHandler):
    def handle(self, request: types.IncomingRequest, response_out: types.ResponseOutparam) -> None:
        kind = type(request.method()).__name__.removeprefix("Method_").upper()
        path = request.path_with_query() or "/"
        status, content_type, body = handle(kind, path, read(request))
        headers = types.Fields.from_list([("content-type", content_type.encode())])
        response = types.OutgoingResponse(headers)
        response.set_status_code(status)
        outgoing = response.body()
        types.ResponseOutparam.set(response_out, Ok(response))
        with outgoing.write() as stream:
            for start in range(0, len(body), CHUNK):
                stream.blocking_write_and_flush(body[start : start + CHUNK])
        types.OutgoingBody.finish(outgoing, None)


def read(request: types.IncomingRequest) -> bytes:
    parts = []
    with request.consume() as body, body.stream() as stream:
        while True:
            try:
                parts.append(stream.blocking_read(CHUNK))
            except Err as end:
                if isinstance(end.value, StreamError_Closed):
                    return b"".join(parts)
                raise
