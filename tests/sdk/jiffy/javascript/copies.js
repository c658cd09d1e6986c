// Snapshots, rollbacks, checkpoints, forks and attempts.
import assert from 'node:assert/strict'
import * as e2b from 'e2b'
import { AllFailedError, Sandbox, Snapshot, errors } from '@jiffy/sandbox'
import { eventually, scenario, unique } from './harness.js'
import { children, create, shared } from './servers.js'

const NOTE = '/home/user/note'
// A server that keeps a number only in memory, and increments it for each client.
const KEEPER = `exec python3 -uc '
import socket
server, n = socket.create_server(("127.0.0.1", 7000)), 42
while True:
    with server.accept()[0] as client: client.sendall(str(n).encode())
    n += 1'`

async function keep(sandbox) {
  await sandbox.commands.run(KEEPER, { background: true, timeoutMs: 0 })
  // The first client.
  await sandbox.waitForPort(7000)
}

const remembered = async (sandbox) =>
  Number((await sandbox.commands.run('cat </dev/tcp/127.0.0.1/7000', { timeoutMs: 20_000 })).stdout)
const read = (sandbox) => sandbox.files.read(NOTE)
const write = (sandbox, text) => sandbox.files.write(NOTE, text)

async function snapshotsOf(sandbox) {
  const all = []
  for await (const snapshot of Snapshot.list({ sandboxId: sandbox.sandboxId })) all.push(snapshot)
  return all
}

scenario('a rollback restores files and memory', async (t) => {
  const sandbox = await create(t)
  await keep(sandbox)
  assert.equal(await remembered(sandbox), 43)
  await write(sandbox, 'before')
  const snapshot = await sandbox.snapshot()
  await write(sandbox, 'after')
  assert.equal(await remembered(sandbox), 44)
  assert.equal(await sandbox.rollback(snapshot), sandbox)
  assert.equal(await read(sandbox), 'before')
  assert.equal(await remembered(sandbox), 44)
  await snapshot.delete()
})

scenario('a rollback accepts an id and a name', async (t) => {
  const name = unique()
  const sandbox = await create(t)
  await write(sandbox, 'before')
  const snapshot = await sandbox.snapshot({ name })
  assert(snapshot.names[0].includes(name))
  for (const target of [snapshot.snapshotId, name]) {
    await write(sandbox, 'after')
    await sandbox.rollback(target)
    assert.equal(await read(sandbox), 'before')
  }
  await snapshot.delete()
})

scenario('a captured snapshot becomes ready', async (t) => {
  const sandbox = await create(t)
  const snapshot = await sandbox.snapshot({ ack: 'captured' })
  assert(['storing', 'ready'].includes(snapshot.status) && snapshot.sandboxId === sandbox.sandboxId)
  await eventually(async () => (await snapshot.refresh()).status === 'ready')
  assert((await snapshot.refresh()).bytes > 0)
  assert(await snapshot.delete())
})

scenario('snapshots are listed found and deleted', async (t) => {
  const name = unique()
  const sandbox = await create(t)
  const made = [await sandbox.snapshot(), await sandbox.createSnapshot({ name })]
  const ids = new Set((await snapshotsOf(sandbox)).map(({ snapshotId }) => snapshotId))
  assert.deepEqual(ids, new Set(made.map(({ snapshotId }) => snapshotId)))
  assert.equal((await Snapshot.get(name)).snapshotId, made[1].snapshotId)
  for (const snapshot of made) {
    assert.equal(await snapshot.delete(), true)
    assert.equal(await snapshot.delete(), false)
  }
  await assert.rejects(Snapshot.get(made[0].snapshotId), errors.SnapshotNotFoundError)
})

scenario('a snapshot is verified', async (t) => {
  const sandbox = await create(t)
  const snapshot = await sandbox.snapshot()
  if (sandbox.engine === 'gvisor') {
    // Snapshots of gVisor have no checksums.
    await assert.rejects(snapshot.verify(), errors.UnsupportedError)
    await snapshot.delete()
    return
  }
  const results = await snapshot.verify()
  assert(results.some(({ id }) => id === snapshot.snapshotId))
  assert(results.every(({ damaged }) => damaged.length === 0))
  await snapshot.delete()
})

scenario('a sandbox from a snapshot has its files', async (t) => {
  const sandbox = await create(t)
  await write(sandbox, 'copied')
  const snapshot = await sandbox.snapshot()
  const copy = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60_000 })
  t.after(() => copy.kill())
  assert.equal(copy.bootMode, 'snapshot')
  assert.equal(await read(copy), 'copied')
  await snapshot.delete()
})

scenario('a checkpoint keeps the changes of a successful block', async (t) => {
  const sandbox = await create(t)
  assert.equal(await sandbox.checkpoint(async () => (await write(sandbox, 'kept'), 7)), 7)
  assert.equal(await read(sandbox), 'kept')
  assert.deepEqual(await snapshotsOf(sandbox), [])
})

scenario('a checkpoint rolls back after an error', async (t) => {
  const sandbox = await create(t)
  await write(sandbox, 'before')
  const block = async () => {
    await write(sandbox, 'after')
    throw new RangeError('in the block')
  }
  await assert.rejects(sandbox.checkpoint(block), RangeError)
  assert.equal(await read(sandbox), 'before')
  assert.deepEqual(await snapshotsOf(sandbox), [])
})

scenario('checkpoints can be nested', async (t) => {
  const sandbox = await create(t)
  await sandbox.checkpoint(async () => {
    await write(sandbox, 'outer')
    const inner = async () => {
      await write(sandbox, 'inner')
      throw new RangeError('inner')
    }
    await assert.rejects(sandbox.checkpoint(inner), RangeError)
  })
  assert.equal(await read(sandbox), 'outer')
})

scenario('a checkpoint of a killed sandbox reports the failed rollback', async (t) => {
  const sandbox = await create(t)
  const block = async () => {
    await sandbox.kill()
    throw new RangeError('in the block')
  }
  await assert.rejects(sandbox.checkpoint(block), (error) =>
    error instanceof errors.SandboxNotFoundError && error.cause instanceof RangeError
  )
  for (const snapshot of await snapshotsOf(sandbox)) await snapshot.delete()
})

scenario('a cancelled checkpoint rolls back', async (t) => {
  const sandbox = await create(t)
  await write(sandbox, 'before')
  const controller = new AbortController()
  const block = async () => {
    await write(sandbox, 'after')
    setTimeout(() => controller.abort(), 10)
    await sandbox.commands.run('sleep 1002', { signal: controller.signal, timeoutMs: 0 })
  }
  await assert.rejects(sandbox.checkpoint(block), { name: 'AbortError' })
  assert.equal(await read(sandbox), 'before')
})

scenario('children of a fork have the memory of their parent', async (t) => {
  const sandbox = await create(t)
  await keep(sandbox)
  const forks = await sandbox.fork({ count: 2 })
  for (const fork of forks) {
    assert.equal(await remembered(fork), 43)
    assert.deepEqual([fork.bootMode, fork.forkedFrom], ['fork', sandbox.sandboxId])
    await fork.kill()
  }
})

scenario('promote removes the siblings', async (t) => {
  const sandbox = await create(t)
  const forks = await sandbox.fork({ count: 3 })
  assert.deepEqual(new Set(await forks[1].promote()), new Set([forks[0].sandboxId, forks[2].sandboxId]))
  assert.deepEqual(await children(sandbox), [forks[1].sandboxId])
  await forks[1].kill()
})

scenario('a number of forks out of range is rejected', async () => {
  const sandbox = await shared()
  for (const count of [0, 101, 1.5]) await assert.rejects(sandbox.fork({ count }), e2b.InvalidArgumentError)
})

const echo = (text) => async (fork) => {
  const { stdout } = await fork.commands.run(`echo ${text}`)
  await write(fork, text)
  return stdout.trim()
}
const fail = (fork) => fork.commands.run('exit 3')

scenario('try each promotes the first success and removes the others', async (t) => {
  const sandbox = await create(t)
  await write(sandbox, 'unchanged')
  const outcome = await sandbox.tryEach([fail, echo('b'), echo('c')])
  assert.deepEqual([outcome.index, outcome.result, outcome.error], [1, 'b', undefined])
  assert.deepEqual(await children(sandbox), [outcome.sandbox.sandboxId])
  assert.deepEqual([await read(outcome.sandbox), await read(sandbox)], ['b', 'unchanged'])
  await outcome.sandbox.kill()
})

scenario('try each keeps the selected outcome', async (t) => {
  const sandbox = await create(t)
  const functions = [echo('1'), echo('3'), echo('2')]
  const best = (all) => all.toSorted((a, b) => b.result.localeCompare(a.result))[0]
  const first = await sandbox.tryEach(functions, { keep: best })
  assert.deepEqual([first.index, first.result], [1, '3'])
  await first.sandbox.kill()
  const second = await sandbox.tryEach(functions, { keep: () => 2 })
  assert.deepEqual([second.index, second.result], [2, '2'])
  assert.deepEqual(await children(sandbox), [second.sandbox.sandboxId])
  await second.sandbox.kill()
})

scenario('try each without a success raises and leaves no fork', async (t) => {
  const sandbox = await create(t)
  await assert.rejects(sandbox.tryEach([fail, fail]), (error) => {
    assert(error instanceof AllFailedError && error.cause instanceof e2b.CommandExitError)
    assert.equal(error.outcomes.length, 2)
    return /2 of 2 functions failed/.test(error.message)
  })
  assert.deepEqual(await children(sandbox), [])
})

scenario('a failing selection leaves no fork', async (t) => {
  const sandbox = await create(t)
  const keep = () => {
    throw new RangeError('no choice')
  }
  await assert.rejects(sandbox.tryEach([echo('a'), echo('b')], { keep }), RangeError)
  assert.deepEqual(await children(sandbox), [])
})

scenario('a cancelled try each leaves no fork', async (t) => {
  const sandbox = await create(t)
  const controller = new AbortController()
  const endless = async (fork) => {
    await fork.commands.run('echo started')
    controller.abort()
    await fork.commands.run('sleep 1000', { timeoutMs: 0 })
  }
  await assert.rejects(sandbox.tryEach([endless, endless], { signal: controller.signal }), { name: 'AbortError' })
  assert.deepEqual(await children(sandbox), [])
})

scenario('a fork that is killed in between fails alone', async (t) => {
  const sandbox = await create(t)
  const ends = async (fork) => {
    await fork.kill()
    await fork.commands.run('echo late')
  }
  const outcome = await sandbox.tryEach([ends, echo('alive')])
  assert.equal(outcome.result, 'alive')
  assert.deepEqual(await children(sandbox), [outcome.sandbox.sandboxId])
  await outcome.sandbox.kill()
})

scenario('try each without functions is rejected', async () => {
  await assert.rejects((await shared()).tryEach([]), e2b.InvalidArgumentError)
})
