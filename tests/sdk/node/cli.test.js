// E2B's command line, with the variables that its users set.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { after, before, test } from 'node:test'
import { promisify } from 'node:util'
import { apiKey, unique } from './support.js'

const program = path.resolve('node_modules/.bin/e2b')
const limit = { timeout: 120_000 }
let home
before(async () => (home = await mkdtemp(path.join(tmpdir(), 'jiffy-cli-'))))
after(() => rm(home, { recursive: true }))

// Returns the output of a command. The command line stores its state in the user's home directory.
async function e2b(...args) {
  const env = { ...process.env, HOME: home, E2B_ACCESS_TOKEN: apiKey, NO_COLOR: '1' }
  const child = promisify(execFile)(program, args, { cwd: home, env, timeout: 60_000 })
  child.child.stdin.end()
  return (await child).stdout.trim()
}

test('a template is built from a Dockerfile, listed, published, used and deleted', limit, async (t) => {
  const name = `cli-${unique()}`
  await writeFile(path.join(home, 'hello.txt'), 'hello\n')
  await writeFile(path.join(home, 'Dockerfile'), 'FROM e2bdev/base\nUSER root\nWORKDIR /srv\nCOPY hello.txt .\nRUN cat hello.txt hello.txt > twice.txt\nUSER user\n')
  t.after(() => e2b('template', 'delete', '--yes', name).catch(() => {})) // if it got no further
  const size = ['--cpu-count', '1', '--memory-mb', '512']
  await e2b('template', 'create', name, ...size, '--cmd', 'sleep infinity', '--ready-cmd', 'test -s /srv/twice.txt')
  const listed = JSON.parse(await e2b('template', 'list', '--format', 'json'))
  const found = listed.find((template) => template.names.includes(name))
  assert.deepEqual([found.cpuCount, found.memoryMB, found.buildStatus], [1, 512, 'ready'])
  await e2b('template', 'publish', '--yes', name)
  await e2b('template', 'unpublish', '--yes', name)

  const id = await e2b('sandbox', 'create', '--detach', name)
  assert.equal(await e2b('sandbox', 'exec', id, 'cat', '/srv/twice.txt'), 'hello\nhello')
  await e2b('sandbox', 'kill', id)
  await e2b('template', 'delete', '--yes', name)
  await assert.rejects(e2b('template', 'delete', '--yes', name), /404/)
})

test('sandboxes are created, listed, inspected, used, paused, resumed and killed', limit, async () => {
  const id = await e2b('sandbox', 'create', '--detach', 'base')
  try {
    const states = async (state) => JSON.parse(await e2b('sandbox', 'list', '--state', state, '--format', 'json')).map((s) => s.sandboxId)
    assert.ok((await states('running')).includes(id))
    assert.match(await e2b('sandbox', 'info', id), /State: running/)
    await assert.rejects(e2b('sandbox', 'exec', id, '--', 'sh', '-c', 'exit 3'), { code: 3 })
    await e2b('sandbox', 'metrics', id)
    await e2b('sandbox', 'logs', id)
    await e2b('sandbox', 'pause', id)
    assert.ok((await states('paused')).includes(id))
    await e2b('sandbox', 'resume', id)
    const snapshot = (await e2b('sandbox', 'snapshot', 'create', id)).match(/Created snapshot (\S+)/)[1]
    assert.match(await e2b('sandbox', 'snapshot', 'list'), new RegExp(snapshot))
    await e2b('sandbox', 'snapshot', 'delete', snapshot)
  } finally {
    await e2b('sandbox', 'kill', id)
  }
  assert.ok(!(await e2b('sandbox', 'list')).includes(id))
})
