// Events of a sandbox appear on its page and on the overview while they happen.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { go, launch, open, owner, signInByCode, violations } from './browser.mjs'

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
