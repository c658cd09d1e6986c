// Interruptions: a killed daemon, a lost network, guests that end, are paused or rolled back, a full
// disk, and two users of one sandbox.
import assert from 'node:assert/strict'
import { readFile, writeFile } from 'node:fs/promises'
import { after, before, test } from 'node:test'
import {
  ADMIN_KEY,
  createSandbox,
  go,
  launch,
  open,
  owner,
  signInByCode,
  signInByKey,
  terminalShows,
  type,
  violations,
} from './browser.mjs'

const { RESTARTS } = process.env
let browser
let context
let page
let sandbox
before(async () => {
  browser = await launch()
  context = await open(browser)
  page = await signInByCode(context)
  sandbox = (await createSandbox({ name: 'interrupted' })).sandboxID
})
after(async () => {
  for (const row of await owner('GET', '/v2/sandboxes')) await owner('DELETE', `/sandboxes/${row.sandboxID}`)
  await browser?.close()
})

/** Kills the daemon, and waits until a new one listens at the same addresses. */
async function restart() {
  await writeFile(`${RESTARTS}/request`, 'kill\n')
  assert.equal(await readFile(`${RESTARTS}/done`, 'utf8'), 'started\n')
}

/** Reads or writes a file of a sandbox, as another client. Returns status and text. */
const file = (id, path, content) =>
  page.evaluate(
    async ([id, at, body]) => {
      const headers = { 'jiffy-console': '1' }
      const init = body === undefined ? { headers } : { headers, method: 'PUT', body }
      const response = await fetch(`/guest/${id}/file?path=${encodeURIComponent(at)}`, init)
      return [response.status, await response.text()]
    },
    [id, path, content],
  )
const status = (of = page) => of.locator('.terminal-ending')
const dialog = (of = page) => of.getByRole('dialog')

test('a killed daemon ends terminals, and unsaved text, forms and sandboxes survive', async () => {
  await file(sandbox, '/home/user/notes.txt', 'first\n')
  const [editing, creating] = [await context.newPage(), await context.newPage()]
  await go(page, `/sandboxes/${sandbox}/terminal`)
  await terminalShows(page, /[$#] *$/)
  await type(page, 'echo $((6 * 7))-before')
  await terminalShows(page, /42-before/)
  await go(editing, `/sandboxes/${sandbox}/files?path=/home/user&file=notes.txt`)
  await editing.getByRole('textbox', { name: /Content of/ }).click()
  await editing.keyboard.press('Control+Home')
  await editing.keyboard.type('unsaved\n')
  await go(creating, '/new')
  await dialog(creating).getByLabel('Name', { exact: true }).fill('after-restart')
  await dialog(creating).getByLabel('Metadata').fill('suite=interruptions')

  await restart()

  // The text of the lost terminal stays readable.
  await status().waitFor()
  await terminalShows(page, /42-before/)
  await page.getByRole('button', { name: 'New terminal' }).first().click()
  await terminalShows(page, /[$#] *$/)
  await type(page, 'echo $((6 * 7))-after')
  await terminalShows(page, /42-after/)
  // The new daemon records no commands. It records terminals nevertheless.
  const { entries } = await owner('GET', `/audit?limit=1000&sandboxID=${sandbox}&call=live`)
  const last = entries.at(-1)
  assert.deepEqual([last.call, last.status, last.command], ['GET /live open', 200, undefined])
  assert.ok(last.sessionID && last.object)
  await editing.keyboard.press('Control+s')
  await editing.getByText('Saved notes.txt').last().waitFor()
  assert.deepEqual(await file(sandbox, '/home/user/notes.txt'), [200, 'unsaved\nfirst\n'])
  assert.equal(await dialog(creating).getByLabel('Name', { exact: true }).inputValue(), 'after-restart')
  await dialog(creating).getByRole('button', { name: 'Create', exact: true }).click()
  await creating.waitForURL(/\/terminal$/)
  // Pages receive the events of the new daemon.
  await go(page, '/sandboxes')
  const row = page.getByRole('row').filter({ hasText: 'after-restart' })
  await row.waitFor()
  const { sandboxID } = (await owner('GET', '/v2/sandboxes')).find((s) => s.jiffy?.name === 'after-restart')
  await owner('DELETE', `/sandboxes/${sandboxID}`)
  await row.waitFor({ state: 'detached' })
  await editing.close()
  await creating.close()
  assert.deepEqual(violations, [])
})

test('a page without a network says so, and shows the changes afterwards', async () => {
  await go(page, '/sandboxes')
  await page.getByRole('row').filter({ hasText: 'interrupted' }).waitFor()
  await context.setOffline(true)
  await page.evaluate(() => dispatchEvent(new Event('focus')))
  const banner = page.getByText('The daemon cannot be reached')
  await banner.waitFor()
  await createSandbox({ name: 'meanwhile' })
  await context.setOffline(false)
  await banner.waitFor({ state: 'detached' })
  await page.getByRole('row').filter({ hasText: 'meanwhile' }).waitFor()
  assert.deepEqual(violations, [])
})

test('a terminal states the pause, the rollback and the end of its sandbox', async () => {
  const id = (await createSandbox({ name: 'ending' })).sandboxID
  const { snapshotID } = await owner('POST', `/sandboxes/${id}/snapshots`, {})
  await go(page, `/sandboxes/${id}/terminal`)
  await terminalShows(page, /[$#] *$/)
  await type(page, 'echo $((6 * 7))-shown')
  await terminalShows(page, /42-shown/)
  await owner('POST', `/sandboxes/${id}/pause`)
  await status().waitFor()
  await terminalShows(page, /42-shown/)
  await page.getByText('paused').first().waitFor()
  await owner('POST', `/sandboxes/${id}/resume`, { timeout: 600 })
  await page.getByRole('button', { name: 'New terminal' }).first().click()
  await terminalShows(page, /[$#] *$/)
  await type(page, 'echo $((6 * 7))-retained')
  await terminalShows(page, /42-retained/)
  await owner('POST', `/sandboxes/${id}/rollback`, { snapshotID })
  await status().waitFor()
  await owner('DELETE', `/sandboxes/${id}`)
  // The text of both terminals stays readable until the user leaves the page.
  const killed = page.getByText('This sandbox was killed')
  await killed.waitFor()
  await terminalShows(page, /42-retained/)
  await page.getByRole('tablist', { name: 'Terminals' }).getByRole('tab').first().click()
  await terminalShows(page, /42-shown/)
  assert.ok(await page.getByRole('button', { name: 'New terminal' }).first().isDisabled())
  await page.getByRole('link', { name: 'All sandboxes' }).click()
  await page.waitForURL(/\/sandboxes$/)
  await page.goBack()
  await killed.waitFor()
  assert.equal(await page.locator('.terminal-pane').count(), 0)
  await owner('DELETE', `/templates/${snapshotID}`)
  assert.deepEqual(violations, [])
})

test('two users see the same shell', async () => {
  const other = await signInByKey(await open(browser), ADMIN_KEY, `/sandboxes/${sandbox}/terminal`)
  await go(page, `/sandboxes/${sandbox}/terminal`)
  await terminalShows(page, /[$#] *$/)
  await other.reload()
  await terminalShows(other, /[$#] *$/)
  await type(page, 'echo $((6 * 7))-of-one')
  await terminalShows(other, /42-of-one/)
  await type(other, 'echo $((6 * 7))-of-two')
  await terminalShows(page, /42-of-two/)
  await other.context().close()
  assert.deepEqual(violations, [])
})

test('a terminal that was never connected does not state that its shell continues to run', async () => {
  const unconnected = await context.newPage()
  await unconnected.addInitScript(() => {
    const { WebSocket } = globalThis
    // The handshake at this address fails.
    globalThis.WebSocket = class extends WebSocket {
      constructor(url) {
        super(String(url).replace(/live$/, 'assets/none'))
      }
    }
  })
  await go(unconnected, `/sandboxes/${sandbox}/terminal`)
  const banner = unconnected.locator('.terminal-pane:not([hidden]) .banner')
  await banner.filter({ hasText: 'No connection to the daemon' }).waitFor()
  assert.equal(await unconnected.getByText('the shell continues to run').count(), 0)
  await unconnected.close()
  assert.deepEqual(violations, [])
})

test('an upload to a full disk is rejected with the reason, and existing files remain', async () => {
  await file(sandbox, '/home/user/present', 'present\n')
  await go(page, `/sandboxes/${sandbox}/terminal`)
  await terminalShows(page, /[$#] *$/)
  await type(
    page,
    'sudo fallocate -l 100G /filler; sudo dd if=/dev/zero of=/filler2 bs=1M 2>/dev/null; echo full-$((6 * 7))',
  )
  await terminalShows(page, /full-42/)
  const [code, text] = await file(sandbox, '/home/user/upload', 'x'.repeat(8 << 20))
  assert.ok(code >= 400, `${code}`)
  assert.match(text, /space/)
  assert.deepEqual(await file(sandbox, '/home/user/present'), [200, 'present\n'])
  await owner('DELETE', `/sandboxes/${sandbox}`)
})

test('the buttons back and forward restore filters and tabs', async () => {
  const id = (await createSandbox({ name: 'history' })).sandboxID
  await go(page, '/sandboxes?q=history')
  const row = page.getByRole('row').filter({ hasText: 'history' })
  await row.waitFor()
  assert.equal(await page.locator('input[type=search]').first().inputValue(), 'history')
  await row.getByRole('link').first().click()
  await page.waitForURL(new RegExp(id))
  await page.getByRole('link', { name: 'Details' }).click()
  await page.waitForURL(/details/)
  await page.goBack()
  await page.goBack()
  await page.waitForURL(/q=history/)
  await row.waitFor()
  await page.goForward()
  await page.goForward()
  await page.waitForURL(/details/)
  assert.deepEqual(violations, [])
})
