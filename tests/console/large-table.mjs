// A table of many sandboxes with changes, from answers that are simulated below the page: lists and
// single sandboxes by routes, and events by a WebSocket.
import { CONSOLE, owner } from './browser.mjs'

const PAGE = 100

/** Replaces the sandboxes of a page by `count` copies of the sandbox `id`. */
export async function simulate(page, id, count) {
  const { sandboxes } = await owner('GET', '/v2/sandboxes?limit=100').then((list) => ({ sandboxes: list }))
  const sample = sandboxes.find((sandbox) => sandbox.sandboxID === id)
  const detail = await owner('GET', `/sandboxes/${id}`)
  const idOf = (number) => `i${String(number).padStart(18, '0')}x`
  const changes = new Map()
  const row = (number) => {
    const own = {
      sandboxID: idOf(number),
      name: `sandbox-${number}`,
      metadata: { team: `team-${number % 20}`, run: String(number) },
      state: changes.get(number) ?? 'running',
    }
    return {
      ...own,
      jiffy: { ...sample.jiffy, id: own.sandboxID, created_ms: sample.jiffy.created_ms - number * 1000 },
    }
  }
  await page.route('**/api/v2/sandboxes?*', (route) => {
    const start = Number(new URL(route.request().url()).searchParams.get('nextToken') ?? 0)
    const rows = Array.from({ length: Math.min(PAGE, count - start) }, (_, at) => ({ ...sample, ...row(start + at) }))
    const more = start + PAGE < count
    return route.fulfill({ json: rows, headers: more ? { 'x-next-token': String(start + PAGE) } : {} })
  })
  await page.route(/\/api\/sandboxes\/i\d+x$/, (route) => {
    const number = Number(
      route
        .request()
        .url()
        .match(/i(\d+)x$/)[1],
    )
    return route.fulfill({ json: { ...detail, ...row(number) } })
  })
  await page.route('**/api/sandboxes/metrics*', (route) => route.fulfill({ json: { sandboxes: {} } }))
  const sockets = new Set()
  await page.routeWebSocket('**/live', (socket) => {
    sockets.add(socket)
    socket.onClose(() => sockets.delete(socket))
    socket.onMessage(() => {})
  })
  let [next, timer] = [0, undefined]
  return {
    /** Starts `perSecond` changes per second, of sandboxes all over the table. */
    start(perSecond) {
      timer = setInterval(() => {
        const number = (next++ * 7919) % count
        const state = changes.get(number) === 'paused' ? 'running' : 'paused'
        changes.set(number, state)
        const type = state === 'paused' ? 'sandbox.paused' : 'sandbox.resumed'
        const event = { id: `e${next}`, type, time: new Date().toISOString(), host: 'h', sandboxID: idOf(number) }
        const notice = JSON.stringify({ type: 'events', events: [event], next: event.id, gap: false })
        for (const socket of sockets) socket.send(notice)
      }, 1000 / perSecond)
    },
    stop: () => clearInterval(timer),
    changed: () => next,
    stateOf: (number) => changes.get(number) ?? 'running',
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
