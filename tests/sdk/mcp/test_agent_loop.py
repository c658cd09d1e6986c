"""An agent loop: a scripted model selects tools of the MCP server, and reads their results."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from conftest import call, serve
from test_http import connect

PROGRAM = "def median(values):\n    return sorted(values)[len(values) / 2]\n"
TESTS = "from program import median\nassert median([9, 1, 2]) == 2\nassert median([8, 1, 3, 2]) == 2.5\n"
RUN_TESTS = "cd /home/user && python3 tests.py"
FIXES = ["len(values) // 2", "0", "len(values) - 1"]


class Model:
    """A server with the protocol of OpenAI. Each turn is a function of the results so far; it
    returns calls of tools, or the text of the last answer."""

    def __init__(self, turns):
        turns = iter(turns)
        self.requests = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                model.requests.append(body)
                results = [json.loads(m["content"]) for m in body["messages"] if m["role"] == "tool"]
                answer = next(turns)(results)
                message = {"role": "assistant", "content": answer if isinstance(answer, str) else None}
                if not isinstance(answer, str):
                    message["tool_calls"] = [
                        {
                            "id": f"call-{len(results)}-{number}",
                            "type": "function",
                            "function": {"name": name, "arguments": json.dumps(arguments)},
                        }
                        for number, (name, arguments) in enumerate(answer)
                    ]
                content = json.dumps({"choices": [{"message": message}]}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/chat/completions"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def model():
    models = []

    def start(turns):
        models.append(Model(turns))
        return models[-1]

    yield start
    for started in models:
        started.close()


async def agent(client, model, task):
    """The loop of an agent that knows nothing of the server except its list of tools."""
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.input_schema}}
        for t in (await client.list_tools()).tools
    ]
    messages = [{"role": "user", "content": task}]
    async with httpx.AsyncClient(timeout=60) as http:
        while True:
            answer = await http.post(model.url, json={"model": "m", "messages": messages, "tools": tools})
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            if "tool_calls" not in message:
                return message["content"]
            for requested in message["tool_calls"]:
                function = requested["function"]
                result = await client.call_tool(function["name"], json.loads(function["arguments"]))
                value = {"error": result.content[0].text} if result.is_error else result.structured_content
                messages.append({"role": "tool", "tool_call_id": requested["id"], "content": json.dumps(value)})


def turns(sandboxes):
    """A repair: three fixes are tried in forks, a mistake is corrected, and the best fork is promoted."""

    def create(results):
        return [("sandbox_create", {"timeout_s": 300})]

    def write(results):
        sandboxes.append(results[-1]["sandbox"])
        at = {"sandbox": sandboxes[0]}
        return [
            ("file_write", at | {"path": "/home/user/program.py", "content": PROGRAM}),
            ("file_write", at | {"path": "/home/user/tests.py", "content": TESTS}),
            ("sandbox_exec", at | {"command": RUN_TESTS}),
        ]

    def fork(results):
        assert results[-1]["exit_code"] == 1 and "TypeError" in results[-1]["stderr"]
        return [("fork", {"sandbox": sandboxes[0], "count": len(FIXES)})]

    def edit_with_a_mistake(results):
        sandboxes.extend(results[-1]["sandboxes"])
        return [("file_edit", {"sandbox": sandboxes[1], "path": "program.py", "old": "absent", "new": ""})]

    def edit(results):
        assert "error" in results[-1], results[-1]
        path, old = "/home/user/program.py", "sorted(values)[len(values) / 2]"
        halves = "(sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) / 2"
        fixes = [f"sorted(values)[{fix}]" for fix in FIXES[:2]] + [halves]
        edits = [("file_edit", {"sandbox": s, "path": path, "old": old, "new": n}) for s, n in zip(sandboxes[1:], fixes)]
        return edits + [("sandbox_exec", {"sandbox": sandbox, "command": RUN_TESTS}) for sandbox in sandboxes[1:]]

    def promote(results):
        codes = [result["exit_code"] for result in results[-len(FIXES) :]]
        assert codes == [1, 1, 0], codes
        return [("promote", {"sandbox": sandboxes[3]})]

    return [create, write, fork, edit_with_a_mistake, edit, promote, lambda results: "repaired"]


@pytest.mark.parametrize("transport", [serve, connect])
async def test_an_agent_repairs_a_program_in_forks_and_promotes_the_best(model, transport):
    sandboxes = []
    scripted = model(turns(sandboxes))
    async with transport() as client:
        assert await agent(client, scripted, "repair program.py") == "repaired"
        assert len(scripted.requests[0]["tools"]) >= 18
        remaining = (await call(client, "sandbox_list"))["sandboxes"]
        remaining = {row["sandbox"] for row in remaining} & set(sandboxes)
        assert remaining == {sandboxes[0], sandboxes[3]}, "the other forks are removed"
        tested = await call(client, "sandbox_exec", sandbox=sandboxes[3], command=RUN_TESTS)
        assert tested["exit_code"] == 0, tested
