// A table of many sandboxes with changes. The answers of the daemon are simulated in the page itself:
// a simulation by the debugger would need processor time outside of the page for each answer.
import { CONSOLE, owner } from './browser.mjs'

/** Number of sandboxes in a page of the API. */
const PAGE = 100

// Replaces `fetch` and `WebSocket` in a page. Calls that are not simulated reach the daemon.
function install({ sample, detail, count, size }) {
  const idOf = (number) => `i${String(number).padStart(18, '0')}x`
  const changes = new Map()
  const stateOf = (number) => changes.get(number) ?? 'running'
  const row = (number) => ({
    sandboxID: idOf(number),
    name: `sandbox-${number}`,
    metadata: { team: `team-${number % 20}`, run: String(number) },
    state: stateOf(number),
    jiffy: { ...sample.jiffy, id: idOf(number), created_ms: sample.jiffy.created_ms - number * 1000 },
  })
  const json = (value, headers = {}) =>
    new Response(JSON.stringify(value), { headers: { 'content-type': 'application/json', ...headers } })
  const { fetch } = globalThis
  globalThis.fetch = async (input, init) => {
    const url = new URL(input.url ?? input, location.href)
    if (url.pathname === '/api/v2/sandboxes' && (init?.method ?? input.method ?? 'GET') === 'GET') {
      const start = Number(url.searchParams.get('nextToken') ?? 0)
      const rows = Array.from({ length: Math.min(size, count - start) }, (_, at) => ({ ...sample, ...row(start + at) }))
      return json(rows, start + size < count ? { 'x-next-token': String(start + size) } : {})
    }
    if (url.pathname === '/api/sandboxes/metrics') return json({ sandboxes: {} })
    const one = /^\/api\/sandboxes\/i(\d+)x$/.exec(url.pathname)
    return one ? json({ ...detail, ...row(Number(one[1])) }) : fetch(input, init)
  }
  const sockets = new Set()
  globalThis.WebSocket = class {
    static OPEN = 1
    readyState = 1
    constructor() {
      sockets.add(this)
      setTimeout(() => this.onopen?.())
    }
    send() {}
    close() {}
  }
  let [next, timer] = [0, undefined]
  globalThis.simulated = {
    start(perSecond) {
      timer = setInterval(() => {
        const number = (next++ * 7919) % count
        const state = stateOf(number) === 'paused' ? 'running' : 'paused'
        changes.set(number, state)
        const type = state === 'paused' ? 'sandbox.paused' : 'sandbox.resumed'
        const event = { id: `e${next}`, type, time: new Date().toISOString(), host: 'h', sandboxID: idOf(number) }
        const data = JSON.stringify({ type: 'events', events: [event], next: event.id, gap: false })
        for (const socket of sockets) socket.onmessage?.({ data })
      }, 1000 / perSecond)
    },
    stop: () => clearInterval(timer),
    changed: () => next,
    stateOf,
  }
}

/** Replaces the sandboxes of the next document of a page by `count` copies of the sandbox `id`. */
export async function simulate(page, id, count) {
  const list = await owner('GET', '/v2/sandboxes?limit=100')
  const sample = list.find((sandbox) => sandbox.sandboxID === id)
  const detail = await owner('GET', `/sandboxes/${id}`)
  await page.addInitScript(install, { sample, detail, count, size: PAGE })
  return {
    /** Starts `perSecond` changes per second, of sandboxes all over the table. */
    start: (perSecond) => page.evaluate((perSecond) => globalThis.simulated.start(perSecond), perSecond),
    stop: () => page.evaluate(() => globalThis.simulated.stop()),
    changed: () => page.evaluate(() => globalThis.simulated.changed()),
    stateOf: (number) => page.evaluate((number) => globalThis.simulated.stateOf(number), number),
  }
}
/** Opens the table and waits until it has all rows. */
export async function openTable(page, count) {
  await page.goto(`${CONSOLE}/sandboxes`)
  await page.locator('.page-head').getByText(count.toLocaleString('en-US'), { exact: true }).waitFor()
}

/** Scrolls through the table. Returns durations of frames and of tasks over 50 ms, and the heap in MB. */
export async function scroll(page, seconds) {
  const figures = await page.evaluate(async (seconds) => {
    const table = document.querySelector('.table-wrap[aria-label="Sandboxes"]')
    const tasks = []
    const observer = new PerformanceObserver((list) => tasks.push(...list.getEntries().map((task) => task.duration)))
    observer.observe({ type: 'longtask' })
    const frames = []
    let [last, step] = [performance.now(), 90]
    const end = last + seconds * 1000
    await new Promise((resolve) => {
      const frame = (now) => {
        frames.push(now - last)
        last = now
        if (table.scrollTop + table.clientHeight >= table.scrollHeight - 1) step = -90
        table.scrollTop += step
        if (now < end) requestAnimationFrame(frame)
        else resolve()
      }
      requestAnimationFrame((now) => {
        last = now
        requestAnimationFrame(frame)
      })
    })
    observer.disconnect()
    return { frames, tasks, position: table.scrollTop }
  }, seconds)
  const session = await page.context().newCDPSession(page)
  await session.send('HeapProfiler.collectGarbage')
  const { usedSize } = await session.send('Runtime.getHeapUsage')
  await session.detach()
  const sorted = [...figures.frames].sort((a, b) => a - b)
  return {
    ...figures,
    /** Frames per second that 95 % of the frames reach. */
    framesPerSecond: 1000 / sorted[Math.floor(sorted.length * 0.95)],
    longestTask: Math.max(0, ...figures.tasks),
    heap: usedSize / 1e6,
  }
}
