// The journey by keyboard only: sign in, create a sandbox, take a snapshot, fork and roll back.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { CONSOLE, ADMIN_KEY, launch, open, owner, violations } from './browser.mjs'

let browser
let page
before(async () => {
  browser = await launch()
  page = await (await open(browser)).newPage()
})
after(async () => {
  for (const s of await owner('GET', '/v2/sandboxes?limit=100')) await owner('DELETE', `/sandboxes/${s.sandboxID}`)
  await browser?.close()
})

const press = (key) => page.keyboard.press(key)
/** Presses Tab until the focused element has a name, and returns the number of presses. */
async function tabTo(name) {
  for (let presses = 0; presses < 80; presses++) {
    const label = await page.evaluate(() => {
      const element = document.activeElement
      const label = element?.getAttribute('aria-label') ?? element?.labels?.[0]?.textContent
      return (label ?? element?.textContent ?? '').trim()
    })
    if (label === name) return
    await press('Tab')
  }
  throw new Error(`the keyboard does not reach ${name}`)
}
const dialog = (name) => page.getByRole('dialog', { name }).waitFor()
const closed = () => page.getByRole('dialog').waitFor({ state: 'detached' })

test('a user signs in, creates, forks and rolls back a sandbox by keyboard only', async () => {
  await page.goto(CONSOLE)
  await page.getByLabel('API key').waitFor()
  await page.keyboard.type(ADMIN_KEY)
  await press('Enter')
  await page.locator('.app').waitFor()

  await press('c')
  await dialog('New sandbox')
  await page.waitForFunction(() => document.activeElement?.closest('[role=dialog]'))
  await tabTo('Name')
  await page.keyboard.type('by-keyboard')
  await press('Enter')
  await page.waitForURL(/\/terminal$/)
  const id = new URL(page.url()).pathname.split('/')[2]

  // The shell receives all keys. A new page starts at the top.
  await page.goto(`${CONSOLE}/sandboxes/${id}/details`)
  await page.getByRole('heading', { name: 'by-keyboard' }).waitFor()
  await tabTo('Snapshot')
  await press('Enter')
  await dialog('Take a snapshot')
  await page.keyboard.type('start')
  await press('Enter')
  await closed()

  await tabTo('Fork')
  await press('Enter')
  await dialog(/^Fork/)
  await press('ControlOrMeta+a')
  await page.keyboard.type('2')
  await press('Enter')
  await closed()
  const forks = (await owner('GET', '/v2/sandboxes?limit=100')).filter((s) => s.forkedFrom === id)
  assert.equal(forks.length, 2)

  await tabTo('Roll back')
  await press('Enter')
  await page.locator('.point', { hasText: 'start' }).first().waitFor()
  await tabTo('Lineage. Use the arrow keys to select a point')
  const action = page.getByRole('button', { name: 'Roll back to here' })
  for (let presses = 0; presses < 8 && (await action.count()) === 0; presses++) {
    await press(presses % 4 === 3 ? 'ArrowUp' : 'ArrowDown')
    await page.locator(".point[data-selected='true']").waitFor()
  }
  await tabTo('Roll back to here')
  await press('Enter')
  await dialog(/^Roll back/)
  await tabTo('Roll back')
  await press('Enter')
  await closed()
  assert.equal((await owner('GET', `/sandboxes/${id}`)).state, 'running')
  assert.deepEqual(violations, [])
})
