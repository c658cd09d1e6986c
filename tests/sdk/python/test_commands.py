"""Commands run in the foreground and the background, with the requested user, directory and environment."""

import asyncio
import hashlib
import time

import pytest
from e2b import AuthenticationException, CommandExitException, InvalidArgumentException, NotFoundException, TimeoutException


async def test_stdout_stderr_and_exit_code_are_reported(sdk, sandbox):
    result = await sdk(sandbox.commands.run, "echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)
    with pytest.raises(CommandExitException) as failure:
        await sdk(sandbox.commands.run, "echo out; echo err >&2; exit 3")
    assert (failure.value.stdout, failure.value.stderr, failure.value.exit_code) == ("out\n", "err\n", 3)


async def test_output_arrives_while_the_command_runs(sdk, sandbox):
    command = await sdk.start(sandbox, "echo first; read -r line; echo second $line; echo third >&2", stdin=True)
    await command.wait_for_output("first\n")
    assert "second" not in command.stdout
    await sdk(command.handle.send_stdin, "answer\n")
    result = await command.end()
    assert result.stdout == command.stdout == "first\nsecond answer\n"
    assert result.stderr == command.stderr == "third\n"


async def test_twenty_megabytes_arrive_completely_and_in_order(sdk, sandbox):
    size = 20_000_000
    script = f"seq 1 10000000 | head -c {size} | tee >(sha256sum >&2)"
    result = await sdk(sandbox.commands.run, script, timeout=60)
    assert len(result.stdout) == size
    assert hashlib.sha256(result.stdout.encode()).hexdigest() == result.stderr.split()[0]


async def test_multibyte_characters_survive_chunking(sdk, sandbox):
    result = await sdk(sandbox.commands.run, "python3 -c \"print('a' + '🦀é' * 100000, end='')\"")
    assert result.stdout == "a" + "🦀é" * 100_000


async def test_commands_run_as_the_requested_user_in_the_requested_directory(sdk, sandbox):
    script = "id -un; pwd; echo $HOME"
    default = await sdk(sandbox.commands.run, script)
    assert default.stdout.split() == ["user", "/home/user", "/home/user"]
    root = await sdk(sandbox.commands.run, script, user="root")
    assert root.stdout.split() == ["root", "/home/user", "/root"]
    elsewhere = await sdk(sandbox.commands.run, script, cwd="/usr/share")
    assert elsewhere.stdout.split() == ["user", "/usr/share", "/home/user"]
    assert (await sdk(sandbox.commands.run, "sudo id -un")).stdout == "root\n"


async def test_an_unknown_user_or_directory_is_rejected(sdk, sandbox):
    with pytest.raises(AuthenticationException, match="nobodyknows"):
        await sdk(sandbox.commands.run, "true", user="nobodyknows")
    with pytest.raises(InvalidArgumentException, match="/no/such/directory"):
        await sdk(sandbox.commands.run, "true", cwd="/no/such/directory")


async def test_a_timed_out_command_is_killed(sdk, sandbox, unique, eventually):
    started = time.monotonic()
    with pytest.raises(TimeoutException):
        await sdk(sandbox.commands.run, f"exec -a {unique} sleep 1000", timeout=1)
    assert time.monotonic() - started < 10

    async def ended():
        running = await sdk(sandbox.commands.list)
        return not any(unique in " ".join(process.args) for process in running)

    await eventually(ended)
    with pytest.raises(CommandExitException):
        # The brackets prevent pgrep from finding the shell that runs it.
        await sdk(sandbox.commands.run, f"pgrep -f [{unique[0]}]{unique[1:]}")


async def test_a_command_without_a_timeout_outlives_the_default(sdk, sandbox):
    command = await sdk.start(sandbox, "read -r line; echo $line", stdin=True, timeout=0)
    await sdk(command.handle.send_stdin, "unhurried\n")
    assert (await command.end()).stdout == "unhurried\n"


async def test_running_commands_are_listed_and_can_be_killed(sdk, sandbox, unique):
    command = await sdk.start(sandbox, f"echo up; sleep 1000 # {unique}", envs={"MARK": unique}, cwd="/tmp")
    await command.wait_for_output("up")
    listed = {process.pid: process for process in await sdk(sandbox.commands.list)}
    process = listed[command.pid]
    assert process.cmd == "/bin/bash" and unique in process.args[-1]
    assert process.envs["MARK"] == unique and process.cwd == "/tmp"
    assert await sdk(sandbox.commands.kill, command.pid) is True
    with pytest.raises(CommandExitException) as killed:
        await command.end()
    # 137 is 128 plus the number of SIGKILL, as in a shell.
    assert killed.value.exit_code in (-1, 137)
    assert "kill" in (killed.value.error or "")
    assert await sdk(sandbox.commands.kill, command.pid) is False
    assert command.pid not in {process.pid for process in await sdk(sandbox.commands.list)}


async def test_a_signal_that_kills_a_command_is_reported(sdk, sandbox):
    with pytest.raises(CommandExitException) as ended:
        await sdk(sandbox.commands.run, "kill -TERM $$")
    assert ended.value.exit_code != 0
    assert "terminated" in ended.value.error


async def test_a_command_outlives_its_client_and_can_be_reconnected(sdk, sandbox):
    handle = await sdk(
        sandbox.commands.run, "while read -r line; do echo heard $line; done; echo over", background=True, stdin=True
    )
    await sdk(handle.disconnect)
    again = await sdk.attach(sandbox, handle.pid)
    assert again.pid == handle.pid
    await sdk(sandbox.commands.send_stdin, handle.pid, "one\n")
    await again.wait_for_output("heard one\n")
    await sdk(sandbox.commands.close_stdin, handle.pid)
    assert (await again.end()).stdout == "heard one\nover\n"


async def test_two_clients_receive_the_output_of_one_command(sdk, sandbox):
    first = await sdk.start(sandbox, "read -r line; echo $line", stdin=True)
    second = await sdk.attach(sandbox, first.pid)
    await sdk(first.handle.send_stdin, "to both\n")
    assert (await first.end()).stdout == (await second.end()).stdout == "to both\n"


async def test_connecting_to_an_unknown_process_is_not_found(sdk, sandbox):
    with pytest.raises(NotFoundException):
        await sdk(sandbox.commands.connect, 999_999)
    with pytest.raises(NotFoundException):
        await sdk(sandbox.commands.send_stdin, 999_999, "x")
    assert await sdk(sandbox.commands.kill, 999_999) is False


async def test_closing_the_input_ends_a_process_that_reads_it(sdk, sandbox):
    command = await sdk.start(sandbox, "sort", stdin=True)
    await sdk(command.handle.send_stdin, "b\na\n")
    await sdk(command.handle.close_stdin)
    assert (await command.end()).stdout == "a\nb\n"


async def test_a_command_without_input_reads_end_of_file(sdk, sandbox):
    assert (await sdk(sandbox.commands.run, "cat; echo done")).stdout == "done\n"


async def test_a_million_bytes_of_streamed_input_arrive_completely_and_in_order(sdk, sandbox):
    pieces = [f"{n:09}\n" * 100 for n in range(1000)]
    command = await sdk.start(sandbox, "sha256sum", stdin=True)
    await sdk.stream_input(sandbox.commands, command.pid, pieces)
    await sdk(command.handle.close_stdin)
    expected = hashlib.sha256("".join(pieces).encode()).hexdigest()
    assert (await command.end()).stdout.split()[0] == expected


async def test_binary_input_is_not_decoded_as_text(sdk, sandbox):
    command = await sdk.start(sandbox, "od -An -tx1", stdin=True)
    await sdk(command.handle.send_stdin, b"\x00\xff\xc3\n")
    await sdk(command.handle.close_stdin)
    assert (await command.end()).stdout.split() == ["00", "ff", "c3", "0a"]


async def test_concurrent_commands_receive_only_their_own_output(sdk, sandbox):
    async def one(number):
        result = await sdk(sandbox.commands.run, f"sleep 0.0{number % 10}; echo {number}; exit {number % 2}")
        return result.stdout

    answers = await asyncio.gather(*(one(n) for n in range(24)), return_exceptions=True)
    output = [a.stdout if isinstance(a, CommandExitException) else a for a in answers]
    assert output == [f"{n}\n" for n in range(24)]


async def test_a_background_child_does_not_delay_the_end_of_its_command(sdk, sandbox):
    started = time.monotonic()
    result = await sdk(sandbox.commands.run, "sleep 1000 >/dev/null 2>&1 </dev/null & echo $!")
    assert time.monotonic() - started < 10
    assert (await sdk(sandbox.commands.run, f"kill {result.stdout}")).exit_code == 0


async def test_output_can_be_streamed_without_being_collected(sdk, sandbox):
    output = []
    result = await sdk(sandbox.commands.run, "echo only heard", on_stdout=output.append, retain_output=False)
    assert (result.stdout, "".join(output)) == (None, "only heard\n")
