// Throughput of a terminal that runs `yes`, with a browser and in parts. One part is a client of the
// WebSocket that discards the output. The other is the page with a WebSocket that produces output.
import http from 'node:http'
import { CONSOLE, open, owner, terminalShows } from './browser.mjs'
import { launchPlain } from './plain-browser.mjs'

const ACKNOWLEDGE = 32 * 1024
const WARM_UP = 1000
/** Modifier of a key event. */
const CONTROL = 2
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

// Bytes per second of `count` over `seconds`, in MB/s.
async function rate(count, seconds) {
  await sleep(WARM_UP)
  const [before, began] = [await count(), performance.now()]
  await sleep(seconds * 1000)
  return ((await count()) - before) / (performance.now() - began) / 1000
}

// Counts the output that the page receives.
const COUNT = `
  globalThis.received = 0
  globalThis.WebSocket = class extends WebSocket {
    constructor(...settings) {
      super(...settings)
      this.addEventListener('message', ({ data }) => (globalThis.received += data.byteLength ?? 0))
    }
  }`
const ROWS = `document.querySelector('.terminal-pane:not([hidden]) .xterm-rows')?.textContent ?? ''`
const PROMPT = `/[$#] *$/.test(${ROWS})`

/** `yes` in a terminal of the page. Returns MB/s, and the time from an interrupt to the prompt in ms. */
export async function inBrowser(id, seconds) {
  const page = await launchPlain()
  try {
    await page.init(COUNT)
    const { url } = await owner('POST', '/console/codes')
    await page.open(`${CONSOLE}/${new URL(url).hash}`)
    await page.until(`document.querySelector('.app') !== null`)
    await page.open(`${CONSOLE}/sandboxes/${id}/terminal`)
    await page.until(PROMPT)
    await page.evaluate(`document.querySelector('.terminal-pane:not([hidden]) .xterm-helper-textarea').focus()`)
    for (const key of 'yes') await page.press(key, key)
    await page.press('Enter', '\r')
    const speed = await rate(() => page.evaluate('received'), seconds)
    // From the key press to the frame that shows the prompt. The page may process the key press before
    // later scripts, so the listener must exist.
    await page.evaluate(`globalThis.interrupt = new Promise((resolve) => {
      addEventListener('keydown', ({ timeStamp }) => {
        const check = () => (${PROMPT} ? resolve(performance.now() - timeStamp) : requestAnimationFrame(check))
        requestAnimationFrame(check)
      }, { capture: true, once: true })
    }), undefined`)
    await page.press('c', undefined, CONTROL)
    return { speed, interrupt: await page.evaluate('interrupt') }
  } finally {
    await page.close()
  }
}

// Frame of a client, with the mask 0.
function frame(kind, data) {
  const long = data.length > 125
  const head = Buffer.from(
    long ? [0x80 | kind, 0xfe, data.length >> 8, data.length & 255] : [0x80 | kind, 0x80 | data.length],
  )
  return Buffer.concat([head, Buffer.alloc(4), data])
}

// Calls `receive` with kind and data of each frame that a server sends.
function frames(socket, receive) {
  let buffer = Buffer.alloc(0)
  socket.on('data', (data) => {
    buffer = buffer.length === 0 ? data : Buffer.concat([buffer, data])
    for (;;) {
      if (buffer.length < 2) return
      let [length, start] = [buffer[1] & 127, 2]
      if (length === 126 && buffer.length >= 4) [length, start] = [buffer.readUInt16BE(2), 4]
      else if (length === 127 && buffer.length >= 10) [length, start] = [Number(buffer.readBigUInt64BE(2)), 10]
      else if (length > 125) return
      if (buffer.length < start + length) return
      receive(buffer[0] & 15, buffer.subarray(start, start + length))
      buffer = buffer.subarray(start + length)
    }
  })
}

/** `yes` in a terminal whose output is acknowledged and discarded. Returns MB/s and messages per second. */
export async function withoutBrowser(context, id, seconds) {
  const { cookies } = await context.storageState()
  const { host, hostname, port, origin } = new URL(CONSOLE)
  const headers = {
    host,
    origin,
    cookie: cookies.map(({ name, value }) => `${name}=${value}`).join('; '),
    connection: 'Upgrade',
    upgrade: 'websocket',
    'sec-websocket-version': '13',
    'sec-websocket-key': 'AAAAAAAAAAAAAAAAAAAAAA==',
  }
  const socket = await new Promise((resolve, reject) => {
    const request = http.request({ hostname, port, path: '/live', headers })
    request.on('upgrade', (_, socket) => resolve(socket))
    request.on('response', ({ statusCode }) => reject(new Error(`/live: ${statusCode}`)))
    request.on('error', reject).end()
  })
  // Output that arrives after the end is not acknowledged.
  const command = (message) => socket.writable && socket.write(frame(1, Buffer.from(JSON.stringify(message))))
  let [received, messages, unacknowledged] = [0, 0, 0]
  const opened = new Promise((resolve) => {
    frames(socket, (kind, data) => {
      if (kind === 1) resolve()
      if (kind !== 2) return
      received += data.length - 4
      messages += 1
      unacknowledged += data.length - 4
      if (unacknowledged < ACKNOWLEDGE) return
      command({ type: 'ack', stream: 1, bytes: unacknowledged })
      unacknowledged = 0
    })
  })
  command({ type: 'open', stream: 1, sandbox: id, cols: 120, rows: 40, shell: 'sh' })
  await opened
  socket.write(frame(2, Buffer.from('\0\0\0\x01yes\r')))
  const speed = await rate(() => received, seconds)
  const perSecond = messages / (seconds + WARM_UP / 1000)
  command({ type: 'end', stream: 1 })
  socket.end()
  return { speed, perSecond }
}

/** The page alone: a WebSocket inside the page produces output of `yes`. Returns MB/s. */
export async function pageAlone(browser, storageState, id, seconds) {
  const context = await open(browser, { storageState })
  const page = await context.newPage()
  await page.addInitScript(() => {
    const WINDOW = 512 * 1024
    class LocalSocket {
      static OPEN = 1
      readyState = 1
      constructor() {
        setTimeout(() => this.onopen?.())
      }
      close() {}
      send(text) {
        if (typeof text !== 'string') return
        const message = JSON.parse(text)
        if (message.type === 'open' || message.type === 'attach') {
          this.stream = message.stream
          this.unacknowledged = 0
          const notice = { type: 'opened', stream: message.stream, terminal: 'local' }
          this.onmessage({ data: JSON.stringify(notice) })
          this.produce()
        } else if (message.type === 'ack') {
          globalThis.acknowledged = (globalThis.acknowledged ?? 0) + message.bytes
          this.unacknowledged -= message.bytes
          this.produce()
        }
      }
      produce() {
        setTimeout(() => {
          while (this.unacknowledged < WINDOW) {
            const data = new Uint8Array(4 + 60 * 1024)
            new DataView(data.buffer).setUint32(0, this.stream)
            for (let at = 4; at < data.length; at += 3) data.set([0x79, 13, 10], at)
            this.unacknowledged += data.length - 4
            this.onmessage({ data: data.buffer })
          }
        })
      }
    }
    globalThis.WebSocket = LocalSocket
  })
  await page.goto(`${CONSOLE}/sandboxes/${id}/terminal`)
  await terminalShows(page, /y/)
  const speed = await rate(() => page.evaluate(() => globalThis.acknowledged ?? 0), seconds)
  await context.close()
  return speed
}
