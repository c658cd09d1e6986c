// Takes screenshots of all pages, in light and dark, wide and narrow, and prints the size of the first
// page and the time to its first rows. Started by tests/console/run --screenshots DIRECTORY.
import { mkdirSync, readdirSync, statSync } from 'node:fs'
import { join } from 'node:path'
import { CONSOLE, createSandbox, launch, open, owner, signInByCode } from './browser.mjs'

const directory = process.env.SCREENSHOTS
/** Loads of the first page. The median of their durations is printed. */
const LOADS = 5
mkdirSync(directory, { recursive: true })
const browser = await launch()
const { sandboxID: id } = await createSandbox({ name: 'demo', metadata: { team: 'docs' } })
await owner('POST', `/sandboxes/${id}/snapshots`, { name: 'first' })
await owner('POST', `/sandboxes/${id}/fork`, { count: 2 })

const pages = {
  overview: '/overview',
  sandboxes: '/sandboxes',
  new: '/new',
  terminal: `/sandboxes/${id}/terminal`,
  files: `/sandboxes/${id}/files?path=/etc&file=passwd`,
  charts: `/sandboxes/${id}/charts?range=5m`,
  'console-log': `/sandboxes/${id}/console`,
  connections: `/sandboxes/${id}/connections`,
  ports: `/sandboxes/${id}/ports`,
  lineage: `/sandboxes/${id}/lineage?at=${id}`,
  details: `/sandboxes/${id}/details`,
  snapshots: '/snapshots',
  templates: '/templates',
  functions: '/functions',
  hosts: '/hosts',
  keys: '/keys',
}
for (const colorScheme of ['light', 'dark']) {
  for (const width of [1280, 360]) {
    const context = await open(browser, { viewport: { width, height: 800 }, colorScheme, reducedMotion: 'reduce' })
    const page = await signInByCode(context)
    for (const [name, path] of Object.entries(pages)) {
      await page.goto(CONSOLE + path)
      await page.locator('.app h1, .app h2').first().waitFor()
      await page.waitForFunction(() => !document.querySelector('.skeleton'))
      await page.screenshot({ path: join(directory, `${name}-${colorScheme}-${width}.png`) })
    }
    await context.close()
  }
}

// A new context has no cache. The session was signed in before.
const first = await open(browser)
const state = await signInByCode(first).then(() => first.storageState())
await first.close()
const times = []
let transferred = 0
for (let load = 0; load < LOADS; load++) {
  const context = await open(browser, { storageState: state })
  const page = await context.newPage()
  const started = performance.now()
  await page.goto(`${CONSOLE}/sandboxes`)
  await page.locator('tbody tr[aria-rowindex]').first().waitFor()
  times.push(performance.now() - started)
  transferred = await page.evaluate(() =>
    performance
      .getEntriesByType('resource')
      .filter((entry) => new URL(entry.name).pathname.startsWith('/assets/'))
      .reduce((sum, entry) => sum + entry.encodedBodySize, 0),
  )
  await context.close()
}
await browser.close()
for (const s of await owner('GET', '/v2/sandboxes?limit=100')) await owner('DELETE', `/sandboxes/${s.sandboxID}`)
times.sort((a, b) => a - b)
const assets = new URL('../../web/dist/assets/', import.meta.url)
const compressed = readdirSync(assets).filter((name) => name.endsWith('.br'))
const total = compressed.reduce((sum, name) => sum + statSync(new URL(name, assets)).size, 0)
console.log(`screenshots: ${readdirSync(directory).length} files in ${directory}`)
console.log(`first page: ${Math.round(transferred / 1024)} KB, all files ${Math.round(total / 1024)} KB (Brotli)`)
console.log(`time to the first rows, cold cache: ${Math.round(times[LOADS >> 1])} ms (median of ${LOADS})`)
