// The table of sandboxes with 10,000 rows and 50 changes per second stays usable and shows the
// changes, and a lineage of 2,000 objects is drawn at once. bench/console measures both for longer.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { createSandbox, go, launch, open, owner, signInByCode, violations } from './browser.mjs'
import { drawLineage, simulateLineage } from './large-lineage.mjs'
import { openTable, scroll, simulate } from './large-table.mjs'

const ROWS = 10_000
let browser
let page
let id
before(async () => {
  browser = await launch()
  page = await signInByCode(await open(browser))
  id = (await createSandbox({})).sandboxID
})
after(async () => {
  await owner('DELETE', `/sandboxes/${id}`).catch(() => {})
  await browser?.close()
})

test('a table of 10,000 rows with 50 changes per second stays usable', async () => {
  const simulated = await simulate(page, id, ROWS)
  await openTable(page, ROWS)
  await simulated.start(50)
  const figures = await scroll(page, 4)
  await simulated.stop()
  const { framesPerSecond, longestTask, heap } = figures
  const rounded = [framesPerSecond, longestTask, heap].map((figure) => figure.toFixed(0))
  const text = `${rounded[0]} frames/s, longest task ${rounded[1]} ms, heap ${rounded[2]} MB`
  console.log(text)
  // The targets are 50 frames/s, 100 ms and 150 MB. The limits are generous, because other tests run.
  assert.ok(framesPerSecond > 3 && longestTask < 500 && heap < 100, text)
  assert.ok(figures.position > 0 && (await simulated.changed()) > 50)
  // A change of a visible row is shown.
  await page.evaluate(() => document.querySelector('.table-wrap[aria-label="Sandboxes"]').scrollTo(0, 0))
  const first = page.getByRole('row').filter({ has: page.getByRole('link', { name: 'sandbox-0', exact: true }) })
  await first.getByText(await simulated.stateOf(0)).waitFor()
  // The first row is not drawn again between both clicks, and remains selected.
  const boxes = page.getByRole('checkbox', { name: /^Select sandbox-/ })
  await boxes.nth(0).click()
  await boxes.nth(1).click()
  await page.getByText('2 selected', { exact: true }).waitFor()
  assert.deepEqual(violations, [])
})

test('all rows that match are selected over all pages, and an action reaches each of them once', async () => {
  const simulated = await simulate(page, id, ROWS)
  await openTable(page, ROWS)
  const all = page.getByRole('checkbox', { name: 'Select all that match' })
  await all.check()
  await page.getByText('10,000 selected', { exact: true }).waitFor()
  await page.getByRole('button', { name: 'Clear' }).click()
  // 12, 120 to 129 and 1200 to 1299: more than a page of the API, and rows of several pages.
  await page.getByLabel('Filter by text').fill('sandbox-12')
  await page.getByText(`111 of ${ROWS.toLocaleString('en-US')}`).waitFor()
  const first = page.getByRole('checkbox', { name: /^Select sandbox-/ }).first()
  await first.click()
  await page.getByRole('button', { name: 'Select all 111 that match' }).click()
  await page.getByText('111 selected', { exact: true }).waitFor()
  const paused = []
  await page.route(/\/api\/sandboxes\/i\d+x\/pause$/, (route) => {
    paused.push(Number(/i(\d+)x/.exec(route.request().url())[1]))
    return route.fulfill({ status: 204 })
  })
  await page.getByRole('toolbar').getByRole('button', { name: 'Pause' }).click()
  const dialog = page.getByRole('dialog')
  await dialog.getByText('and 101 more').waitFor()
  await dialog.getByRole('button', { name: 'Pause', exact: true }).click()
  await dialog.getByText('111 of 111 done', { exact: true }).waitFor()
  const range = (from, to) => Array.from({ length: to - from }, (_, at) => from + at)
  const expected = [12, ...range(120, 130), ...range(1200, 1300)]
  assert.deepEqual(paused.toSorted((a, b) => a - b), expected)
  await dialog.getByRole('button', { name: 'Close', exact: true }).last().click()
  await simulated.stop()
  assert.deepEqual(violations, [])
})

test('a lineage of 2,000 objects is drawn at once, and all its points are listed', async () => {
  const fresh = await page.context().newPage()
  const nodes = await simulateLineage(fresh, id, 2000)
  // The graph does not wait for the list of sandboxes.
  await fresh.route('**/api/v2/sandboxes*', () => {})
  const duration = await drawLineage(fresh, id)
  console.log(`lineage drawn in ${duration.toFixed(0)} ms`)
  // The target is 300 ms.
  assert.ok(duration < 1500, `${duration} ms`)
  const listed = fresh.getByRole('list', { name: 'Points as a list' })
  const snapshots = nodes.filter((node) => node.kind === 'snapshot')
  await listed.getByRole('button').nth(nodes.length - 1).waitFor({ state: 'attached' })
  assert.equal(await listed.getByRole('button').count(), nodes.length)
  // A point far below is drawn when it is selected.
  const last = snapshots.at(-1).id
  assert.equal(await fresh.locator(`.graph [data-key="${last}"]`).count(), 0)
  for (const path of [`/sandboxes/${id}/lineage?at=${last}`, `/lineage?of=${id}&at=${last}`, `/lineage?at=${last}`]) {
    await go(fresh, path)
    await fresh.locator(`.graph [data-key="${last}"][data-selected=true]`).waitFor()
  }
  await fresh.close()
  assert.deepEqual(violations, [])
})
