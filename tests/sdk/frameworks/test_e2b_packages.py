"""smolagents, crewai-tools and langchain-e2b, unmodified."""

import e2b
from crewai import LLM, Agent, Crew, Task
from crewai_tools import E2BExecTool, E2BFileTool, E2BPythonTool
from deepagents import create_deep_agent
from langchain_anthropic import ChatAnthropic
from langchain_e2b import AsyncE2BSandbox, E2BSandbox
from smolagents import CodeAgent, OpenAIServerModel


def test_smolagents_executes_code_and_keeps_variables(model):
    server = model(
        "Thought: count\n<code>\nx = 6\nprint('x is', x)\n</code>",
        "Thought: answer\n<code>\nfinal_answer(x * 7)\n</code>",
    )
    chat = OpenAIServerModel("m", api_base=server.url, api_key="k")
    with CodeAgent(tools=[], model=chat, executor_type="e2b") as agent:
        assert agent.run("start") == 42
    assert "x is 6" in str(server.requests[1])


def test_the_tools_of_crewai_run_commands_code_and_files(model):
    with e2b.Sandbox.create(template="code-interpreter-v1", timeout=120) as sandbox:
        tools = [tool(sandbox_id=sandbox.sandbox_id) for tool in (E2BExecTool, E2BFileTool, E2BPythonTool)]
        names = [tool.name.lower().replace(" ", "_") for tool in tools]
        server = model(
            [(names[0], {"command": "echo made >made.txt; id -un"})],
            [(names[1], {"action": "read", "path": "/home/user/made.txt"})],
            [(names[2], {"code": "print(6 * 7)"})],
            "Thought: done\nFinal Answer: done",
        )
        llm = LLM(model="openai/m", base_url=server.url, api_key="k")
        agent = Agent(role="worker", goal="g", backstory="b", llm=llm, tools=tools)
        crew = Crew(agents=[agent], tasks=[Task(description="start", expected_output="done", agent=agent)])
        crew.kickoff()
    executed, read, computed = server.results
    assert "user" in executed and "made" in read and "42" in computed


def test_a_tool_of_crewai_kills_its_own_sandbox():
    assert E2BExecTool().run(command="echo alone")["stdout"] == "alone\n"


def test_langchain_e2b_runs_an_agent(model):
    server = model(
        [("write_file", {"file_path": "/home/user/a.txt", "content": "one\n"})],
        [("execute", {"command": "cat a.txt; exit 3"})],
        [("edit_file", {"file_path": "/home/user/a.txt", "old_string": "one", "new_string": "two"})],
        [("read_file", {"file_path": "/home/user/a.txt"})],
    )
    with e2b.Sandbox.create(timeout=120) as sandbox:
        chat = ChatAnthropic(model="m", base_url=server.url, api_key="k", max_retries=0)
        agent = create_deep_agent(chat, backend=E2BSandbox(sandbox=sandbox))
        agent.invoke({"messages": [("user", "start")]})
        assert sandbox.files.read("a.txt") == "two\n"
    assert "one\n" in server.results[1] and "3" in server.results[1]
    assert "two" in server.results[3]


async def test_langchain_e2b_runs_asynchronously():
    sandbox = await e2b.AsyncSandbox.create(timeout=120)
    try:
        backend = AsyncE2BSandbox(sandbox=sandbox)
        await backend.awrite("/home/user/a.txt", "one\n")
        assert (await backend.aexecute("cat a.txt")).output == "one\n"
    finally:
        await sandbox.kill()
