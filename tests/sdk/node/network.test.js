// Authentication, egress rules, and servers in the guest.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { AuthenticationError, Sandbox } from 'e2b'
import { create, Collected, limit, request, url } from './support.js'

const SERVER = `cd $(mktemp -d) && echo "hello from the guest" > index.html && exec python3 -um http.server 8080 --bind 127.0.0.1`

async function serve(sandbox) {
  const out = new Collected()
  await sandbox.commands.run(SERVER, { background: true, timeoutMs: 0, onStdout: out.push })
    .then((server) => void server.wait().catch(() => {})) // ends with its sandbox
  await out.waitForText('Serving HTTP')
}
// Headers that select a port of a sandbox.
const routed = (sandbox, port = 8080) => ({ 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': `${port}` })

let sandbox
after(() => sandbox?.kill())
before(async () => {
  sandbox = await create(null)
  await serve(sandbox)
})

test('a server in the guest is reached by headers, host name and path', limit, async () => {
  const expected = 'hello from the guest\n'
  assert.equal((await request(url, { headers: routed(sandbox) })).body, expected)
  const host = sandbox.getHost(8080)
  assert.ok(host.startsWith(`8080-${sandbox.sandboxId}.`))
  assert.equal((await request(url, { headers: { Host: host } })).body, expected)
  assert.equal((await request(`${url}/sandboxes/${sandbox.sandboxId}/proxy/8080/`)).body, expected)
})

test('a closed port is reported', limit, async () => {
  const answer = await request(url, { headers: routed(sandbox, 9) })
  assert.equal(answer.status, 502)
  assert.match(JSON.parse(answer.body).message, /port is not open/)
})

test('a restricted sandbox requires its token', limit, async (t) => {
  const restricted = await create(t, 'base', { network: { allowPublicTraffic: false } })
  await serve(restricted)
  assert.equal((await request(url, { headers: routed(restricted) })).status, 403)
  const headers = { ...routed(restricted), 'E2B-Traffic-Access-Token': restricted.trafficAccessToken }
  assert.equal((await request(url, { headers })).status, 200)
})

test('rules are stored, returned and replaced as a whole', limit, async (t) => {
  const ruled = await create(t, 'base', { network: { allowOut: ['8.8.8.0/24', 'example.com'], denyOut: ({ allTraffic }) => [allTraffic] } })
  assert.deepEqual((await ruled.getInfo()).network.denyOut, ['0.0.0.0/0'])
  assert.deepEqual((await ruled.getInfo()).network.allowOut, ['8.8.8.0/24', 'example.com'])
  await ruled.updateNetwork({ denyOut: ['192.0.2.0/24'] })
  const network = (await ruled.getInfo()).network
  assert.deepEqual(network.denyOut, ['192.0.2.0/24'])
  assert.ok(!network.allowOut?.length)
  await assert.rejects(ruled.updateNetwork({ denyOut: ['example.com'] }), /400/)
})

test('a wrong key is rejected everywhere', limit, async () => {
  const wrong = { apiKey: 'e2b_0000000000000000000000000000000000000000' }
  for (const call of [
    () => Sandbox.create(wrong),
    () => Sandbox.getInfo(sandbox.sandboxId, wrong),
    () => Sandbox.connect(sandbox.sandboxId, wrong),
    () => Sandbox.kill(sandbox.sandboxId, wrong),
    () => Sandbox.list(wrong).nextItems(),
  ]) await assert.rejects(call(), AuthenticationError)
  assert.equal(await sandbox.isRunning(), true)
})
