"""Scripted model servers on the loopback interface, with the APIs that the agents use.

A model executes a list of turns. Each turn is a list of shell commands, or a function that returns
one. The agent runs the commands. The conversation ends after the last turn.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Model:
    """Server that answers with the calls of the next turn."""

    def __init__(self, turns):
        self.turns = list(turns)
        self.results = []
        self.requests = []
        self.lock = threading.Lock()
        model = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words):
                pass

            def do_GET(self):
                self.reply(b'{"data": [], "models": []}', "application/json")

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                answer = model.answer(self.path, json.loads(body or b"{}"))
                if answer is None:
                    return self.reply(b"{}", "application/json")
                if isinstance(answer, dict):
                    return self.reply(json.dumps(answer).encode(), "application/json")
                text = "".join(
                    (f"event: {event['type']}\n" if "type" in event else "") + f"data: {json.dumps(event)}\n\n"
                    for event in answer
                )
                if self.path.endswith("/chat/completions"):
                    text += "data: [DONE]\n\n"
                self.reply(text.encode(), "text/event-stream")

            def reply(self, body, kind):
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def next_turn(self, has_tools):
        """The commands of the next turn. None for a request without tools, such as for a title."""
        with self.lock:
            if not has_tools:
                return None
            turn = self.turns.pop(0) if self.turns else []
            return turn() if callable(turn) else turn

    def answer(self, path, body):
        path = path.split("?")[0]
        self.requests.append((path, body))
        if path.endswith("/messages"):
            return anthropic(self, body)
        if path.endswith("/responses"):
            return responses(self, body)
        if path.endswith("/chat/completions"):
            return chat(self, body)
        if path.endswith("/count_tokens"):
            return {"input_tokens": 1}
        return None


def text_of(content):
    """Text of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [] if isinstance(part, dict))


def anthropic(model, body):
    """Messages API."""
    for message in body.get("messages", []):
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part.get("type") == "tool_result":
                model.results.append(text_of(part.get("content")))
    names = [tool.get("name") for tool in body.get("tools", [])]
    commands = model.next_turn("Bash" in names)
    blocks = [{"type": "text", "text": "done"}]
    if commands:
        blocks = [
            {"type": "tool_use", "id": f"toolu_{len(model.requests)}_{n}", "name": "Bash",
             "input": {"command": command, "description": "x"}}
            for n, command in enumerate(commands)
        ]
    reason = "tool_use" if commands else "end_turn"
    message = {
        "id": f"msg_{len(model.requests)}", "type": "message", "role": "assistant", "model": body.get("model", "m"),
        "content": [], "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    if not body.get("stream"):
        return {**message, "content": blocks, "stop_reason": reason}
    events = [{"type": "message_start", "message": message}]
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events.append({"type": "content_block_start", "index": index, "content_block": start})
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": reason, "stop_sequence": None}
    events.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": 1}})
    events.append({"type": "message_stop"})
    return events


def responses(model, body):
    """Responses API, as Codex uses it."""
    for item in body.get("input", []):
        if isinstance(item, dict) and item.get("type") in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            model.results.append(output if isinstance(output, str) else json.dumps(output))
    names = [tool.get("name") for tool in body.get("tools", [])]
    tool = next((name for name in ("exec_command", "shell_command", "shell") if name in names), None)
    commands = model.next_turn(tool is not None)
    number = len(model.requests)
    items = []
    for n, command in enumerate(commands or []):
        arguments = {
            "exec_command": {"cmd": command, "yield_time_ms": 30000},
            "shell_command": {"command": command},
            "shell": {"command": ["bash", "-lc", command]},
        }[tool]
        items.append({
            "type": "function_call", "id": f"fc_{number}_{n}", "call_id": f"call_{number}_{n}",
            "name": tool, "arguments": json.dumps(arguments), "status": "completed",
        })
    if not items:
        items = [{
            "type": "message", "id": f"m_{number}", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "done", "annotations": []}],
        }]
    response = {"id": f"resp_{number}", "object": "response", "created_at": 0, "model": "m", "status": "completed",
                "output": items}
    usage = {"input_tokens": 1, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 1,
             "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 2}
    events = [{"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}]
    for index, item in enumerate(items):
        events.append({"type": "response.output_item.added", "output_index": index, "item": item})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": {**response, "usage": usage}})
    return events


def chat(model, body):
    """Chat Completions API, as OpenCode uses it."""
    for message in body.get("messages", []):
        if message.get("role") == "tool":
            model.results.append(text_of(message.get("content")))
    names = [tool["function"]["name"] for tool in body.get("tools", [])]
    commands = model.next_turn("bash" in names)
    number = len(model.requests)
    chunk = {"id": f"c_{number}", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    if commands:
        calls = [
            {"index": n, "id": f"call_{number}_{n}", "type": "function",
             "function": {"name": "bash", "arguments": json.dumps({"command": command, "description": "x"})}}
            for n, command in enumerate(commands)
        ]
        delta, reason = {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
    else:
        delta, reason = {"role": "assistant", "content": "done"}, "stop"
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return [
        {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": usage},
    ]
