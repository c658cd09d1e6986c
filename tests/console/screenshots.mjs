// Takes screenshots of all pages, in light and dark, wide and narrow. Started by
// tests/console/run --screenshots DIRECTORY.
import { mkdirSync, readdirSync } from 'node:fs'
import { join } from 'node:path'
import { CONSOLE, createSandbox, launch, open, owner, signInByCode } from './browser.mjs'

const directory = process.env.SCREENSHOTS
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

await browser.close()
for (const s of await owner('GET', '/v2/sandboxes?limit=100')) await owner('DELETE', `/sandboxes/${s.sandboxID}`)
console.log(`screenshots: ${readdirSync(directory).length} files in ${directory}`)
