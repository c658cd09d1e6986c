// Events of a sandbox appear on its page and on the overview while they happen, and calls on the page
// of the audit log.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { API, go, launch, open, owner, signInByCode, violations } from './browser.mjs'

let browser
let page
let sandbox
before(async () => {
  browser = await launch()
  page = await signInByCode(await open(browser))
  sandbox = (await owner('POST', '/v2/sandboxes', { templateID: 'base', timeout: 600 })).sandboxID
})
after(async () => {
  if (sandbox) await owner('DELETE', `/sandboxes/${sandbox}`)
  await browser?.close()
})

const events = () => page.getByRole('region', { name: 'Events' })

test('the events of a sandbox appear on its page and on the overview', async () => {
  await go(page, `/sandboxes/${sandbox}/details`)
  await events().getByText('sandbox.ready').waitFor()
  await owner('POST', `/sandboxes/${sandbox}/pause`)
  await events().getByText('sandbox.paused').waitFor()
  await go(page, '/overview')
  await events().getByText('sandbox.paused').first().waitFor()
  assert.deepEqual(violations, [])
})

test('administrators find calls by method, key and result', async () => {
  const calls = page.getByRole('region', { name: 'Calls' })
  await go(page, '/audit')
  await calls.getByText('POST /sandboxes/{sandboxID}/pause').first().waitFor()
  await calls.getByText(sandbox).first().waitFor()
  // A call of an unknown key is rejected and counted.
  await fetch(`${API}/v2/sandboxes`, { headers: { 'X-API-KEY': 'e2b_unknown' } })
  await page.getByLabel('Result').selectOption('rejected')
  await calls.getByText('unauthenticated').first().waitFor()
  assert.equal(await calls.getByText('/pause').count(), 0)
  await page.getByLabel('Result').selectOption('')
  await page.getByLabel('Filter by call').fill('DELETE /nothing')
  await page.getByText('No call matches').waitFor()
  assert.match(page.url(), /call=DELETE/)
  assert.deepEqual(violations, [])
})
