// The connection `/live` of a tab: events change the page, and the usage of displayed sandboxes is
// shown. Two keys receive nothing of each other. Hostile messages have no effect on others.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import {
  CREATE_KEY,
  createSandbox,
  go,
  launch,
  open,
  owner,
  signInByCode,
  signInByKey,
  violations,
} from './browser.mjs'

let browser
let page
const sandboxes = new Set()
before(async () => {
  browser = await launch()
  page = await signInByCode(await open(browser))
})
after(async () => {
  for (const id of sandboxes) await owner('DELETE', `/sandboxes/${id}`).catch(() => {})
  await browser?.close()
})

async function created(body) {
  const { sandboxID } = await createSandbox(body)
  sandboxes.add(sandboxID)
  return sandboxID
}

// Returns the control messages that a page receives at `/live` from now on.
function notices(page) {
  const all = []
  page.on('websocket', (socket) =>
    socket.on('framereceived', ({ payload }) => {
      if (typeof payload === 'string') all.push(JSON.parse(payload))
    }),
  )
  return all
}

async function until(holds) {
  const end = Date.now() + 30_000
  while (!holds()) {
    assert.ok(Date.now() < end, `not within 30 s: ${holds}`)
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}

test('changes by other clients appear without a request for the list', async () => {
  const name = `live-${process.pid}`
  await go(page, '/sandboxes')
  const first = await created()
  await page.getByText(first.slice(0, 8)).first().waitFor()
  // Only events and requests of single sandboxes can change the table.
  await page.route('**/api/v2/sandboxes*', (route) => route.abort())
  const id = await created({ name })
  const row = page.getByRole('row').filter({ hasText: name })
  await row.waitFor()
  await owner('POST', `/sandboxes/${id}/pause`)
  await row.getByText('paused').waitFor()
  await owner('DELETE', `/sandboxes/${id}`)
  await row.waitFor({ state: 'detached' })
  await page.unroute('**/api/v2/sandboxes*')
  assert.deepEqual(violations, [])
})

test('the usage of displayed sandboxes is sent every second', async () => {
  const id = await created()
  const received = notices(page)
  await go(page, `/sandboxes/${id}/details`)
  const usage = () => received.filter((notice) => notice.type === 'usage' && notice.sandboxes[id])
  await until(() => usage().length >= 3)
  assert.ok(usage()[0].sandboxes[id].memTotal > 0)
  await go(page, '/overview')
  assert.deepEqual(violations, [])
})

test('a key receives events and usage of its own sandboxes only', async () => {
  const context = await open(browser)
  const foreign = await signInByKey(context, CREATE_KEY)
  const received = notices(foreign)
  await go(foreign, '/sandboxes')
  const secret = await created()
  const own = await foreign.evaluate(async (secret) => {
    const socket = new WebSocket(`ws://${location.host}/live`)
    await new Promise((resolve) => (socket.onopen = resolve))
    socket.send(JSON.stringify({ type: 'display', sandboxes: [secret] }))
    const shown = await new Promise((resolve) => (socket.onmessage = ({ data }) => resolve(JSON.parse(data))))
    socket.close()
    const headers = { 'content-type': 'application/json', 'jiffy-console': '1' }
    const body = JSON.stringify({ templateID: 'base', timeout: 600 })
    const answer = await fetch('/api/v2/sandboxes', { method: 'POST', headers, body })
    return { shown, id: (await answer.json()).sandboxID }
  }, secret)
  sandboxes.add(own.id)
  assert.deepEqual(own.shown, { type: 'usage', sandboxes: {} })
  await until(() => JSON.stringify(received).includes(own.id))
  assert.ok(!JSON.stringify(received).includes(secret))
  await context.close()
})

test('hostile messages end at most their own connection', async () => {
  const id = await created()
  await go(page, `/sandboxes/${id}/details`)
  const answered = await page.evaluate(async (id) => {
    const connect = async () => {
      const socket = new WebSocket(`ws://${location.host}/live`)
      socket.binaryType = 'arraybuffer'
      await new Promise((resolve, reject) => {
        socket.onopen = resolve
        socket.onerror = reject
      })
      return socket
    }
    const commands = [
      { type: 'open', stream: 1, sandbox: id, cols: 80, rows: 24, user: 'user', shell: '/bin/sh' },
      { type: 'attach', stream: 2, sandbox: id, terminal: 'ffffffffffffffff', cols: 1, rows: 1 },
      { type: 'resize', stream: 1, cols: 65535, rows: 0 },
      { type: 'ack', stream: 1, bytes: 2 ** 53 },
      { type: 'detach', stream: 1 },
      { type: 'end', stream: 1 },
      { type: 'follow', after: 'a' },
      { type: 'follow', after: null },
      { type: 'display', sandboxes: Array(1000).fill(id) },
      { type: 'display', sandboxes: ['../../etc', '', '\u0000'] },
    ].map((command) => JSON.stringify(command))
    const parts = ['{', ']', 'null', '-1', '1e999', '"', '\u{10ffff}', '[[[[[[[[', '"type":"open",']
    // A fixed sequence of pseudo-random numbers.
    let state = 12345
    const next = (limit) => {
      state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff
      return state % limit
    }
    let socket = await connect()
    for (let round = 0; round < 2000; round++) {
      if (socket.readyState !== WebSocket.OPEN) socket = await connect()
      let text = commands[next(commands.length)]
      for (let change = next(4); change > 0; change--) {
        const at = next(text.length)
        text = text.slice(0, at) + parts[next(parts.length)] + text.slice(at + next(6))
      }
      if (next(10) === 0) socket.send(new Uint8Array(next(200)))
      socket.send(text)
    }
    socket.send('x'.repeat(100_000))
    await new Promise((resolve) => {
      if (socket.readyState === WebSocket.CLOSED) resolve()
      socket.onclose = resolve
    })
    const other = await connect()
    other.send(JSON.stringify({ type: 'display', sandboxes: [id] }))
    const notice = await new Promise((resolve) => (other.onmessage = ({ data }) => resolve(JSON.parse(data))))
    other.close()
    return notice
  }, id)
  assert.equal(answered.type, 'usage')
  assert.ok(answered.sandboxes[id])
})
