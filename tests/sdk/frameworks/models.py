"""Scripted model server on the loopback interface, with the three APIs that frameworks use.

A model answers with its turns, one after the other. A turn is a text, or a list of calls: pairs of
a tool's name and arguments, which are an object, or a text for tools without a schema. A turn may
be a function of the results that the framework sent so far.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Model:
    """Server that answers with the next turn. After the last turn it answers `done`."""

    def __init__(self, *turns):
        self.turns = list(turns)
        self.requests = []
        self.lock = threading.Lock()
        model = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                answer, kind = model.answer(self.path.split("?")[0], body)
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @property
    def results(self):
        """Results of all calls that the latest request contains, as texts."""
        return results_of(self.requests[-1])

    def answer(self, path, body):
        with self.lock:
            self.requests.append(body)
            turn = self.turns.pop(0) if self.turns else "done"
        turn = turn(results_of(body)) if callable(turn) else turn
        number = len(self.requests)
        if path.endswith("/messages"):
            answer = messages(number, turn)
        elif path.endswith("/responses"):
            answer = responses(number, turn)
        else:
            answer = completion(number, turn)
        if not body.get("stream"):
            return json.dumps(answer).encode(), "application/json"
        events = {"messages": message_events, "responses": response_events}.get(path.split("/")[-1], completion_events)
        lines = "".join(
            (f"event: {event['type']}\n" if "type" in event else "") + f"data: {json.dumps(event)}\n\n"
            for event in events(answer)
        )
        return (lines + "data: [DONE]\n\n" * ("choices" in answer)).encode(), "text/event-stream"


def text_of(content):
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [] if isinstance(part, dict))


def results_of(body):
    """Texts of the results of tools in a request."""
    items = body.get("messages") or body.get("input") or []
    found = []
    for item in items if isinstance(items, list) else []:
        if item.get("role") == "tool":
            found.append(text_of(item.get("content")))
        elif item.get("type") in ("function_call_output", "custom_tool_call_output"):
            found.append(text_of(item.get("output")))
        elif isinstance(item.get("content"), list):
            found += [text_of(part.get("content")) for part in item["content"] if part.get("type") == "tool_result"]
    return found


# ---- Answers
def messages(number, turn):
    blocks = [{"type": "text", "text": turn}]
    if not isinstance(turn, str):
        blocks = [
            {"type": "tool_use", "id": f"toolu_{number}_{n}", "name": name, "input": arguments}
            for n, (name, arguments) in enumerate(turn)
        ]
    return {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": "m", "content": blocks,
        "stop_reason": "end_turn" if isinstance(turn, str) else "tool_use", "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }


def responses(number, turn):
    text = {"type": "output_text", "text": turn, "annotations": []}
    items = [{"type": "message", "id": f"m_{number}", "role": "assistant", "status": "completed", "content": [text]}]
    if not isinstance(turn, str):
        items = [
            {"type": "function_call", "id": f"fc_{number}_{n}", "call_id": f"call_{number}_{n}", "name": name,
             "arguments": json.dumps(arguments), "status": "completed"}
            if isinstance(arguments, dict) else
            {"type": "custom_tool_call", "id": f"ct_{number}_{n}", "call_id": f"call_{number}_{n}", "name": name,
             "input": arguments, "status": "completed"}
            for n, (name, arguments) in enumerate(turn)
        ]
    usage = {"input_tokens": 1, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 1,
             "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 2}
    return {"id": f"resp_{number}", "object": "response", "created_at": 0, "model": "m", "status": "completed",
            "output": items, "usage": usage, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def completion(number, turn):
    message, reason = {"role": "assistant", "content": turn}, "stop"
    if not isinstance(turn, str):
        calls = [
            {"id": f"call_{number}_{n}", "type": "function",
             "function": {"name": name, "arguments": json.dumps(arguments)}}
            for n, (name, arguments) in enumerate(turn)
        ]
        message, reason = {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": f"c_{number}", "object": "chat.completion", "created": 0, "model": "m", "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}]}


# ---- The same answers as streams
def message_events(message):
    yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": start}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": 1}}
    yield {"type": "message_stop"}


def response_events(response):
    yield {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}
    for index, item in enumerate(response["output"]):
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": response}


def completion_events(completion):
    choice = completion["choices"][0]
    calls = [{"index": n, **call} for n, call in enumerate(choice["message"].get("tool_calls", []))]
    delta = {**choice["message"], "tool_calls": calls} if calls else choice["message"]
    chunk = {**completion, "object": "chat.completion.chunk"}
    usage = chunk.pop("usage")
    yield {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}], "usage": usage}
