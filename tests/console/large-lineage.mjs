// A lineage of many objects, from answers that are simulated below the page.
import { CONSOLE, owner } from './browser.mjs'

const SNAPSHOTS_PER_SANDBOX = 9

/** Replaces the lineage of the sandbox `id` by one of `count` objects: forks with snapshots. */
export async function simulateLineage(page, id, count) {
  const answer = await owner('GET', `/lineage?sandboxID=${id}`)
  const time = (number) => new Date(Date.UTC(2026, 0, 1) + number * 1000).toISOString()
  const nodes = []
  const edges = []
  let last
  for (let number = 0; nodes.length < count; number++) {
    const sandboxID = number === 0 ? id : `i${String(number).padStart(18, '0')}x`
    const at = time(nodes.length)
    nodes.push({ id: sandboxID, kind: 'sandbox', state: 'running', createdAt: at, count: 1, name: `fork-${number}` })
    if (last) edges.push({ from: sandboxID, to: last, relation: 'started_from', at })
    let parent
    for (let taken = 0; taken < SNAPSHOTS_PER_SANDBOX && nodes.length < count; taken++) {
      const snapshot = `s${String(nodes.length).padStart(18, '0')}x`
      const createdAt = time(nodes.length)
      nodes.push({
        id: snapshot,
        kind: 'snapshot',
        state: 'ready',
        purpose: 'asked',
        createdAt,
        sandboxID,
        parentSnapshotID: parent,
        bytes: 1 << 20,
        count: 1,
      })
      edges.push({ from: snapshot, to: sandboxID, relation: 'snapshot_of' })
      parent = snapshot
      if (number % 7 === 0 && taken === 4) last = snapshot
    }
  }
  await page.route('**/api/lineage?*', (route) =>
    route.fulfill({ json: { ...answer, nodes, edges, truncated: false } }),
  )
  return nodes
}

/** Opens the page, and returns the time from the answer to the drawn graph in ms. */
export async function drawLineage(page, id) {
  await page.goto(`${CONSOLE}/sandboxes/${id}/details`)
  await page.locator('.app').waitFor()
  await page.evaluate(() => {
    globalThis.drawn = new Promise((resolve) => {
      const check = () => {
        if (!document.querySelector('.graph [data-key]')) return
        observer.disconnect()
        // After the frame that shows the graph.
        requestAnimationFrame(() => setTimeout(() => resolve(performance.now())))
      }
      const observer = new MutationObserver(check)
      observer.observe(document.body, { subtree: true, childList: true })
    })
    const { fetch } = globalThis
    globalThis.fetch = async (input, init) => {
      const response = await fetch(input, init)
      if (String(input.url ?? input).includes('/lineage?')) globalThis.answered = performance.now()
      return response
    }
  })
  await page
    .getByRole('tab', { name: 'Lineage' })
    .or(page.getByRole('link', { name: 'Lineage' }).last())
    .first()
    .click()
  return page.evaluate(async () => (await globalThis.drawn) - globalThis.answered)
}
