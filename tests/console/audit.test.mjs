// Commands and file paths in the audit log (`jiffy serve --audit-commands`): calls of the console
// and of clients, without environments and content.
import assert from 'node:assert/strict'
import http from 'node:http'
import { after, before, test } from 'node:test'
import {
  ADMIN_KEY,
  createSandbox,
  go,
  launch,
  open,
  owner,
  SOCKETS,
  signInByCode,
  signInByKey,
  terminalShows,
  violations,
} from './browser.mjs'

const AGENT_PORT = 49983
let browser
let page
let id
let token
before(async () => {
  browser = await launch()
  page = await signInByCode(await open(browser))
  const created = await createSandbox({})
  id = created.sandboxID
  token = created.envdAccessToken
})
after(async () => {
  await owner('DELETE', `/sandboxes/${id}`).catch(() => {})
  await browser?.close()
})

const ofSandbox = async () => (await owner('GET', `/audit?limit=1000&sandboxID=${id}`)).entries

async function until(find) {
  for (const end = Date.now() + 30_000; ;) {
    const entries = await ofSandbox()
    const found = entries.find(find)
    if (found) return found
    assert.ok(Date.now() < end, JSON.stringify(entries))
  }
}

// Calls the agent of the sandbox, as the SDKs do. Returns the status.
function agent(path, body, type) {
  const headers = {
    host: 'localhost',
    'e2b-sandbox-id': id,
    'e2b-sandbox-port': AGENT_PORT,
    'x-access-token': token ?? '',
    'content-type': type,
    'content-length': body.length,
  }
  return new Promise((resolve, reject) => {
    const request = http.request({ socketPath: `${SOCKETS}/owner`, method: 'POST', path, headers }, (response) => {
      response.resume().on('end', () => resolve(response.statusCode))
    })
    request.on('error', reject).end(body)
  })
}

test('commands and paths of clients are recorded without environment and content', async () => {
  const message = Buffer.from(
    JSON.stringify({ process: { cmd: 'echo', args: ['a\nb'], envs: { TOKEN: 'hidden-value' } }, stdin: false }),
  )
  const head = Buffer.alloc(5)
  head.writeUInt32BE(message.length, 1)
  const status = await agent('/process.Process/Start', Buffer.concat([head, message]), 'application/connect+json')
  assert.equal(status, 200)
  const written = await agent('/files?path=/tmp/recorded&username=root', Buffer.from('hidden-content'), 'text/plain')
  assert.equal(written, 200)
  const start = await until((entry) => entry.call === 'POST /process.Process/Start')
  assert.deepEqual([start.command, start.status, start.caller], ["echo 'a\\nb'", 200, 'owner'])
  const write = await until((entry) => entry.call === 'POST /files')
  assert.deepEqual(write.paths, ['/tmp/recorded'])
  assert.ok(!JSON.stringify(await ofSandbox()).includes('hidden'))
})

test('files and terminals of the console are recorded with the session', async () => {
  await go(page, `/sandboxes/${id}/files?path=/tmp`)
  await page.getByText('recorded').first().waitFor()
  const listed = await until((entry) => entry.call === 'GET /guest/{id}/entries' && entry.paths?.includes('/tmp'))
  assert.ok(listed.sessionID)
  assert.equal(listed.caller, 'owner')
  await go(page, `/sandboxes/${id}/terminal`)
  await terminalShows(page, /[$#] *$/)
  const terminal = await until((entry) => entry.call === 'GET /live open')
  assert.deepEqual([terminal.command, terminal.status], ["'$SHELL' -l", 200])
  assert.ok(terminal.object)
  // A reload and a second viewer attach the same terminal.
  const attached = async (by) => {
    const found = (await ofSandbox()).filter(({ call, object }) => call === by && object === terminal.object)
    return found.map(({ caller, command, status }) => [caller, command, status])
  }
  await page.reload()
  await terminalShows(page, /[$#] *$/)
  await until((entry) => entry.call === 'GET /live attach')
  const viewer = await signInByKey(await open(browser), ADMIN_KEY, `/sandboxes/${id}/terminal`)
  await terminalShows(viewer, /[$#] *$/)
  await until(({ call, caller }) => call === 'GET /live attach' && caller === 'key')
  assert.deepEqual(await attached('GET /live attach'), [
    ['owner', undefined, 200],
    ['key', undefined, 200],
  ])
  // The terminal of another sandbox is not attached, which is recorded as well.
  await viewer.evaluate(async (id) => {
    const socket = new WebSocket(`ws://${location.host}/live`)
    await new Promise((resolve) => (socket.onopen = resolve))
    socket.send(JSON.stringify({ type: 'attach', stream: 1, sandbox: id, terminal: 'f'.repeat(16), cols: 80, rows: 24 }))
    await new Promise((resolve) => (socket.onmessage = resolve))
    socket.close()
  }, id)
  const rejected = await until(({ object }) => object === 'f'.repeat(16))
  assert.deepEqual([rejected.call, rejected.status, rejected.error_code], ['GET /live attach', 400, 'invalid_request'])
  await viewer.context().close()
  await go(page, '/audit?call=Process/Start')
  await page.getByText("echo 'a\\nb'").first().waitFor()
  assert.deepEqual(violations, [])
})
