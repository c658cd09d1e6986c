// Sandboxes are created, found, listed, timed out and killed.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Sandbox, SandboxNotFoundError, TimeoutError } from 'e2b'
import { create, eventually, limit, pages, unique } from './support.js'

const MISSING = 'i0000000000000000000'

test('a created sandbox runs commands immediately', limit, async (t) => {
  const sandbox = await create(t)
  const { stdout } = await sandbox.commands.run('id -un; pwd; uname -r')
  const [user, directory, release] = stdout.split('\n')
  assert.deepEqual([user, directory], ['user', '/home/user'])
  assert.match(release, /-(jiffy|gvisor)$/)
  assert.equal(await sandbox.isRunning(), true)
})

test('information contains the requested settings', limit, async (t) => {
  const metadata = { purpose: 'information', ünï: 'c=ö&d' }
  const sandbox = await create(t, 'base', { metadata, timeoutMs: 200_000, envs: { MARK: 'm' } })
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.ok(!info.sandboxId.includes('-'))
  assert.equal(info.state, 'running')
  assert.deepEqual(info.metadata, metadata)
  assert.ok(Math.abs(info.endAt - info.startedAt - 200_000) < 5000)
  assert.ok(Math.abs(info.startedAt - Date.now()) < 10_000)
  assert.deepEqual(info.lifecycle, { onTimeout: 'kill', autoResume: false })
  assert.ok(info.cpuCount > 0 && info.memoryMB > 0)
  assert.equal((await sandbox.commands.run('echo $MARK')).stdout, 'm\n')
})

test('a sandbox can be reconnected by its id', limit, async (t) => {
  const sandbox = await create(t)
  await sandbox.files.write('/tmp/note', 'still here')
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal(await again.files.read('/tmp/note'), 'still here')
})

test('setTimeout counts from now and may shorten the timeout; connect never shortens it', limit, async (t) => {
  const sandbox = await create(t, 'base', { timeoutMs: 100_000 })
  for (const milliseconds of [1_000_000, 30_000]) {
    await sandbox.setTimeout(milliseconds)
    const { endAt } = await sandbox.getInfo()
    assert.ok(Math.abs(endAt - Date.now() - milliseconds) < 5000)
  }
  await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 5000 })
  assert.ok((await sandbox.getInfo()).endAt - Date.now() > 15_000)
  await sandbox.connect({ timeoutMs: 500_000 })
  assert.ok((await sandbox.getInfo()).endAt - Date.now() > 450_000)
})

test('a timed out sandbox no longer exists', limit, async (t) => {
  const sandbox = await create(t, 'base', { timeoutMs: 1000 })
  await eventually(async () => {
    try {
      await sandbox.getInfo()
    } catch (error) {
      return error instanceof SandboxNotFoundError
    }
  })
  assert.equal(await sandbox.isRunning(), false)
  await assert.rejects(sandbox.commands.run('true'), SandboxNotFoundError)
  await assert.rejects(sandbox.files.read('/etc/hostname'), TimeoutError)
})

test('a killed sandbox no longer exists and a second kill reports it', limit, async (t) => {
  const sandbox = await create(t)
  assert.equal(await sandbox.kill(), true)
  assert.equal(await sandbox.isRunning(), false)
  assert.equal(await sandbox.kill(), false)
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  await assert.rejects(sandbox.getInfo(), SandboxNotFoundError)
})

test('lists can be filtered and have pages in the requested order', limit, async (t) => {
  const run = unique()
  const awkward = 'a&b=c d/é+%'
  const made = []
  for (let n = 0; n < 5; n++) made.push((await create(t, 'base', { metadata: { run, awkward } })).sandboxId)
  for (const [order, expected] of [['asc', made], ['desc', made.toReversed()]]) {
    const listed = await pages(Sandbox.list({ query: { metadata: { run, awkward } }, limit: 2, order }))
    assert.deepEqual(listed.map((page) => page.length), [2, 2, 1])
    assert.deepEqual(listed.flat().map((info) => info.sandboxId), expected)
  }
  await Sandbox.pause(made[0])
  const paused = await pages(Sandbox.list({ query: { metadata: { run }, state: ['paused'] } }))
  assert.deepEqual(paused.flat().map((info) => info.sandboxId), [made[0]])
  assert.deepEqual((await pages(Sandbox.list({ query: { metadata: { run }, template: 'no-such-template' } }))).flat(), [])
})

test('an unknown sandbox is not found by any call', limit, async () => {
  for (const call of [
    () => Sandbox.getInfo(MISSING),
    () => Sandbox.connect(MISSING),
    () => Sandbox.setTimeout(MISSING, 1000),
    () => Sandbox.pause(MISSING),
    () => Sandbox.createSnapshot(MISSING),
    () => Sandbox.fork(MISSING),
    () => Sandbox.getMetrics(MISSING),
    () => Sandbox.updateNetwork(MISSING, { denyOut: ['0.0.0.0/0'] }),
  ]) await assert.rejects(call(), SandboxNotFoundError)
  assert.equal(await Sandbox.kill(MISSING), false)
  assert.equal(await Sandbox.deleteSnapshot(MISSING), false)
})

test('an unknown template is rejected with its name', limit, async () => {
  await assert.rejects(Sandbox.create('no-such-template'), /404.*no-such-template/)
})

test('a command in a killed sandbox ends with the reason', limit, async (t) => {
  const sandbox = await create(t)
  const handle = await sandbox.commands.run('sleep 1000', { background: true })
  const ended = assert.rejects(handle.wait(), TimeoutError)
  await sandbox.kill()
  await ended
})

test('metrics report size and use of the sandbox', limit, async (t) => {
  const sandbox = await create(t)
  const metrics = await eventually(async () => {
    const metrics = await sandbox.getMetrics()
    return metrics.length > 0 && metrics
  })
  const last = metrics.at(-1)
  assert.ok(last.memUsed > 0 && last.memUsed < last.memTotal)
  assert.ok(last.diskTotal > last.diskUsed)
  assert.ok(Math.abs(last.timestamp - Date.now()) < 30_000)
})
