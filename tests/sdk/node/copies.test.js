// Sandboxes are paused, resumed, snapshotted and forked.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Sandbox, SandboxNotFoundError, TimeoutError } from 'e2b'
import { create, eventually, Collected, limit, pages, unique } from './support.js'

// Program that counts lines of its input in memory.
const COUNTER = `exec python3 -uc 'n = 0
print("ready")
while True:
  input()
  n += 1
  print("count", n)'`

test('memory, processes and files survive a pause', limit, async (t) => {
  const sandbox = await create(t)
  const out = new Collected()
  const counter = await sandbox.commands.run(COUNTER, { background: true, stdin: true, onStdout: out.push, timeoutMs: 0 })
  const interrupted = assert.rejects(counter.wait(), TimeoutError)
  await out.waitForText('ready')
  await counter.sendStdin('\n')
  await out.waitForText('count 1\n')
  await sandbox.files.write('/dev/shm/file', 'in memory')
  assert.equal(await sandbox.pause(), true)
  await interrupted
  assert.equal(await sandbox.pause(), false)
  assert.equal((await sandbox.getInfo()).state, 'paused')
  assert.equal(await sandbox.isRunning(), false)
  await assert.rejects(sandbox.commands.run('true'), SandboxNotFoundError)
  await assert.rejects(sandbox.files.read('/etc/hostname'), TimeoutError)
  const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 100_000 })
  const resumed = new Collected()
  await again.commands.connect(counter.pid, { onStdout: resumed.push })
  await again.commands.sendStdin(counter.pid, '\n')
  await resumed.waitForText('count 2\n')
  assert.equal(await again.files.read('/dev/shm/file'), 'in memory')
  await again.commands.kill(counter.pid)
})

test('a timed out sandbox can be paused instead of killed, and a request resumes it', limit, async (t) => {
  const sandbox = await create(t, 'base', { timeoutMs: 1000, lifecycle: { onTimeout: 'pause', autoResume: true } })
  await eventually(async () => (await sandbox.getInfo()).state === 'paused')
  assert.deepEqual((await sandbox.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: true })
  await sandbox.files.write('/dev/shm/kept', 'kept')
  assert.equal(await sandbox.files.read('/dev/shm/kept'), 'kept')
})

test('sandboxes from a snapshot have its memory; the snapshot is listed and deleted', limit, async (t) => {
  const source = await create(t)
  await source.files.write('/dev/shm/note', 'before')
  const name = unique()
  const snapshot = await source.createSnapshot({ name })
  const second = await source.createSnapshot()
  await source.files.write('/dev/shm/note', 'after')
  const copy = await create(t, snapshot.snapshotId)
  assert.equal(await copy.files.read('/dev/shm/note'), 'before')
  const listed = await pages(source.listSnapshots({ limit: 1 }))
  assert.deepEqual(listed.map((page) => page.length), [1, 1])
  assert.deepEqual(new Set(listed.flat().map((item) => item.snapshotId)), new Set([snapshot.snapshotId, second.snapshotId]))
  const named = (await pages(Sandbox.listSnapshots({ name }))).flat()
  assert.deepEqual(named.map((item) => item.snapshotId), [snapshot.snapshotId])
  for (const { snapshotId } of [snapshot, second]) {
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(snapshotId), false)
  }
  await assert.rejects(Sandbox.create(snapshot.snapshotId), /404/)
})

test('forks have the memory of their parent and are independent', limit, async (t) => {
  const source = await create(t)
  await source.files.write('/dev/shm/note', 'shared')
  const forks = await source.fork({ count: 3, timeoutMs: 60_000 })
  t.after(() => Promise.all(forks.map((fork) => fork.kill())))
  assert.equal(new Set([source, ...forks].map((sandbox) => sandbox.sandboxId)).size, 4)
  for (const [number, fork] of forks.entries()) {
    assert.equal(await fork.files.read('/dev/shm/note'), 'shared')
    await fork.files.write('/dev/shm/note', `${number}`)
  }
  for (const [number, fork] of forks.entries()) assert.equal(await fork.files.read('/dev/shm/note'), `${number}`)
  assert.equal(await source.files.read('/dev/shm/note'), 'shared')
})
