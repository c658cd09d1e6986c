// Hostile pages of a guest, in the browser of a signed-in user, cannot receive or use the session.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { API, CONSOLE, createSandbox, launch, open, owner, signInByCode, terminalShows, type } from './browser.mjs'

const PORT = 8000
// Records the cookies of requests, and tries every way to the console from a page.
const SERVER = `
import http.server, json
seen = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.endswith('/seen'):
            body = json.dumps(seen).encode()
            kind = 'application/json'
        else:
            seen.append(self.headers.get('cookie') or '')
            body = b'<!doctype html><title>guest</title><p>guest</p>'
            kind = 'text/html'
        self.send_response(200)
        self.send_header('content-type', kind)
        self.send_header('set-cookie', 'jiffy_console=PLANTED; Path=/')
        self.send_header('set-cookie', '__Host-jiffy_console=PLANTED; Path=/; Secure')
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass
http.server.ThreadingHTTPServer(('0.0.0.0', ${PORT}), Handler).serve_forever()
`
const api = new URL(API)
const consoleURL = new URL(CONSOLE)
let browser
let context
let sandbox
before(async () => {
  browser = await launch()
  context = await open(browser)
  sandbox = (await createSandbox({ name: 'hostile' })).sandboxID
  const page = await signInByCode(context)
  await page.goto(`${CONSOLE}/sandboxes/${sandbox}/terminal`)
  await terminalShows(page, /[$#] *$/)
  const encoded = Buffer.from(SERVER).toString('base64')
  await type(
    page,
    `echo ${encoded} | base64 -d > /tmp/server.py; ` +
      'nohup python3 /tmp/server.py >/dev/null 2>&1 & sleep 1; echo server-$((1 + 1))',
  )
  await terminalShows(page, /server-2/)
  await page.close()
})
after(async () => {
  if (sandbox) await owner('DELETE', `/sandboxes/${sandbox}`)
  await browser?.close()
})

/** Attacks the console from a page of a guest. Returns the names of the attacks that succeeded. */
async function attack(page) {
  return page.evaluate(async (target) => {
    const successes = []
    const attempt = async (name, action) => {
      try {
        if (await action()) successes.push(name)
      } catch {
        /* The browser denied it. */
      }
    }
    const kill = `${target}/api/sandboxes/KILL`
    for (const credentials of ['include', 'same-origin']) {
      for (const mode of ['cors', 'no-cors']) {
        await attempt(`read ${mode}`, async () => (await fetch(`${target}/api/v2/sandboxes`, { credentials, mode })).ok)
        await attempt(
          `header ${mode}`,
          async () => (await fetch(`${target}/session`, { credentials, mode, headers: { 'jiffy-console': '1' } })).ok,
        )
        await attempt(
          `post ${mode}`,
          async () => (await fetch(kill, { method: 'POST', credentials, mode, body: '{}' })).ok,
        )
        await attempt(
          `delete ${mode}`,
          async () =>
            (await fetch(kill, { method: 'DELETE', credentials, mode, headers: { 'jiffy-console': '1' } })).ok,
        )
      }
    }
    await attempt(
      'websocket',
      () =>
        new Promise((resolve) => {
          const socket = new WebSocket(`${target.replace('http', 'ws')}/live`)
          socket.onopen = () => resolve(true)
          socket.onerror = () => resolve(false)
        }),
    )
    await attempt(
      'frame',
      () =>
        new Promise((resolve) => {
          const frame = document.createElement('iframe')
          frame.onload = () => {
            try {
              resolve(!!frame.contentDocument?.querySelector('.app'))
            } catch {
              resolve(false)
            }
          }
          frame.src = `${target}/`
          document.body.append(frame)
          setTimeout(() => resolve(false), 3000)
        }),
    )
    try {
      document.cookie = 'jiffy_console=PLANTED; path=/'
    } catch {
      /* An opaque origin has no cookies. */
    }
    return successes
  }, CONSOLE)
}

const places = {
  'by path on the address of the console': `http://127.0.0.1:${api.port}/sandboxes/ID/proxy/${PORT}/`,
  'by path on localhost': `http://localhost:${api.port}/sandboxes/ID/proxy/${PORT}/`,
  'by a host name below localhost': `http://${PORT}-ID.localhost:${api.port}/`,
}
for (const [place, url] of Object.entries(places)) {
  test(`a page of a guest neither receives nor uses a session (${place})`, async () => {
    const page = await context.newPage()
    const response = await page.goto(url.replace('ID', sandbox))
    assert.equal(response.status(), 200)
    assert.deepEqual(await attack(page), [])
    // Through the browser, which resolves names below localhost.
    const seen = await (await page.goto(url.replace('ID', sandbox) + 'seen')).json()
    assert.ok(seen.length > 0)
    assert.deepEqual(
      seen.filter((cookie) => cookie.includes('jiffy_console')),
      [],
    )
    await page.close()
    const cookies = (await context.cookies()).filter(
      (c) => c.name.includes('jiffy_console') && c.domain === '127.0.0.1',
    )
    assert.equal(cookies.length, 1)
    assert.notEqual(cookies[0].value, 'PLANTED')
    // The session still works in its own page.
    const own = await context.newPage()
    await own.goto(`${CONSOLE}/sandboxes`)
    await own.locator('.app').waitFor()
    await own.close()
  })
}

test('a signed link opens a page at another origin than the console', async () => {
  const page = await context.newPage()
  await page.goto(`${CONSOLE}/sandboxes/${sandbox}/ports`)
  await page.getByLabel('Port', { exact: true }).fill(String(PORT))
  await page.getByRole('button', { name: 'Create a link' }).click()
  const link = await page.getByRole('link', { name: 'Open' }).getAttribute('href')
  assert.notEqual(new URL(link).hostname, consoleURL.hostname)
  const guest = await context.newPage()
  assert.equal((await guest.goto(link)).status(), 200)
  assert.deepEqual(await attack(guest), [])
  await guest.close()
  await page.close()
})

test('requests with another host name, without the header, and with two cookies are rejected', async () => {
  const [cookie] = (await context.cookies()).filter((c) => c.name === 'jiffy_console' && c.domain === '127.0.0.1')
  const send = async (headers, path = '/session') => {
    const { request } = await import('node:http')
    return new Promise((resolve, reject) => {
      const sent = request({ host: '127.0.0.1', port: consoleURL.port, path, headers }, (response) => {
        response.resume()
        resolve({ status: response.statusCode, cookies: response.headers['set-cookie'] ?? [] })
      })
      sent.on('error', reject)
      sent.end()
    })
  }
  const own = { host: consoleURL.host, 'jiffy-console': '1', cookie: `jiffy_console=${cookie.value}` }
  assert.equal((await send(own)).status, 200)
  assert.equal((await send({ ...own, host: 'rebound.example' })).status, 421)
  assert.equal((await send({ host: own.host, cookie: own.cookie })).status, 403)
  assert.equal((await send({ ...own, origin: API })).status, 403)
  const two = await send({ ...own, cookie: `${own.cookie}; jiffy_console=PLANTED` })
  assert.equal(two.status, 400)
  assert.match(two.cookies[0], /jiffy_console=; .*Max-Age=0/)
})
