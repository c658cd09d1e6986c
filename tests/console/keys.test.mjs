// Keys are created, rotated and revoked in the browser.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { API, findings, go, launch, open, owner, signInByCode, violations } from './browser.mjs'

const NAME = `key <b>'"$(id)`
let browser
let page
before(async () => {
  browser = await launch()
  page = await signInByCode(await open(browser))
})
after(() => browser?.close())

const dialog = () => page.getByRole('dialog')
/** The row of a key in the list of keys, not in the list of their usage. */
const row = (name) => page.getByRole('region', { name: 'Keys', exact: true }).getByRole('row', { name })
const button = (name) => dialog().getByRole('button', { name, exact: true })
/** Calls the API with a secret and returns the status. */
const call = async (secret, path, body) => {
  const request = { headers: { 'x-api-key': secret, 'content-type': 'application/json' } }
  if (body) Object.assign(request, { method: 'POST', body: JSON.stringify(body) })
  const response = await fetch(API + path, request)
  return { status: response.status, body: await response.json().catch(() => undefined) }
}
/** Opens the dialog of an action on the key. */
const act = async (action) => {
  await row(NAME)
    .getByRole('button', { name: /^Actions on/ })
    .click()
  await page.getByRole('menuitem', { name: action }).click()
}
/** Returns the shown secret and closes its dialog. */
const takeSecret = async () => {
  await dialog().getByText('Copy the secret now.').waitFor()
  const secret = await dialog().locator('pre').innerText()
  // Neither Escape nor a click outside loses the secret.
  await page.keyboard.press('Escape')
  await page.mouse.click(2, 2)
  assert.equal(await dialog().locator('pre').innerText(), secret)
  await button('Done').click()
  await dialog().waitFor({ state: 'detached' })
  return secret
}

test('a key is created with limits, used, rotated and revoked, and its secret is shown once', async () => {
  await go(page, '/keys')
  await page.getByRole('button', { name: 'Create a key' }).click()
  await dialog().getByLabel('Name', { exact: true }).fill(NAME)
  await dialog().getByLabel('Scope').selectOption('create')
  await dialog().getByLabel('Expires').selectOption('30')
  await dialog().getByLabel('Addresses').fill('127.0.0.0/8 ::1/128')
  await dialog().getByLabel('Running sandboxes').fill('2')
  await dialog().getByLabel('Memory in MiB').fill('4096')
  assert.deepEqual(await findings(page), [])
  await button('Create').click()
  const first = await takeSecret()
  assert.match(first, /^e2b_[0-9a-f]+$/)
  assert.ok(!(await page.content()).includes(first), 'the secret is still in the page')
  const created = (await owner('GET', '/keys')).find((k) => k.name === NAME)
  assert.deepEqual(created.limits, { sandboxes: 2, memoryMB: 4096 })
  assert.equal(created.scope, 'create')
  assert.deepEqual(created.addresses, ['127.0.0.0/8', '::1/128'])
  const days = (Date.parse(created.expiresAt) - Date.now()) / 86_400_000
  assert.ok(days > 29.9 && days <= 30, `expires in ${days} days`)

  const sandbox = await call(first, '/v2/sandboxes', { templateID: 'base', timeout: 600 })
  assert.equal(sandbox.status, 201, JSON.stringify(sandbox.body))

  await row(NAME).getByRole('button', { name: NAME, exact: true }).click()
  const meter = dialog().getByRole('meter', { name: `Running sandboxes of ${NAME}` })
  assert.equal(await meter.getAttribute('aria-valuenow'), '50')
  assert.equal(new URL(page.url()).searchParams.get('use'), created.keyID)
  assert.deepEqual(await findings(page), [])
  await button('Close').click()

  await act('Rotate')
  await button('Rotate').click()
  const second = await takeSecret()
  assert.equal((await call(first, '/limits')).status, 401)
  assert.equal((await call(second, '/limits')).status, 200)

  await act('Revoke')
  await dialog()
    .getByRole('checkbox', { name: /Also kill its sandboxes/ })
    .check()
  await button('Revoke').click()
  await dialog().waitFor({ state: 'detached' })
  assert.equal((await call(second, '/limits')).status, 401)
  const { state } = await owner('GET', `/sandboxes/${sandbox.body.sandboxID}`)
  assert.equal(state, 'killed')
  await page.getByLabel('State', { exact: true }).selectOption('revoked')
  await row(NAME).getByText('revoked').waitFor()
  assert.equal(new URL(page.url()).searchParams.get('state'), 'revoked')

  // The usage of a revoked key remains.
  await page.reload()
  const usage = page.getByRole('region', { name: 'Usage', exact: true })
  await usage.getByRole('button', { name: NAME, exact: true }).click()
  await usage.getByRole('heading', { name: `Usage of ${NAME}` }).waitFor()
  await usage.getByRole('cell', { name: new Date().toISOString().slice(0, 10) }).waitFor()
  assert.deepEqual(await findings(page), [])
  await usage.getByRole('button', { name: 'All keys' }).click()
  assert.deepEqual(violations, [])
})

test('a rejected key shows the message and the code of the API, and the form remains', async () => {
  await go(page, '/keys')
  await page.getByRole('button', { name: 'Create a key' }).click()
  await dialog().getByLabel('Name', { exact: true }).fill('rejected')
  await dialog().getByLabel('Addresses').fill('not-an-address')
  await button('Create').click()
  await dialog().getByRole('alert').getByText('error_code').waitFor()
  assert.equal(await dialog().getByLabel('Name', { exact: true }).inputValue(), 'rejected')
  await button('Cancel').click()
})
