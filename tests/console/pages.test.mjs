// Every page in both colour schemes: findings of axe, violated policies, and hostile data.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import {
  CREATE_KEY,
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

const HOSTILE = '<img src=x onerror=alert(1)>\u202e\u001b]0;x\u0007'
let browser
let context
let page
let sandbox
before(async () => {
  browser = await launch()
  context = await open(browser)
  page = await signInByCode(context)
  page.on('dialog', (dialog) => violations.push(`a dialog opened: ${dialog.message()}`))
  const created = await createSandbox({ name: 'pages', metadata: { [HOSTILE.slice(0, 27)]: HOSTILE } })
  sandbox = created.sandboxID
  await owner('POST', `/sandboxes/${sandbox}/snapshots`, { name: 'first' })
})
after(async () => {
  for (const s of await owner('GET', '/v2/sandboxes?limit=100')) await owner('DELETE', `/sandboxes/${s.sandboxID}`)
  await browser?.close()
})

const paths = () => [
  '/overview',
  '/sandboxes',
  '/new',
  '/snapshots',
  '/lineage',
  '/templates',
  '/functions',
  '/hosts',
  '/keys',
  '/audit',
  `/sandboxes/${sandbox}/terminal`,
  `/sandboxes/${sandbox}/files?path=/etc`,
  `/sandboxes/${sandbox}/files?path=/etc&file=passwd`,
  `/sandboxes/${sandbox}/charts`,
  `/sandboxes/${sandbox}/console`,
  `/sandboxes/${sandbox}/connections`,
  `/sandboxes/${sandbox}/ports`,
  `/sandboxes/${sandbox}/lineage?at=${sandbox}`,
  `/compare?a=first&b=${sandbox}`,
  `/sandboxes/${sandbox}/details`,
  '/sandboxes/does-not-exist',
]

for (const colorScheme of ['light', 'dark']) {
  test(`axe has no finding on any page (${colorScheme})`, async () => {
    await page.emulateMedia({ colorScheme, reducedMotion: 'reduce' })
    const all = []
    for (const path of paths()) {
      await go(page, path)
      await page.locator('h1, h2').first().waitFor()
      await page.waitForFunction(() => !document.querySelector('.skeleton'))
      for (const finding of await findings(page)) all.push(`${path}: ${finding}`)
    }
    assert.deepEqual(all, [])
    assert.deepEqual(violations, [])
  })
}

test('no page scrolls sideways from 360 to 2560 pixels', async () => {
  const wide = []
  for (const width of [360, 768, 2560]) {
    await page.setViewportSize({ width, height: 800 })
    for (const path of paths()) {
      await go(page, path)
      await page.locator('h1, h2').first().waitFor()
      const excess = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)
      if (excess > 0) wide.push(`${path} at ${width}: ${excess} pixels`)
    }
  }
  await page.setViewportSize({ width: 1360, height: 820 })
  assert.deepEqual(wide, [])
})

test('hostile names, metadata, files and output are shown as text', async () => {
  await go(page, `/sandboxes/${sandbox}/terminal`)
  await terminalShows(page, /[$#] *$/)
  const line =
    'mkdir -p /tmp/h && cd /tmp/h && printf "<script>alert(1)</script>" > "<img src=x onerror=alert(1)>.svg"; ' +
    'printf "\\033]52;c;aGk=\\007\\033]0;title\\007"; echo made-$((1 + 1))'
  await type(page, line)
  await terminalShows(page, /made-2/)
  assert.equal(await page.title(), 'Jiffy')
  await go(page, `/sandboxes/${sandbox}/files?path=/tmp/h`)
  await page.getByRole('button', { name: '<img src=x onerror=alert(1)>.svg', exact: true }).click()
  assert.equal(await page.getByRole('textbox', { name: /Content of/ }).innerText(), '<script>alert(1)</script>')
  assert.equal(await page.locator('img').count(), 0)
  await go(page, `/sandboxes/${sandbox}/details`)
  await page.getByText('⟨202E⟩').first().waitFor()
  await go(page, '/sandboxes?columns=' + encodeURIComponent(HOSTILE.slice(0, 27)))
  await page.getByText('⟨202E⟩').first().waitFor()
  assert.deepEqual(violations, [])
})

test('an idle timeout is set and shown, and is not reported as no timeout', async () => {
  const dialog = page.getByRole('dialog')
  const set = async (timeout, idle, amount) => {
    await page.getByRole('button', { name: 'More actions' }).click()
    await page.getByRole('menuitem', { name: 'Timeouts' }).click()
    await dialog.getByLabel('Unit of the timeout').selectOption(timeout)
    await dialog.getByLabel('Unit of the idle timeout').selectOption(idle)
    if (amount) await dialog.getByLabel('Idle timeout', { exact: true }).fill(amount)
    await dialog.getByRole('button', { name: 'Set the timeouts' }).click()
    await dialog.waitFor({ state: 'detached' })
    const { deadline_ms, terms } = (await owner('GET', `/sandboxes/${sandbox}`)).jiffy
    return [deadline_ms, terms.idle_timeout_s]
  }
  const none = page.getByText('no timeout', { exact: true })
  await go(page, `/sandboxes/${sandbox}/details`)
  assert.deepEqual(await set('no limit', 'min', '30'), [null, 1800])
  await page.getByText('pauses after 30 min without use').waitFor()
  assert.equal(await none.count(), 0)
  assert.deepEqual(await set('unchanged', 'never'), [null, undefined])
  await none.waitFor()
  assert.deepEqual(await set('unchanged', 'h', '2'), [null, 7200])
  await none.waitFor({ state: 'detached' })
  await go(page, '/sandboxes')
  await page.getByRole('row', { name: /pages/ }).getByText('idle 2 h').waitFor()
  assert.deepEqual(violations, [])
})

const hasConsole = ENGINES.includes('microvm')
const skip = !hasConsole && 'the console of a gVisor sandbox cannot be written by its processes'
test("a line of the guest's console is shown, and found by the search", { skip }, async () => {
  await go(page, `/sandboxes/${sandbox}/terminal`)
  await terminalShows(page, /[$#] *$/)
  await type(page, 'echo console-line-$((6 * 7)) | sudo tee /dev/console >/dev/null; echo written-$?')
  await terminalShows(page, /written-0/)
  await go(page, `/sandboxes/${sandbox}/console`)
  const line = page.locator('.log-line', { hasText: 'console-line-42' })
  await line.waitFor()
  const search = page.getByLabel('Search in the console log')
  await search.fill('no-such-line')
  await line.waitFor({ state: 'detached' })
  await page.getByText('0 lines match').waitFor()
  await search.fill('LINE-42')
  await line.waitFor()
  await page.getByText('1 line matches').waitFor()
  assert.deepEqual(violations, [])
})

test('a key of scope read sees sandboxes without actions, files and terminals', async () => {
  const reader = await signInByKey(await open(browser), READ_KEY, '/sandboxes')
  await reader.getByRole('row', { name: /pages/ }).waitFor()
  assert.equal(await reader.getByRole('link', { name: 'New sandbox' }).count(), 0)
  await reader.getByRole('link', { name: 'pages', exact: true }).click()
  await reader.getByText('No terminal with this key').waitFor()
  assert.equal(await reader.getByRole('button', { name: 'Pause' }).count(), 0)
  await reader.context().close()
})

test('a key of scope create does not see sandboxes of others', async () => {
  const tester = await signInByKey(await open(browser), CREATE_KEY, `/sandboxes/${sandbox}`)
  await tester.getByText('This sandbox does not exist').waitFor()
  await go(tester, '/overview')
  await tester.getByText('Running sandboxes').waitFor()
  await tester.context().close()
})

test('a session and its terminals end when it is terminated and when its key is revoked', async () => {
  const tester = await signInByKey(await open(browser), CREATE_KEY, '/new')
  await tester.getByRole('dialog').getByLabel('Name', { exact: true }).fill('revoked')
  await tester.getByRole('button', { name: 'Create', exact: true }).click()
  await terminalShows(tester, /[$#] *$/)
  const [session] = await tester.evaluate(async () =>
    (await fetch('/sessions', { headers: { 'jiffy-console': '1' } })).json(),
  )
  await owner('POST', `/keys/${session.keyID}/revoke`, { end: true })
  await tester.getByRole('heading', { name: 'Sign in' }).waitFor({ timeout: 10_000 })
  await tester.context().close()
})
