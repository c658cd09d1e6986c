"""R and Java in the template `code-interpreter-r-java`, with e2b-code-interpreter."""

import pytest
from e2b_code_interpreter import Sandbox


@pytest.fixture(scope="module")
def sandbox():
    sandbox = Sandbox.create("code-interpreter-r-java", timeout=600)
    yield sandbox
    sandbox.kill()


def test_r_keeps_its_state_and_returns_results(sandbox):
    sandbox.run_code("x <- 13", language="r")
    execution = sandbox.run_code("x", language="r")
    assert execution.results[0].text.strip() == "[1] 13"
    printed = sandbox.run_code('print("hello"); message("to stderr")', language="r")
    assert "hello" in "".join(printed.logs.stdout) and "to stderr" in "".join(printed.logs.stderr)
    failed = sandbox.run_code('stop("broken")', language="r")
    assert "broken" in failed.error.value or "broken" in failed.error.traceback


def test_r_draws_charts(sandbox):
    execution = sandbox.run_code("library(ggplot2); ggplot(mtcars, aes(wt, mpg)) + geom_point()", language="r", timeout=120)
    assert any(result.png for result in execution.results)


def test_java_keeps_its_state_and_returns_results(sandbox):
    sandbox.run_code("int x = 13;", language="java")
    execution = sandbox.run_code("x", language="java")
    assert execution.results[0].text == "13"
    printed = sandbox.run_code('System.out.println("hello");', language="java")
    assert "hello" in "".join(printed.logs.stdout)
    failed = sandbox.run_code('throw new RuntimeException("broken");', language="java")
    assert "broken" in failed.error.value or "broken" in failed.error.traceback


def test_variables_of_one_execution_end_with_it(sandbox):
    for language, read in (("r", 'Sys.getenv("WORD")'), ("java", 'System.getProperty("WORD")')):
        with_variable = sandbox.run_code(read, language=language, envs={"WORD": 'a "quoted" word'})
        assert "quoted" in with_variable.results[0].text, language
        without = sandbox.run_code(read, language=language)
        assert not without.results or "quoted" not in (without.results[0].text or ""), language


def test_contexts_have_their_own_state(sandbox):
    for language, write, read in (("r", "y <- 7", "exists('y')"), ("java", "int y = 7;", "y")):
        context = sandbox.create_code_context(language=language)
        sandbox.run_code(write, context=context)
        elsewhere = sandbox.run_code(read, language=language)
        assert elsewhere.error or "FALSE" in elsewhere.results[0].text, language


def test_the_other_languages_still_work(sandbox):
    assert sandbox.run_code("1 + 1").text == "2"
    assert sandbox.run_code("1 + 1", language="js").text == "2"
