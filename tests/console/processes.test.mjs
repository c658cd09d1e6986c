// Processes of a sandbox are shown as a tree, filtered and ended by signals. On each engine.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import {
  createSandbox,
  ENGINES,
  findings,
  go,
  launch,
  open,
  owner,
  READ_KEY,
  signInByCode,
  signInByKey,
  terminalShows,
  type,
  violations,
} from './browser.mjs'

let browser
let page
let sandbox
before(async () => {
  browser = await launch()
  page = await signInByCode(await open(browser))
})
after(async () => {
  if (sandbox) await owner('DELETE', `/sandboxes/${sandbox}`)
  await browser?.close()
})

const dialog = () => page.getByRole('dialog')
const rows = (text) => page.getByRole('region', { name: 'Processes' }).getByRole('row').filter({ hasText: text })

for (const engine of ENGINES) {
  test(`processes are shown and receive signals, and hostile names are harmless (${engine})`, async () => {
    if (sandbox) await owner('DELETE', `/sandboxes/${sandbox}`)
    sandbox = (await createSandbox({ engine })).sandboxID
    await go(page, `/sandboxes/${sandbox}/terminal`)
    await terminalShows(page, /[$#] *$/)
    // A name with a control sequence, a reversal of text, markup and invalid UTF-8.
    const name = String.raw`$'\x1b[2J\xe2\x80\xae<b>evil</b>\xff'`
    await type(page, `(exec -a ${name} sleep 3000) & sleep 3001 & echo started-$((1 + 1))`)
    await terminalShows(page, /started-2/)

    await page.getByRole('link', { name: 'Processes' }).click()
    await rows('evil').first().waitFor()
    const text = await rows('evil').first().innerText()
    assert.match(text, /<b>evil<\/b>/)
    assert.doesNotMatch(text, /[\u001b\u202e]/)
    assert.deepEqual(await findings(page), [])

    await page.getByLabel('Filter processes').fill('sleep 3001')
    await rows('sleep 3001').waitFor()
    assert.equal(await rows('evil').count(), 0)
    await rows('sleep 3001').getByRole('button').click()
    await page.getByRole('menuitem', { name: 'Kill (SIGKILL)' }).click()
    await dialog().getByText('sleep 3001').first().waitFor()
    assert.deepEqual(await findings(page), [])
    await dialog().getByRole('button', { name: 'Send', exact: true }).click()
    await dialog().waitFor({ state: 'detached' })
    await page.getByText('No process matches').waitFor()
    const { processes } = await owner('GET', `/sandboxes/${sandbox}/processes?filter=evil&sort=memory`)
    assert.equal(processes.length, 1)
    assert.ok(processes[0].memoryBytes > 0 && processes[0].user === 'user', JSON.stringify(processes))
    assert.deepEqual(violations, [])
  })
}

test('a key of scope read sees no command lines', async () => {
  const reader = await signInByKey(await open(browser), READ_KEY, `/sandboxes/${sandbox}/processes`)
  await reader.getByText('No processes with this key').waitFor()
  assert.deepEqual(violations, [])
})
