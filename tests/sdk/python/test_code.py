"""Code runs in contexts that preserve state."""

import asyncio
import base64
import re
import time

import pytest
from e2b import InvalidArgumentException, SandboxException, TimeoutException


async def test_the_last_expression_is_the_result_and_output_streams_are_separate(sdk, interpreter):
    execution = await sdk(
        interpreter.run_code, "import sys; print('out'); print('err', file=sys.stderr); {'answer': 6 * 7}"
    )
    assert execution.error is None
    assert "".join(execution.logs.stdout) == "out\n"
    assert "".join(execution.logs.stderr) == "err\n"
    assert execution.text == "{'answer': 42}"
    assert execution.results[0].is_main_result


async def test_definitions_persist_between_executions(sdk, interpreter, unique):
    await sdk(interpreter.run_code, f"import math\nname_{unique} = 20")
    first = await sdk(interpreter.run_code, f"name_{unique} += 1; math.floor(name_{unique})")
    assert first.text == "21"
    second = await sdk(interpreter.run_code, "await_me = __import__('asyncio').sleep(0, 'awaited'); await await_me")
    assert second.text == "awaited"
    assert second.execution_count == first.execution_count + 1


async def test_output_results_and_errors_are_streamed(sdk, interpreter):
    events = []
    await sdk(
        interpreter.run_code,
        "import sys, time\nprint('one', flush=True); time.sleep(0.7); print('two', file=sys.stderr); display('three'); 1/0",
        on_stdout=lambda message: events.append((message.line.strip(), time.monotonic())),
        on_stderr=lambda message: events.append((message.line.strip(), time.monotonic())),
        on_result=lambda result: events.append((result.text, time.monotonic())),
        on_error=lambda error: events.append((error.name, time.monotonic())),
    )
    assert [what for what, _ in events] == ["one", "two", "three", "ZeroDivisionError"]
    assert events[1][1] - events[0][1] > 0.3


async def test_an_error_has_name_value_and_traceback_and_does_not_end_the_context(sdk, interpreter):
    execution = await sdk(interpreter.run_code, "kept = 'kept'\ndef fails():\n    raise ValueError('broken on purpose')\nfails()")
    assert (execution.error.name, execution.error.value) == ("ValueError", "broken on purpose")
    traceback = re.sub(r"\x1b\[[0-9;]*m", "", execution.error.traceback)  # coloured, as in Jupyter
    assert "fails()" in traceback and "3     raise ValueError('broken on purpose')" in traceback
    assert execution.results == []
    assert (await sdk(interpreter.run_code, "kept")).text == "kept"
    assert (await sdk(interpreter.run_code, "this is no python")).error.name == "SyntaxError"


async def test_a_picture_is_returned_as_png_and_as_data(sdk, interpreter):
    execution = await sdk(
        interpreter.run_code,
        "import matplotlib.pyplot as plt\nplt.figure()\nplt.plot([1, 2, 3], [2, 4, 8], label='growth')\n"
        "plt.title('Doubling'); plt.xlabel('day'); plt.ylabel('mice'); plt.show()",
        timeout=60,
    )
    assert execution.error is None, execution.error
    pictures = [result for result in execution.results if result.png]
    assert len(pictures) == 1
    picture = base64.b64decode(pictures[0].png)
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 3000
    chart = pictures[0].chart
    assert (chart.type.value, chart.title, chart.x_label, chart.y_label) == ("line", "Doubling", "day", "mice")
    assert chart.elements[0].label == "growth"
    assert [tuple(map(float, point)) for point in chart.elements[0].points] == [(1, 2), (2, 4), (3, 8)]


async def test_a_table_is_returned_as_html_and_text(sdk, interpreter):
    execution = await sdk(interpreter.run_code, "import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})", timeout=60)
    result = execution.results[0]
    assert "<table" in result.html and "a  b" in result.text


async def test_a_value_is_returned_in_all_its_representations(sdk, interpreter):
    code = "from IPython.display import HTML, JSON, Latex, Markdown, SVG, Javascript\n" + "\n".join(
        f"display({shown})"
        for shown in ("HTML('<b>x</b>')", "JSON({'k': [1, None]})", "Latex('$x$')", "Markdown('*m*')", "SVG('<svg/>')", "Javascript('f()')")
    )
    html, data, latex, markdown, svg, script = (await sdk(interpreter.run_code, code)).results
    assert (html.html, data.json, latex.latex) == ("<b>x</b>", {"k": [1, None]}, "$x$")
    assert (markdown.markdown, svg.svg, script.javascript) == ("*m*", "<svg/>", "f()")
    assert not any(result.is_main_result for result in (html, data, latex, markdown, svg, script))


async def test_variables_of_one_execution_are_removed_afterwards(sdk, interpreter, unique):
    code = f"import os; os.environ.get('V_{unique}')"
    assert (await sdk(interpreter.run_code, code, envs={f"V_{unique}": "here"})).text == "here"
    assert (await sdk(interpreter.run_code, code)).text is None


# Each context is a kernel, whose start takes up to 15 s on gVisor on a busy host.
@pytest.mark.timeout(180)
async def test_contexts_are_independent(sdk, interpreter, unique):
    first = await sdk(interpreter.create_code_context)
    second = await sdk(interpreter.create_code_context, cwd="/tmp")
    await sdk(interpreter.run_code, f"mine_{unique} = 'first'", context=first)
    assert (await sdk(interpreter.run_code, f"mine_{unique}", context=first)).text == "first"
    assert (await sdk(interpreter.run_code, f"mine_{unique}", context=second)).error.name == "NameError"
    assert (await sdk(interpreter.run_code, f"mine_{unique}")).error.name == "NameError"
    assert (await sdk(interpreter.run_code, "import os; os.getcwd()", context=second)).text == "/tmp"
    assert (await sdk(interpreter.run_code, "import os; os.getcwd()")).text == "/home/user"

    listed = {context.id: context for context in await sdk(interpreter.list_code_contexts)}
    assert {first.id, second.id} <= listed.keys()
    assert (listed[second.id].language, listed[second.id].cwd) == ("python", "/tmp")

    await sdk(interpreter.restart_code_context, first)
    assert (await sdk(interpreter.run_code, f"mine_{unique}", context=first)).error.name == "NameError"
    for context in (first, second):
        await sdk(interpreter.remove_code_context, context)
    assert not {first.id, second.id} & {context.id for context in await sdk(interpreter.list_code_contexts)}
    with pytest.raises(SandboxException):
        await sdk(interpreter.run_code, "1", context=first)


@pytest.mark.timeout(180)
async def test_two_contexts_run_at_the_same_time(sdk, interpreter):
    contexts = [await sdk(interpreter.create_code_context) for _ in range(2)]
    # Each execution waits for the other's file: sequential executions would never end.
    meet = "import pathlib, time\npathlib.Path('/tmp/meet{0}').touch()\nwhile not pathlib.Path('/tmp/meet{1}').exists(): time.sleep(0.01)\n'met'"
    runs = [sdk(interpreter.run_code, meet.format(n, 1 - n), context=contexts[n], timeout=20) for n in range(2)]
    assert [execution.text for execution in await asyncio.gather(*runs)] == ["met", "met"]
    for context in contexts:
        await sdk(interpreter.remove_code_context, context)
    await sdk(interpreter.commands.run, "rm /tmp/meet*")


@pytest.mark.parametrize(
    ("language", "code", "then", "answer"),
    [
        ("bash", "X=shell; cd /tmp", "echo $X:$PWD", "shell:/tmp\n"),
        ("javascript", "let x = [1, 2, 3]", "console.log(x.map(n => n * 2).join())", "2,4,6\n"),
        ("typescript", "const t: number = 5", "console.log((t as number) + 1)", "6\n"),
    ],
)
async def test_other_languages_preserve_state(sdk, interpreter, language, code, then, answer):
    first = await sdk(interpreter.run_code, code, language=language, timeout=60)
    assert first.error is None, first.error
    second = await sdk(interpreter.run_code, then, language=language)
    assert second.error is None, second.error
    assert "".join(second.logs.stdout) == answer


async def test_errors_of_other_languages_are_errors(sdk, interpreter):
    failed = await sdk(interpreter.run_code, "throw new TypeError('not so')", language="javascript")
    assert (failed.error.name, failed.error.value) == ("TypeError", "not so")


async def test_an_unknown_language_is_rejected(sdk, interpreter):
    with pytest.raises(SandboxException, match="(?i)klingon"):
        await sdk(interpreter.run_code, "Qapla'", language="klingon")


async def test_a_context_together_with_a_language_is_rejected(sdk, interpreter):
    context = await sdk(interpreter.create_code_context)
    with pytest.raises(InvalidArgumentException):
        await sdk(interpreter.run_code, "1", language="python", context=context)
    await sdk(interpreter.remove_code_context, context)


async def test_timed_out_code_is_interrupted_and_its_context_continues(sdk, interpreter):
    context = await sdk(interpreter.create_code_context)
    await sdk(interpreter.run_code, "kept = 1", context=context)
    with pytest.raises(TimeoutException):
        await sdk(interpreter.run_code, "import time\nwhile True: time.sleep(0.05)", context=context, timeout=1)
    # Only the connection was closed. A loop that continued would block the context for ever.
    assert (await sdk(interpreter.run_code, "kept + 1", context=context, timeout=20)).text == "2"
    await sdk(interpreter.remove_code_context, context)


async def test_a_long_output_arrives_completely(sdk, interpreter):
    execution = await sdk(interpreter.run_code, "for n in range(20000): print(f'{n:06}')", timeout=60)
    assert "".join(execution.logs.stdout) == "".join(f"{n:06}\n" for n in range(20000))


async def test_memory_of_code_survives_pause_and_snapshot(sdk, unique):
    source = await sdk(sdk.Interpreter.create, timeout=120)
    try:
        await sdk(source.run_code, "number = 41; import math")
        await sdk(source.pause)
        await sdk(source.connect)
        assert (await sdk(source.run_code, "number += 1; number")).text == "42"
        snapshot = await sdk(source.create_snapshot)
        copy = await sdk(sdk.Interpreter.create, snapshot.snapshot_id, timeout=120)
        try:
            assert (await sdk(copy.run_code, "number += 1; math.sqrt(number - 7)")).text == "6.0"
            assert (await sdk(source.run_code, "number")).text == "42"
        finally:
            await sdk(copy.kill)
            await sdk(sdk.Sandbox.delete_snapshot, snapshot.snapshot_id)
    finally:
        await sdk(source.kill)


async def test_clones_of_one_interpreter_generate_different_random_numbers(sdk, interpreter):
    await sdk(interpreter.run_code, "import random, numpy, uuid")
    forks = await sdk(interpreter.fork, count=3)
    try:
        draw = "(random.random(), float(numpy.random.random()), str(uuid.uuid4()))"
        drawn = [(await sdk(fork.run_code, draw)).text for fork in forks]
        for position in range(3):
            assert len({eval(text)[position] for text in drawn}) == 3, drawn
    finally:
        for fork in forks:
            await sdk(fork.kill)


async def test_code_and_commands_share_files(sdk, interpreter, unique):
    await sdk(interpreter.files.write, f"/home/user/{unique}.csv", "a,b\n1,2\n")
    execution = await sdk(interpreter.run_code, f"open('{unique}.csv').read()")
    assert execution.text == "a,b\\n1,2\\n"
