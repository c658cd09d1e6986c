// Creates, connections to daemons, and the calls of E2B.
import assert from 'node:assert/strict'
import { rmSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import * as e2b from 'e2b'
import { NoDaemonError, Sandbox, Snapshot, Volume, errors, isApiError } from '@jiffy/sandbox'
import * as jiffy from '@jiffy/sandbox'
import { scenario, unique } from './harness.js'
import {
  create,
  daemon,
  directory,
  installProgram,
  isBun,
  key,
  output,
  prepare,
  shared,
  url,
  withVariables,
} from './servers.js'

const UNKNOWN_KEY = `e2b_${'0'.repeat(40)}`

scenario('a sandbox is an instance of the class of e2b', async () => {
  assert(await shared() instanceof e2b.Sandbox)
  assert.equal(jiffy.CommandExitError, e2b.CommandExitError)
})

scenario('code for e2b works after its import is changed', async (t) => {
  const sandbox = await create(t, { envs: { GREETING: 'hello' }, metadata: { of: 'e2b' } })
  await sandbox.files.write('/home/user/note', 'text')
  assert.equal(await sandbox.files.read('/home/user/note'), 'text')
  assert.equal((await sandbox.commands.run('echo $GREETING')).stdout, 'hello\n')
  await assert.rejects(sandbox.commands.run('exit 3'), jiffy.CommandExitError)
  assert.equal(await sandbox.isRunning(), true)
  assert.equal(await Sandbox.kill(sandbox.sandboxId), true)
  assert.equal(await sandbox.kill(), false)
})

scenario('a create has a name a size and metadata', async (t) => {
  const name = unique()
  const sandbox = await create(t, { name, cpuCount: 1, memoryMB: 256, diskSizeMB: 2048, metadata: { a: 'b' } })
  const info = await sandbox.getInfo()
  assert.deepEqual([info.cpuCount, info.memoryMB, info.metadata, sandbox.name], [1, 256, { a: 'b' }, name])
})

scenario('a sandbox is found by its name', async (t) => {
  const name = unique()
  const sandbox = await create(t, { name })
  const found = await Sandbox.connect(name)
  assert.equal(found.sandboxId, sandbox.sandboxId)
  assert.equal((await found.commands.run('echo found')).stdout, 'found\n')
})

scenario('the origin of a guest is known', async (t) => {
  const sandbox = await create(t)
  assert(['cold', 'snapshot', 'warm-pool'].includes(sandbox.bootMode) && sandbox.bootMs > 0)
  const expected = process.env.JIFFY_ENGINE
  assert(sandbox.engine === expected || (expected === 'auto' && ['microvm', 'gvisor'].includes(sandbox.engine)))
  assert.equal(sandbox.forkedFrom, undefined)
})

async function isGone(sandbox) {
  await assert.rejects(sandbox.getInfo(), errors.SandboxNotFoundError)
}

scenario('a context kills its sandbox', async () => {
  // Node.js 20 has no `await using`.
  const sandbox = await Sandbox.create()
  await sandbox[Symbol.asyncDispose]()
  await isGone(sandbox)
})

scenario('a context kills its sandbox after an error', async () => {
  const sandbox = await Sandbox.create()
  await assert.rejects(async () => {
    try {
      throw new RangeError('in the block')
    } finally {
      await sandbox[Symbol.asyncDispose]()
    }
  }, RangeError)
  await isGone(sandbox)
})

scenario('information and timeout are those of e2b', async (t) => {
  const sandbox = await create(t, { timeoutMs: 100_000 })
  await sandbox.setTimeout(500_000)
  const info = await Sandbox.getInfo(sandbox.sandboxId)
  const seconds = (info.endAt.getTime() - info.startedAt.getTime()) / 1000
  assert(info.state === 'running' && seconds > 490 && seconds < 600)
  assert(Array.isArray(await sandbox.getMetrics()))
})

scenario('lists have pages', async (t) => {
  const word = unique()
  const made = []
  for (let i = 0; i < 3; i += 1) made.push((await create(t, { metadata: { list: word } })).sandboxId)
  const paginator = Sandbox.list({ query: { metadata: { list: word } }, limit: 2 })
  const pages = []
  while (paginator.hasNext) pages.push((await paginator.nextItems()).map(({ sandboxId }) => sandboxId))
  assert.deepEqual(pages.map((page) => page.length), [2, 1])
  assert.deepEqual(new Set(pages.flat()), new Set(made))
})

scenario('a repeated create with one key returns one sandbox', async (t) => {
  const idempotencyKey = unique()
  const made = [await create(t, { idempotencyKey }), await create(t, { idempotencyKey })]
  assert.equal(made[0].sandboxId, made[1].sandboxId)
})

scenario('a paused sandbox is resumed by connect', async (t) => {
  const sandbox = await create(t)
  await sandbox.files.write('/dev/shm/note', 'in memory')
  assert.equal(await sandbox.pause(), true)
  assert.equal(await sandbox.pause(), false)
  assert.equal(await sandbox.connect(), sandbox)
  assert.equal(await sandbox.files.read('/dev/shm/note'), 'in memory')
})

async function works(variables) {
  await withVariables(variables, async () => {
    const sandbox = await Sandbox.create()
    try {
      assert.equal((await sandbox.commands.run('echo yes')).stdout, 'yes\n')
    } finally {
      await sandbox.kill()
    }
  })
}

scenario(
  'variables of jiffy precede those of e2b',
  () => {
    const ofE2b = { E2B_API_URL: 'http://127.0.0.1:9', E2B_API_KEY: UNKNOWN_KEY }
    return works({ ...ofE2b, JIFFY_URL: `${url}/`, JIFFY_API_KEY: key })
  },
  { alone: true }
)

scenario('variables of e2b select the daemon', () => works({ E2B_API_URL: url, E2B_API_KEY: key }), { alone: true })

scenario(
  'files of a volume have the address of the daemon',
  () =>
    withVariables({ JIFFY_URL: url, JIFFY_API_KEY: key }, async () => {
      const volume = await Volume.create(unique())
      try {
        await volume.writeFile('/a/text', 'content', { force: true })
        const found = await Volume.connect(volume.volumeId)
        assert.equal(await found.readFile('/a/text'), 'content')
      } finally {
        assert.equal(await Volume.destroy(volume.volumeId), true)
      }
    }),
  { alone: true }
)

scenario(
  'volumes are stored listed and restored',
  async (t) => {
    const store = `file://${directory(t)}/bucket`
    const { url, key } = await daemon(t, directory(t), '--listen', '127.0.0.1:0', '--store', store)
    const connection = { apiUrl: url, apiKey: key }
    // Without variables, the files have the address of the connection.
    await withVariables({}, async () => {
      const volume = await Volume.create('first', connection)
      await volume.writeFile('/text', 'content')
      const snapshot = await volume.snapshot()
      assert.deepEqual([snapshot.volumeId, snapshot.name], [volume.volumeId, 'first'])
      assert.deepEqual(await Volume.snapshots(connection), [snapshot])
      await volume.writeFile('/text', 'changed')
      const restored = await Volume.restore(snapshot, 'second', connection)
      assert(restored instanceof Volume)
      assert.equal(await restored.readFile('/text'), 'content')
      assert.equal(await Volume.deleteSnapshot(snapshot, connection), true)
      assert.equal(await Volume.deleteSnapshot(snapshot.snapshotId, connection), false)
      await assert.rejects(Volume.restore(snapshot, 'third', connection), isApiError)
    })
  },
  { alone: true }
)

scenario(
  'the daemon of the host is found without variables',
  () => works({ JIFFY_HOME: process.env.JIFFY_SDK_HOME }),
  { alone: true }
)

scenario(
  'an error without a daemon names the missing package',
  async (t) => {
    const home = directory(t)
    const isExpected = (error) => error instanceof NoDaemonError && /npm install @jiffy\/host/.test(error.message)
    await withVariables({ JIFFY_HOME: home, PATH: home }, () =>
      assert.rejects(async () => Sandbox.create(), isExpected)
    )
  },
  { alone: true }
)

scenario(
  'the daemon of the host is started if none runs',
  async (t) => {
    const home = directory(t)
    prepare(home)
    const programs = path.join(home, 'bin')
    installProgram(programs)
    const variables = { JIFFY_HOME: home, PATH: `${programs}:${process.env.PATH}` }
    try {
      await works(variables)
    } finally {
      const program = path.join(process.env.JIFFY_BIN_DIR, 'jiffy')
      const env = { ...process.env, JIFFY_HOME: home }
      const { status, stderr } = await output(program, ['daemon', 'stop', '--kill-sandboxes'], env)
      assert.equal(status, 0, stderr)
    }
  },
  { alone: true }
)

const TLS = `
import { Sandbox } from '@jiffy/sandbox'
const sandbox = await Sandbox.create({ requestTimeoutMs: 20_000 })
console.log((await sandbox.commands.run('echo trusted')).stdout.trim())
await sandbox.commands.run('python3 -m http.server 8000 --bind 127.0.0.1', { background: true, timeoutMs: 0 })
await sandbox.waitForPort(8000)
await sandbox.kill()
process.exit(0)
`

scenario('the authority in a variable is trusted', async (t) => {
  const secure = await daemon(t, directory(t), '--listen', '127.0.0.1:0', '--tls', '--domain', 'sandboxes.test')
  // Programs in the directory of the packages find them.
  const program = path.join(process.cwd(), `tls-${unique()}.mjs`)
  writeFileSync(program, TLS)
  t.after(() => rmSync(program))
  const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith('E2B_')))
  Object.assign(env, { JIFFY_URL: secure.url, JIFFY_API_KEY: secure.key })
  const untrusting = await output(process.execPath, [program], env)
  assert(untrusting.status !== 0 && /UnreachableError/.test(untrusting.stderr), untrusting.stderr)
  const authority = path.join(secure.home, 'tls', 'authority.pem')
  // Versions of Node.js below 22.19 read authorities only at their start.
  Object.assign(env, { JIFFY_CA: authority, NODE_EXTRA_CA_CERTS: authority })
  const trusting = await output(process.execPath, [program], env)
  if (isBun) {
    // The TLS library of Bun does not support name constraints, which the daemon's authority has.
    assert.match(trusting.stderr, /unsupported name constraint type/)
    return
  }
  assert.equal(trusting.stdout, 'trusted\n', trusting.stderr)
})

scenario('sandboxes of another key are not found', async (t) => {
  const name = unique()
  const sandbox = await create(t, { name })
  const jiffyProgram = path.join(process.env.JIFFY_BIN_DIR, 'jiffy')
  const env = { ...process.env, JIFFY_HOME: process.env.JIFFY_SDK_HOME }
  const made = await output(jiffyProgram, ['key', 'create', '--name', name, '--scope', 'create'], env)
  const apiKey = /e2b_[0-9a-f]+/.exec(made.stdout)[0]
  for (const target of [sandbox.sandboxId, name]) {
    await assert.rejects(Sandbox.connect(target, { apiKey }), errors.SandboxNotFoundError)
  }
  assert.equal(await Sandbox.kill(sandbox.sandboxId, { apiKey }), false)
  await assert.rejects(Sandbox.connect(name, { apiKey: UNKNOWN_KEY }), (error) =>
    error instanceof errors.UnauthenticatedError && error instanceof e2b.AuthenticationError && isApiError(error)
  )
})

scenario('calls work after a restart of the daemon', async (t) => {
  const home = directory(t)
  const first = await daemon(t, home, '--listen', '127.0.0.1:0')
  const sandbox = await Sandbox.create({ apiUrl: first.url, apiKey: first.key })
  await sandbox.files.write('/home/user/note', 'kept')
  await first.stop()
  await daemon(t, home, '--listen', first.url.replace('http://', ''))
  assert.equal(await sandbox.files.read('/home/user/note'), 'kept')
  assert.equal((await sandbox.getInfo()).state, 'running')
  const snapshot = await sandbox.snapshot()
  await sandbox.rollback(snapshot)
  assert.equal((await sandbox.commands.run('echo again')).stdout, 'again\n')
  assert((await snapshot.delete()) && (await sandbox.kill()))
  assert(snapshot instanceof Snapshot)
})
