// Operation of sandboxes, functions, the host.
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { readFileSync, writeFileSync } from 'node:fs'
import http from 'node:http'
import path from 'node:path'
import * as e2b from 'e2b'
import { Function, Host, InvalidArgumentError, Sandbox, Secret, Template, errors, isApiError } from '@jiffy/sandbox'
import { eventually, scenario, unique } from './harness.js'
import { create, directory, shared, url } from './servers.js'

const serve = async (sandbox, port, options = '--bind 127.0.0.1') => {
  await sandbox.commands.run(`exec python3 -m http.server ${port} ${options}`, { background: true, timeoutMs: 0 })
}

scenario('diff lists added changed and deleted files', async (t) => {
  const sandbox = await create(t)
  await sandbox.commands.run('echo 1 >/opt/added; echo 1 >>/etc/issue; rm /etc/motd', { user: 'root' })
  const changes = Object.fromEntries((await sandbox.diff()).map((change) => [change.path, change.kind]))
  assert.deepEqual([changes['/opt/added'], changes['/etc/issue'], changes['/etc/motd']], ['A', 'C', 'D'])
  assert.equal((await sandbox.diff({ limit: 1 })).length, 1)
})

scenario('diff compares two snapshots by content', async (t) => {
  const sandbox = await create(t)
  await sandbox.commands.run('cd; echo 1 >content; echo same >same; echo x >removed')
  const before = await sandbox.snapshot()
  await sandbox.commands.run('cd; echo 2 >content; echo same >same; rm removed; echo new >added')
  const after = await sandbox.snapshot()
  for (const found of [await sandbox.diff(before), await sandbox.diff(before.snapshotId, after)]) {
    const below = Object.fromEntries(found.map((item) => [item.path.replace('/home/user/', ''), item.kind]))
    const kinds = [below.content, below.removed, below.added, below.same]
    assert.deepEqual(kinds, ['changed', 'removed', 'added', undefined])
    const added = found.find((item) => item.path === '/home/user/added')
    assert.deepEqual([added.sizeBefore, added.size, added.verified], [undefined, 4, true])
  }
  assert.equal((await sandbox.diff(before, after, { limit: 1 })).length, 1)
  await before.delete()
  await after.delete()
})

scenario('a lineage has snapshots forks and rollbacks', async (t) => {
  const sandbox = await create(t)
  const snapshot = await sandbox.snapshot()
  await sandbox.rollback(snapshot)
  const [child] = await sandbox.fork({ count: 1 })
  const found = await child.lineage()
  const relations = found.edges.map((edge) => `${edge.from} ${edge.relation} ${edge.to}`)
  assert.ok(relations.includes(`${snapshot.snapshotId} snapshot_of ${sandbox.sandboxId}`))
  assert.ok(relations.includes(`${sandbox.sandboxId} rolled_back_to ${snapshot.snapshotId}`))
  const state = (id) => found.nodes.find((node) => node.id === id)?.state
  assert.deepEqual([state(sandbox.sandboxId), state(child.sandboxId)], ['running', 'running'])
  assert.equal(found.truncated, false)
  await child.kill()
  await snapshot.delete()
})

scenario('a sandbox is renamed', async (t) => {
  const name = unique()
  const sandbox = await create(t)
  await sandbox.rename(name)
  assert.equal((await Sandbox.connect(name)).sandboxId, sandbox.sandboxId)
  await sandbox.rename(null)
  await assert.rejects(Sandbox.connect(name), errors.SandboxNotFoundError)
})

scenario('the idle timeout of a running sandbox is set', async (t) => {
  const sandbox = await create(t)
  await sandbox.setIdleTimeout(1000)
  assert.equal(await sandbox.wait('paused', { timeoutMs: 60_000 }), 'paused')
  assert.equal((await sandbox.commands.run('echo resumed')).stdout, 'resumed\n')
  await sandbox.setIdleTimeout(0)
})

scenario('wait returns at the awaited state', async (t) => {
  const sandbox = await create(t)
  assert.equal(await sandbox.wait('running', { timeoutMs: 20_000 }), 'running')
  const paused = sandbox.wait('paused', { timeoutMs: 20_000 })
  await sandbox.pause()
  assert.equal(await paused, 'paused')
  await sandbox.connect()
  const ended = sandbox.wait('ended', { timeoutMs: 20_000 })
  await sandbox.kill()
  assert.equal(await ended, 'killed')
})

scenario('wait ends at its timeout', async () => {
  await assert.rejects((await shared()).wait('paused', { timeoutMs: 200 }), (error) =>
    error instanceof e2b.TimeoutError && /is running after/.test(error.message)
  )
})

scenario('a restart ends processes and keeps files', async (t) => {
  const sandbox = await create(t)
  await sandbox.files.write('/home/user/note', 'kept')
  await serve(sandbox, 8000)
  await sandbox.waitForPort(8000)
  assert.equal(await sandbox.restart({ graceMs: 500 }), sandbox)
  assert.equal(await sandbox.files.read('/home/user/note'), 'kept')
  await assert.rejects(sandbox.port(8000), errors.PortClosedError)
})

scenario('stats are the present usage', async () => {
  const stats = await (await shared()).stats()
  assert(stats.memUsed > 0 && stats.memUsed < stats.memTotal && stats.cpuCount >= 1)
})

scenario('connections list rejected connections', async (t) => {
  const sandbox = await create(t, { network: { denyOut: ['192.0.2.0/24'] } })
  await sandbox.commands.run("timeout 1 bash -c 'echo >/dev/tcp/192.0.2.7/443' || true")
  await eventually(async () => {
    const found = await sandbox.connections()
    const isExpected = (one) => one.address === '192.0.2.7' && one.port === 443 && one.verdict === 'refused'
    // Some kernels report no rejections.
    return found.untold.includes('refusals') || found.connections.some(isExpected)
  })
})

scenario('network rules are replaced', async (t) => {
  const sandbox = await create(t)
  await sandbox.updateNetwork({ denyOut: ['192.0.2.0/24'] })
  assert.deepEqual((await sandbox.getInfo()).network.denyOut, ['192.0.2.0/24'])
  await sandbox.updateNetwork({})
  assert.deepEqual((await sandbox.getInfo()).network.denyOut ?? [], [])
})

scenario('rules refer to the identity tokens of the create', async (t) => {
  const iam = { tokens: { aws: Secret.iamToken({ audience: 'sts.amazonaws.com', tokenType: 'JWT-SVID' }) } }
  const rules = (name) => ({
    'a.example': [{ transform: ({ iam }) => ({ headers: { authorization: `Bearer ${iam.tokens[name]}` } }) }],
  })
  const sandbox = await create(t, { iam, network: { rules: rules('aws') } })
  const shown = async () => (await sandbox.getInfo()).network.rules['a.example'][0].transform.headers
  assert.deepEqual(await shown(), { authorization: 'Bearer ${e2b.identity.tokens.aws}' })
  await sandbox.updateNetwork({ rules: rules('aws') })
  assert.deepEqual(await shown(), { authorization: 'Bearer ${e2b.identity.tokens.aws}' })
  await assert.rejects(create(t, { iam, network: { rules: rules('gcp') } }), InvalidArgumentError)
  await assert.rejects(sandbox.updateNetwork({ rules: rules('gcp') }), isApiError)
})

scenario('a preview link needs no key', async () => {
  const sandbox = await shared()
  await serve(sandbox, 8001, '')
  await sandbox.waitForPort(8001)
  const preview = await sandbox.preview(8001, { ttl: 60 })
  // The name of the host is not resolved in this scenario.
  const text = await new Promise((resolve, reject) => {
    const request = http.request(url, { headers: { Host: new URL(preview.url).host } }, (answer) => {
      let body = ''
      answer.on('data', (piece) => (body += piece))
      answer.on('end', () => resolve(body))
    })
    request.on('error', reject).end()
  })
  assert.match(text, /Directory listing/)
})

scenario('a port is a socket', async () => {
  const sandbox = await shared()
  await serve(sandbox, 8002)
  await sandbox.waitForPort(8002)
  const socket = await sandbox.port(8002)
  socket.write('GET / HTTP/1.0\r\n\r\n')
  const first = await new Promise((resolve, reject) => socket.once('data', resolve).once('error', reject))
  assert.equal(String(first).slice(0, 12), 'HTTP/1.0 200')
  socket.destroy()
})

scenario('a closed port is an error', async () => {
  await assert.rejects((await shared()).port(9), (error) =>
    error instanceof errors.PortClosedError && error.status === 502 && error.requestId.length > 0
  )
})

scenario('wait for port waits for a server', async () => {
  const sandbox = await shared()
  const waiting = sandbox.waitForPort(8003)
  await serve(sandbox, 8003)
  await waiting
})

scenario('wait for port ends at its timeout', async () => {
  await assert.rejects((await shared()).waitForPort(9, { timeoutMs: 100 }), /port 9 after 100 ms/)
})

scenario('transfers report their progress', async (t) => {
  const sandbox = await shared()
  const content = randomBytes(3 << 20)
  const source = path.join(directory(t), 'source')
  writeFileSync(source, content)
  const reports = []
  const report = (...values) => reports.push(values)
  await sandbox.upload(source, '/tmp/copied', report)
  assert.deepEqual(reports.at(-1), [content.length, content.length])
  assert(reports.length > 1)
  reports.length = 0
  await sandbox.download('/tmp/copied', `${source}.copy`, report)
  assert.deepEqual(reports.at(-1), [content.length, content.length])
  assert(readFileSync(`${source}.copy`).equals(content))
})

scenario('a cancelled command is killed', async () => {
  const sandbox = await shared()
  const controller = new AbortController()
  const running = assert.rejects(sandbox.commands.run('exec sleep 1001', { signal: controller.signal, timeoutMs: 0 }), {
    name: 'AbortError',
  })
  const processes = async () => (await sandbox.commands.run("pgrep -f 'sleep 100[1]' || true")).stdout
  await eventually(processes)
  controller.abort()
  await running
  await eventually(async () => (await processes()) === '')
})

scenario('a function is deployed called and removed', async () => {
  const name = unique()
  const deployed = await Function.deploy(process.env.JIFFY_TEST_MODULE, { name, settings: { env: { A: 'b' } } })
  assert.deepEqual([deployed.name, deployed.version, deployed.state], [name, 1, 'enabled'])
  const response = await deployed.call('/path', { body: 'text' })
  assert.deepEqual([response.status, response.text()], [200, 'hello from a component'])
  assert((await Function.list()).some((one) => one.name === name))
  assert((await deployed.logs()).next)
  assert.equal((await deployed.disable()).state, 'disabled')
  await assert.rejects(deployed.call('/'), errors.FunctionDisabledError)
  assert.equal((await deployed.enable()).state, 'enabled')
  await assert.rejects(deployed.rollback(7), errors.VersionNotFoundError)
  assert.equal(await deployed.remove(), true)
  assert.equal(await deployed.remove(), false)
})

scenario('the host lists engines pools and limits', async () => {
  const engines = await Host.engines()
  assert(engines.some((engine) => engine.usable && engine.default))
  assert(Array.isArray(await Host.pools()))
  const limits = await Host.limits()
  assert(limits.used.sandboxes >= 0 && 'diskBytes' in limits.limits)
  assert((await Host.status()).version)
})

scenario('templates are found', async () => {
  assert.equal(await Template.exists('base'), true)
  assert.equal(await Template.exists(unique()), false)
  assert.equal(typeof Template().fromTemplate('base'), 'object')
})

scenario('events are iterated and resumed', async (t) => {
  const sandbox = await create(t)
  const { sandboxId } = sandbox
  await sandbox.pause()
  await sandbox.kill()
  const events = async (selection) => {
    const all = []
    for await (const event of Host.events({ sandboxId, follow: false, ...selection })) all.push(event)
    return all
  }
  const all = await events()
  const types = all.map((event) => event.type)
  assert.deepEqual(types, ['sandbox.created', 'sandbox.ready', 'sandbox.paused', 'sandbox.killed'])
  const later = await events({ after: all[1].id })
  assert.deepEqual(later.map((event) => event.type), types.slice(2))
  assert.equal((await events({ types: ['sandbox.killed'] })).length, 1)
  assert.deepEqual(await events({ since: new Date(all.at(-1).time.getTime() + 1000) }), [])
  // An iterator that follows receives events that happen later.
  const other = await create(t)
  for await (const event of Host.events({ after: all.at(-1).id })) {
    // Other scenarios use the same key.
    if (event.sandboxId === other.sandboxId) break
  }
})
