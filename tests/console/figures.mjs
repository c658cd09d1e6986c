// Measures the console and writes samples to a file: first page, terminal, a table of 10,000 rows, a
// lineage of 2,000 objects, events, and a daemon with 100 open tabs. Started by
// tests/console/run --figures FILE, which bench/console calls.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs'
import { CONSOLE, createSandbox, go, launch, open, owner, signInByCode, terminalShows } from './browser.mjs'
import { drawLineage, simulateLineage } from './large-lineage.mjs'
import { openTable, scroll, simulate } from './large-table.mjs'
import { inBrowser, pageAlone, withoutBrowser } from './terminal-figures.mjs'

const { FIGURES, DAEMON } = process.env
const LOADS = 10
const KEYS = 100
const FLOOD_SECONDS = 10
/** Number of measured interrupts. */
const FLOODS = 5
const ROWS = 10_000
const CHANGES_PER_SECOND = 50
const SCROLL_SECONDS = 10
const NODES = 2000
const DRAWINGS = 5
const CREATES = 20
const TABS = 100
const SANDBOXES = 50
const OBSERVED_SECONDS = 20
const TICKS_PER_SECOND = 100

const series = []
function note(name, unit, samples) {
  const sorted = [...samples].sort((a, b) => a - b)
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))]
  console.log(
    `${name.padEnd(28)} min ${at(0).toFixed(1)}  median ${at(0.5).toFixed(1)}  p99 ${at(0.99).toFixed(1)} ${unit}`,
  )
  series.push({ name, unit, samples: samples.map((sample) => Math.round(sample * 1000) / 1000) })
}
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

// Processor seconds and resident memory in MiB of the daemon.
function daemon() {
  const stat = readFileSync(`/proc/${DAEMON}/stat`, 'utf8').split(') ')[1].split(' ')
  const memory = readFileSync(`/proc/${DAEMON}/status`, 'utf8').match(/VmRSS:\s+(\d+)/)[1] / 1024
  return { cpu: (Number(stat[11]) + Number(stat[12])) / TICKS_PER_SECOND, memory }
}

const browser = await launch()
const context = await open(browser)
const page = await signInByCode(context)
const { sandboxID: id } = await createSandbox({ name: 'figures' })

// A new context has no cache.
const state = await context.storageState()
const loads = []
let transferred = 0
for (let load = 0; load < LOADS; load++) {
  const fresh = await open(browser, { storageState: state })
  const first = await fresh.newPage()
  const started = performance.now()
  await first.goto(`${CONSOLE}/sandboxes`)
  await first.locator('tbody tr[aria-rowindex]').first().waitFor()
  loads.push(performance.now() - started)
  transferred = await first.evaluate(() =>
    performance
      .getEntriesByType('resource')
      .filter((entry) => new URL(entry.name).pathname.startsWith('/assets/'))
      .reduce((sum, entry) => sum + entry.encodedBodySize, 0),
  )
  await fresh.close()
}
const assets = new URL('../../web/dist/assets/', import.meta.url)
const compressed = readdirSync(assets).filter((name) => name.endsWith('.br'))
note('first page, Brotli', 'KiB', [transferred / 1024])
note('all files, Brotli', 'KiB', [
  compressed.reduce((sum, name) => sum + statSync(new URL(name, assets)).size, 0) / 1024,
])
note('first rows, cold cache', 'ms', loads)

// Time from the key press until the row of the terminal has changed.
await go(page, `/sandboxes/${id}/terminal`)
await terminalShows(page, /[$#] *$/)
await page.locator('.terminal-pane:not([hidden]) .xterm-helper-textarea').focus()
const echoes = []
for (let key = 0; key < KEYS; key++) {
  await page.evaluate(() => {
    const rows = document.querySelector('.terminal-pane:not([hidden]) .xterm-rows')
    window.echo = new Promise((resolve) => {
      addEventListener('keydown', (event) => (window.pressed = event.timeStamp), { capture: true, once: true })
      const observer = new MutationObserver(() => {
        observer.disconnect()
        resolve(performance.now() - window.pressed)
      })
      observer.observe(rows, { subtree: true, childList: true, characterData: true })
    })
  })
  await page.keyboard.press(key % 40 === 39 ? 'Control+u' : 'x')
  echoes.push(await page.evaluate(() => window.echo))
}
note('key press to drawn echo', 'ms', echoes)

// A flood of output, and the time until an interrupt ends it. Then the parts of its way alone.
await page.keyboard.press('Control+u')
await go(page, '/keys')
const floods = [await inBrowser(id, FLOOD_SECONDS)]
while (floods.length < FLOODS) floods.push(await inBrowser(id, 2))
note('output of `yes`', 'MB/s', [floods[0].speed])
note('interrupt of `yes` to prompt', 'ms', floods.map(({ interrupt }) => interrupt))
note('`yes`, no browser', 'MB/s', [(await withoutBrowser(context, id, FLOOD_SECONDS)).speed])
note('`yes`, page alone', 'MB/s', [await pageAlone(browser, state, id, FLOOD_SECONDS)])

// A large table with changes, and a large lineage, in contexts of their own.
const large = await open(browser, { storageState: state })
const table = await large.newPage()
const simulated = await simulate(table, id, ROWS)
await openTable(table, ROWS)
await simulated.start(CHANGES_PER_SECOND)
const scrolled = await scroll(table, SCROLL_SECONDS)
await simulated.stop()
note(`scrolling ${ROWS} rows, frame`, 'ms', scrolled.frames)
note(`scrolling ${ROWS} rows, P95`, 'frames/s', [scrolled.framesPerSecond])
note(`scrolling ${ROWS} rows, longest task`, 'ms', [scrolled.longestTask])
note(`scrolling ${ROWS} rows, heap`, 'MB', [scrolled.heap])
await table.close()
const tree = await large.newPage()
await simulateLineage(tree, id, NODES)
const drawings = []
while (drawings.length < DRAWINGS) drawings.push(await drawLineage(tree, id))
note(`lineage of ${NODES} nodes`, 'ms', drawings)
await large.close()

// Time from the answer to a create by another client until its row is visible.
await go(page, '/sandboxes')
await page.getByRole('row').filter({ hasText: 'figures' }).waitFor()
const rows = []
for (let create = 0; create < CREATES; create++) {
  const name = `row-${create}-end`
  const visible = page.evaluate(
    (name) =>
      new Promise((resolve) => {
        const table = document.querySelector('main')
        const check = () => {
          if (!table.textContent.includes(name)) return
          observer.disconnect()
          resolve(performance.timeOrigin + performance.now())
        }
        const observer = new MutationObserver(check)
        observer.observe(table, { subtree: true, childList: true, characterData: true })
      }),
    name,
  )
  const { sandboxID } = await createSandbox({ name })
  const answered = performance.timeOrigin + performance.now()
  rows.push((await visible) - answered)
  await owner('DELETE', `/sandboxes/${sandboxID}`)
}
note('create answered to row', 'ms', rows)

// Tabs that follow events and display sandboxes, without a browser's own costs.
const ids = [id]
while (ids.length < SANDBOXES) ids.push((await createSandbox({})).sandboxID)
await go(page, '/keys')
await sleep(5000)
const idle = daemon()
await sleep(OBSERVED_SECONDS * 1000)
const alone = daemon()
await page.evaluate(
  async ([tabs, ids]) => {
    const sockets = Array.from({ length: tabs }, () => new WebSocket(`ws://${location.host}/live`))
    await Promise.all(sockets.map((socket) => new Promise((resolve) => (socket.onopen = resolve))))
    for (const socket of sockets) {
      socket.send(JSON.stringify({ type: 'follow', after: null }))
      socket.send(JSON.stringify({ type: 'display', sandboxes: ids }))
    }
    window.sockets = sockets
  },
  [TABS - 1, ids],
)
await sleep(5000)
const opened = daemon()
await sleep(OBSERVED_SECONDS * 1000)
const shared = daemon()
const share = (from, to) => (100 * (to.cpu - from.cpu)) / OBSERVED_SECONDS
note(`daemon, 1 tab, ${SANDBOXES} sandboxes`, '% of a processor', [share(idle, alone)])
note(`daemon, ${TABS} tabs, ${SANDBOXES} sandboxes`, '% of a processor', [share(opened, shared)])
note('daemon, memory per tab', 'MiB', [(shared.memory - alone.memory) / (TABS - 1)])
await browser.close()
for (const sandbox of ids) await owner('DELETE', `/sandboxes/${sandbox}`)
assert.ok(series.length === 17)
const commit = execFileSync('git', ['rev-parse', '--short=12', 'HEAD'], { encoding: 'utf8' }).trim()
const load = readFileSync('/proc/loadavg', 'utf8').trim()
writeFileSync(FIGURES, `${JSON.stringify({ task: 'console', commit, load, series }, null, 1)}\n`)
