"""Terminals: an interactive shell."""

import pytest
from e2b import CommandExitException, PtySize


async def test_a_shell_on_a_terminal_responds_and_exits(sdk, sandbox):
    terminal = await sdk.terminal(sandbox, size=PtySize(rows=24, cols=80))
    await terminal.type("tty >/dev/null && echo it is a term''inal\n")
    await terminal.wait_for_output("it is a terminal\r\n")
    await terminal.type("exit\n")
    assert (await terminal.end()).exit_code == 0


async def test_a_terminal_has_the_requested_size_and_can_be_resized(sdk, sandbox):
    terminal = await sdk.terminal(sandbox, size=PtySize(rows=30, cols=100))
    await terminal.type("bash -c 'trap \"echo resized to \\$(stty size)\" WINCH; stty size; while :; do sleep 0.05; done'\n")
    await terminal.wait_for_output("\r30 100\r\n")
    await sdk(sandbox.pty.resize, terminal.pid, PtySize(rows=40, cols=120))
    await terminal.wait_for_output("resized to 40 120\r\n")
    await sdk(sandbox.pty.kill, terminal.pid)


async def test_an_interrupt_reaches_the_program_on_the_terminal(sdk, sandbox):
    terminal = await sdk.terminal(sandbox, size=PtySize(rows=24, cols=80))
    # The program prints the line itself, so that it owns the terminal at that time. The shell's
    # prompt appears before the shell hands over the terminal.
    await terminal.type("sh -c 'echo rea\"\"dy; exec sleep 1000'\n")
    await terminal.wait_for_output("ready\r\n")
    await terminal.type("\x03")
    await terminal.type("echo code $?\n")
    await terminal.wait_for_output("code 130\r\n")
    await sdk(sandbox.pty.kill, terminal.pid)


async def test_a_terminal_has_the_requested_user_directory_and_variables(sdk, sandbox):
    terminal = await sdk.terminal(sandbox, size=PtySize(rows=24, cols=80), user="root", cwd="/usr", envs={"MINE": "m1"})
    await terminal.type("echo $(id -un):$(pwd):$MINE:$TERM:$LANG\n")
    await terminal.wait_for_output("root:/usr:m1:xterm-256color:C.UTF-8\r\n")
    await sdk(sandbox.pty.kill, terminal.pid)


async def test_a_killed_terminal_no_longer_exists(sdk, sandbox):
    terminal = await sdk.terminal(sandbox, size=PtySize(rows=24, cols=80))
    assert terminal.pid in {process.pid for process in await sdk(sandbox.commands.list)}
    assert await sdk(sandbox.pty.kill, terminal.pid) is True
    with pytest.raises(CommandExitException):
        await terminal.end()
    assert await sdk(sandbox.pty.kill, terminal.pid) is False


async def test_a_terminal_can_be_disconnected_and_reconnected(sdk, sandbox):
    terminal = await sdk.terminal(sandbox, size=PtySize(rows=24, cols=80))
    await terminal.type("KEPT=remembered\n")
    again = await sdk.attach_terminal(sandbox, terminal.pid)
    await again.type("echo it is $KEPT\n")
    await again.wait_for_output("it is remembered\r\n")
    await sdk(sandbox.pty.kill, terminal.pid)


async def test_input_streamed_to_a_terminal_arrives_in_order(sdk, sandbox):
    terminal = await sdk.terminal(sandbox, size=PtySize(rows=24, cols=80))
    await sdk.stream_input(sandbox.pty, terminal.pid, [b"echo ", b"o''ne", b"two", "three\n"])
    await terminal.wait_for_output("onetwothree\r\n")
    await sdk(sandbox.pty.kill, terminal.pid)
