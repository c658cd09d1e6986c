// Commands and terminals.
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { after, before, test } from 'node:test'
import { AuthenticationError, CommandExitError, InvalidArgumentError, NotFoundError, TimeoutError } from 'e2b'
import { create, eventually, Collected, limit, unique } from './support.js'

let sandbox
after(() => sandbox?.kill())
before(async () => {
  sandbox = await create(null)
})

test('stdout, stderr and the exit code are reported', limit, async () => {
  const result = await sandbox.commands.run('echo out; echo err >&2')
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['out\n', 'err\n', 0])
  await assert.rejects(sandbox.commands.run('echo out; echo err >&2; exit 3'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.deepEqual([error.stdout, error.stderr, error.exitCode, error.error], ['out\n', 'err\n', 3, 'exit status 3'])
    return true
  })
})

test('output arrives while the command runs, and input while it waits', limit, async () => {
  const out = new Collected()
  const err = new Collected()
  const script = 'echo first; read -r line; echo second $line; echo third >&2'
  const handle = await sandbox.commands.run(script, { background: true, stdin: true, onStdout: out.push, onStderr: err.push })
  await out.waitForText('first\n')
  assert.ok(!out.text.includes('second'))
  await handle.sendStdin('answer\n')
  const result = await handle.wait()
  assert.equal(result.stdout, 'first\nsecond answer\n')
  assert.equal(out.text, result.stdout)
  assert.equal(err.text, 'third\n')
})

test('twenty megabytes arrive completely and in order', limit, async () => {
  const size = 20_000_000
  const result = await sandbox.commands.run(`seq 1 10000000 | head -c ${size} | tee >(sha256sum >&2)`)
  assert.equal(result.stdout.length, size)
  assert.equal(createHash('sha256').update(result.stdout).digest('hex'), result.stderr.split(' ')[0])
})

test('multibyte characters survive chunking', limit, async () => {
  const result = await sandbox.commands.run(`python3 -c "print('a' + '🦀é' * 100000, end='')"`)
  assert.ok(result.stdout === 'a' + '🦀é'.repeat(100_000))
})

test('commands have the requested user, directory and variables', limit, async () => {
  const script = 'id -un; pwd; echo $MARK'
  const result = await sandbox.commands.run(script, { user: 'root', cwd: '/usr/share', envs: { MARK: 'mark' } })
  assert.equal(result.stdout, 'root\n/usr/share\nmark\n')
  await assert.rejects(sandbox.commands.run('true', { user: 'nobodyknows' }), AuthenticationError)
  await assert.rejects(sandbox.commands.run('true', { cwd: '/no/such/directory' }), InvalidArgumentError)
})

test('a timed out command is killed', limit, async () => {
  const mark = unique()
  await assert.rejects(sandbox.commands.run(`exec -a ${mark} sleep 1000`, { timeoutMs: 1000 }), TimeoutError)
  await eventually(async () => !(await sandbox.commands.list()).some((process) => process.args.join().includes(mark)))
})

test('running commands are listed and can be killed', limit, async () => {
  const handle = await sandbox.commands.run('sleep 1000', { background: true, envs: { MARK: 'm' }, cwd: '/tmp' })
  const process = (await sandbox.commands.list()).find((process) => process.pid === handle.pid)
  assert.deepEqual([process.cmd, process.args.at(-1), process.envs.MARK, process.cwd], ['/bin/bash', 'sleep 1000', 'm', '/tmp'])
  const ended = assert.rejects(handle.wait(), (error) => error instanceof CommandExitError && /kill/.test(error.error))
  assert.equal(await handle.kill(), true)
  await ended
  assert.equal(await sandbox.commands.kill(handle.pid), false)
})

test('a command outlives its client and can be reconnected', limit, async () => {
  const script = 'while read -r line; do echo heard $line; done; echo over'
  const handle = await sandbox.commands.run(script, { background: true, stdin: true })
  await handle.disconnect()
  const out = new Collected()
  const again = await sandbox.commands.connect(handle.pid, { onStdout: out.push })
  await sandbox.commands.sendStdin(handle.pid, 'one\n')
  await out.waitForText('heard one\n')
  await sandbox.commands.closeStdin(handle.pid)
  assert.equal((await again.wait()).stdout, 'heard one\nover\n')
  await assert.rejects(sandbox.commands.connect(999_999), NotFoundError)
})

test('a large input arrives completely and in order', limit, async () => {
  const handle = await sandbox.commands.run('sha256sum', { background: true, stdin: true })
  const hash = createHash('sha256')
  for (let n = 0; n < 10; n++) {
    const piece = `${n}`.repeat(100_000)
    hash.update(piece)
    await handle.sendStdin(piece)
  }
  await handle.closeStdin()
  assert.equal((await handle.wait()).stdout.split(' ')[0], hash.digest('hex'))
})

test('concurrent commands receive only their own output', limit, async () => {
  const results = await Promise.all(Array.from({ length: 24 }, (_, n) => sandbox.commands.run(`sleep 0.0${n % 10}; echo ${n}`)))
  assert.deepEqual(results.map((result) => result.stdout), Array.from({ length: 24 }, (_, n) => `${n}\n`))
})

test('a shell on a terminal responds, is resized and exits', limit, async () => {
  const shown = new Collected()
  const terminal = await sandbox.pty.create({ cols: 100, rows: 30, onData: shown.push, envs: { MINE: 'm1' } })
  const type = (text) => sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode(text))
  await type(`bash -c 'trap exit INT; trap "echo resized to \\$(stty size)" WINCH; echo $MINE:$TERM:$(stty size); while :; do sleep 0.05; done'\n`)
  await shown.waitForText('m1:xterm-256color:30 100\r\n')
  await sandbox.pty.resize(terminal.pid, { cols: 120, rows: 40 })
  await shown.waitForText('resized to 40 120\r\n')
  await type('\x03')
  const again = new Collected()
  const second = await sandbox.pty.connect(terminal.pid, { onData: again.push })
  await type('echo to $((1 + 1))\n')
  await again.waitForText('to 2\r\n')
  await type('exit\n')
  assert.equal((await terminal.wait()).exitCode, 0)
  assert.equal((await second.wait()).exitCode, 0)
})

test('an interrupt reaches the program on a terminal, and a killed terminal no longer exists', limit, async () => {
  const shown = new Collected()
  const terminal = await sandbox.pty.create({ cols: 80, rows: 24, onData: shown.push })
  const type = (text) => sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode(text))
  // The program prints the line itself, so that it owns the terminal at that time. The shell's prompt appears before the
  // shell hands over the terminal.
  await type(`sh -c 'echo rea""dy; exec sleep 1000'\n`)
  await shown.waitForText('ready\r\n')
  await type('\x03')
  await type('echo code $?\n')
  await shown.waitForText('code 130\r\n')
  const ended = assert.rejects(terminal.wait(), CommandExitError)
  assert.equal(await sandbox.pty.kill(terminal.pid), true)
  await ended
  assert.equal(await sandbox.pty.kill(terminal.pid), false)
})
