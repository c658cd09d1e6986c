// Long lists and logs, the commands of views, reasons of states, folded snapshots, recipes, and the
// clipboard and limits of terminals.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { createSandbox, findings, go, launch, open, owner, signInByCode, terminalShows, type, violations } from './browser.mjs'

const MAX_TERMINALS = 32
const ENTRIES = 3000
const LINES = 5000
const BUILDS = 2000
/** Maximum number of rows in the document. */
const DRAWN = 150

let browser
let context
let page
let id
before(async () => {
  browser = await launch()
  context = await open(browser, { permissions: ['clipboard-read', 'clipboard-write'] })
  page = await signInByCode(context)
  id = (await createSandbox({ name: 'views' })).sandboxID
})
after(async () => {
  for (const s of await owner('GET', '/v2/sandboxes?limit=100')) await owner('DELETE', `/sandboxes/${s.sandboxID}`)
  await browser?.close()
})

const button = (name, of = page) => of.getByRole('button', { name, exact: true })
const dialog = () => page.getByRole('dialog')
const copied = () => page.evaluate(() => navigator.clipboard.readText())
const time = (number) => new Date(Date.UTC(2026, 0, 1) + number * 1000).toISOString()

test('an audit log of thousands of entries has few rows in the document, and shows its command', async () => {
  const entries = Array.from({ length: ENTRIES }, (_, number) => ({
    id: `e${number}`,
    time: time(number),
    host: 'h',
    caller: 'owner',
    call: `GET /call-${number}`,
    command: number % 3 === 0 ? `command ${number}` : undefined,
    status: 200,
    ms: 1,
    count: 1,
  }))
  await page.route('**/api/audit?*', (route) => route.fulfill({ json: { entries, more: false } }))
  await go(page, '/audit?call=GET&result=rejected')
  const rows = page.getByRole('region', { name: 'Calls' }).locator('tbody tr[aria-rowindex]')
  await page.getByText('3,000 entries').waitFor()
  await page.getByText('GET /call-0', { exact: true }).waitFor()
  assert.ok((await rows.count()) < DRAWN, `${await rows.count()} rows`)
  await page.getByRole('region', { name: 'Calls' }).evaluate((box) => box.scrollTo(0, box.scrollHeight))
  await page.getByText(`GET /call-${ENTRIES - 1}`, { exact: true }).waitFor()
  assert.ok((await rows.count()) < DRAWN)
  await page.getByText('jiffy audit --call=GET --rejected', { exact: true }).waitFor()
  await button('Copy the command').click()
  assert.equal(await copied(), 'jiffy audit --call=GET --rejected')
  assert.deepEqual(await findings(page), [])
  await page.unroute('**/api/audit?*')
  assert.deepEqual(violations, [])
})

test('a build log of thousands of lines is followed and searched with few lines in the document', async () => {
  await page.route('**/api/templates/long/builds/*/status?*', (route) => {
    const from = Number(new URL(route.request().url()).searchParams.get('logsOffset'))
    const logs = Array.from({ length: Math.min(100, LINES - from) }, (_, at) => {
      const text = `line ${from + at} of the log`
      return (from + at) % 7 === 0 ? `${text} ${'long '.repeat(60)}` : text
    })
    return route.fulfill({ json: { templateID: 'long', buildID: 'b', status: 'ready', logs, logEntries: [] } })
  })
  await go(page, '/templates?build=long/b')
  const log = dialog().getByRole('log')
  await log.getByText(`line ${LINES - 1} of the log`).waitFor()
  await dialog().getByText('5,000 lines').waitFor()
  assert.ok((await log.locator('.log-line').count()) < DRAWN)
  await log.focus()
  await page.keyboard.press('Home')
  await log.getByText('line 0 of the log').waitFor()
  assert.ok(!(await dialog().getByRole('checkbox', { name: 'Follow' }).isChecked()))
  await dialog().getByLabel('Search in the log').fill('LINE 4321 ')
  await dialog().getByText('1 line matches').waitFor()
  await log.getByText('line 4321 of the log').waitFor()
  await button('As a command', dialog()).click()
  await dialog().getByText('/templates/long/builds/b/logs').first().waitFor()
  assert.deepEqual(await findings(page), [])
  await page.unroute('**/api/templates/long/builds/*/status?*')
  assert.deepEqual(violations, [])
})

test('a template with thousands of builds has few of them in the document', async () => {
  const templates = await owner('GET', '/templates')
  const base = templates.find((t) => t.names.includes('base'))
  const build = (number) => ({ buildID: `build-${number}`, status: 'ready', createdAt: time(number) })
  await page.route(`**/api/templates/${base.templateID}`, (route) =>
    route.fulfill({ json: { ...base, builds: Array.from({ length: BUILDS }, (_, number) => build(number)) } }),
  )
  await go(page, '/templates')
  await button(`Actions on ${base.names[0]}`).click()
  await page.getByRole('menuitem', { name: 'History' }).click()
  await dialog().getByText('2,000 builds').waitFor()
  assert.ok((await dialog().getByRole('listitem').count()) < DRAWN)
  await dialog()
    .getByRole('region', { name: 'Builds' })
    .evaluate((box) => box.scrollTo(0, box.scrollHeight))
  await dialog().getByText(`build-${BUILDS - 1}`).waitFor()
  assert.deepEqual(await findings(page), [])
  await page.unroute(`**/api/templates/${base.templateID}`)
  assert.deepEqual(violations, [])
})

test('logs of sandboxes show the command that follows them', async () => {
  await go(page, `/sandboxes/${id}/console`)
  await page.getByText(`jiffy logs -f ${id}`, { exact: true }).waitFor()
  await button('Copy the command').click()
  assert.equal(await copied(), `jiffy logs -f ${id}`)
  await go(page, `/sandboxes/${id}/connections`)
  await page.getByText(`jiffy logs --network ${id}`, { exact: true }).waitFor()
  assert.deepEqual(violations, [])
})

test('the table states why a sandbox is paused or broken', async () => {
  const paused = (await createSandbox({ name: 'reason-timeout', timeout: 1, autoPause: true })).sandboxID
  const broken = (await createSandbox({ name: 'reason-broken' })).sandboxID
  const { pid } = await owner('GET', `/sandboxes/${broken}/process`)
  process.kill(pid, 'SIGKILL')
  await go(page, '/sandboxes?q=reason')
  const row = (name) => page.getByRole('row').filter({ hasText: name })
  await row('reason-timeout').getByText('its timeout was over').waitFor()
  await row('reason-broken').getByText('broken', { exact: true }).waitFor()
  const { cause } = (await owner('GET', `/sandboxes/${broken}`)).jiffy
  assert.ok(cause.length > 10, cause)
  await row('reason-broken').getByText(cause.slice(0, 20)).waitFor()
  // Also on a narrow page, where rows are cards.
  await page.setViewportSize({ width: 400, height: 800 })
  await row('reason-broken').getByText(cause.slice(0, 20)).waitFor()
  assert.deepEqual(await findings(page), [])
  await page.setViewportSize({ width: 1360, height: 820 })
  await owner('POST', `/sandboxes/${paused}/resume`, { timeout: 600 })
  await row('reason-timeout').getByText('running', { exact: true }).waitFor()
  await row('reason-timeout').getByText('its timeout was over').waitFor({ state: 'detached' })
  for (const one of [paused, broken]) await owner('DELETE', `/sandboxes/${one}`)
  assert.deepEqual(violations, [])
})

test('a series of automatic snapshots is unfolded and folded again', async () => {
  const PAUSES = 6
  const snapshot = (number, count) => ({
    id: `s${number}`,
    kind: 'snapshot',
    state: 'ready',
    purpose: 'pause',
    createdAt: time(number),
    sandboxID: id,
    parentSnapshotID: number > 1 && count === 1 ? `s${number - 1}` : undefined,
    bytes: 1 << 20,
    count,
  })
  const requested = []
  await page.route('**/api/lineage?*', (route) => {
    const unfold = new URL(route.request().url()).searchParams.get('unfold')
    requested.push(unfold)
    const series =
      unfold === `s${PAUSES}`
        ? Array.from({ length: PAUSES }, (_, at) => snapshot(at + 1, 1))
        : [snapshot(PAUSES, PAUSES)]
    const sandbox = { id, kind: 'sandbox', state: 'running', createdAt: time(0), count: 1 }
    const edges = series.map((node) => ({ from: node.id, to: id, relation: 'snapshot_of' }))
    return route.fulfill({ json: { nodes: [sandbox, ...series], edges, truncated: false } })
  })
  await go(page, `/sandboxes/${id}/lineage?at=s${PAUSES}`)
  await page.getByText(`${PAUSES} snapshots, of which the newest is used`).waitFor()
  await button('Unfold').click()
  await page.locator('.graph [data-key=s1]').waitFor()
  assert.equal(await page.locator('.graph [data-key^=s]').count(), PAUSES)
  await page.locator('.graph [data-key=s2]').click()
  await page.waitForURL(/at=s2/)
  await button('Fold series of snapshots').click()
  await page.locator('.graph [data-key=s1]').waitFor({ state: 'detached' })
  assert.deepEqual([...new Set(requested)], [null, `s${PAUSES}`])
  await page.unroute('**/api/lineage?*')
  assert.deepEqual(violations, [])
})

test('a stock template is built from its recipe, with its log', async () => {
  const state = async () => (await owner('GET', '/recipes')).find(({ name }) => name === 'base').state
  assert.equal(await state(), 'ready')
  await go(page, '/templates')
  await button('Build a template').click()
  await dialog().getByLabel('Source').selectOption('recipe')
  assert.equal(await dialog().getByLabel('Name', { exact: true }).count(), 0)
  await dialog().getByLabel('Recipe', { exact: true }).selectOption('base')
  await dialog().getByText('base: up to date').waitFor({ state: 'attached' })
  await button('As a command', dialog()).click()
  await dialog().getByText('jiffy template build base', { exact: true }).waitFor()
  assert.deepEqual(await findings(page), [])
  await button('Build', dialog()).click()
  await page.waitForURL(/build=recipe/)
  await dialog().getByRole('log').getByText('the template is ready').waitFor()
  await dialog().locator('.badge', { hasText: 'ready' }).waitFor()
  assert.equal((await owner('GET', '/recipes/base/build')).status, 'ready')
  await button('Close', dialog()).last().click()
  assert.deepEqual(violations, [])
})

test('a flood of lines leaves the last 10,000 lines in the terminal', async () => {
  await go(page, `/sandboxes/${id}/terminal`)
  await terminalShows(page, /[$#] *$/)
  await type(page, 'seq 1 300000; echo flood-$((1 + 1))')
  await terminalShows(page, /299999 *300000 *flood-2/)
  await button('Search').click()
  const search = page.getByLabel('Search in the terminal')
  for (const number of ['290100', '295555', '299999']) {
    await search.fill(number)
    await search.press('Enter')
    await button('Copy (Ctrl Shift C)').click()
    assert.equal(await copied(), number)
  }
  await search.press('Escape')
  assert.deepEqual(violations, [])
})

test('the buttons of a terminal copy the selection, and paste several lines only after a question', async () => {
  await go(page, `/sandboxes/${id}/terminal`)
  await terminalShows(page, /[$#] *$/)
  await type(page, 'echo selected-$((6 * 7))')
  await terminalShows(page, /selected-42/)
  const word = page.locator('.xterm-rows > div', { hasText: /^selected-42/ }).first()
  const { x, y, height } = await word.boundingBox()
  // A double click selects the word at the start of the line.
  await page.mouse.dblclick(x + 20, y + height / 2)
  await button('Copy (Ctrl Shift C)').click()
  await page.waitForFunction(async () => (await navigator.clipboard.readText()).includes('selected-42'))

  const write = (text) => page.evaluate((text) => navigator.clipboard.writeText(text), text)
  await write('echo one-$((40 + 1))')
  await button('Paste (Ctrl Shift V)').click()
  await terminalShows(page, /echo one-/)
  assert.equal(await dialog().count(), 0)
  await page.locator('.terminal-pane:not([hidden]) .xterm-helper-textarea').focus()
  await page.keyboard.press('Enter')
  await terminalShows(page, /one-41/)

  await write('echo two-$((40 + 2))\necho three-$((40 + 3))\n')
  await button('Paste (Ctrl Shift V)').click()
  await dialog().getByText('A shell executes each line at once.').waitFor()
  await button('Cancel', dialog()).click()
  await dialog().waitFor({ state: 'detached' })
  await button('Paste (Ctrl Shift V)').click()
  await button('Paste', dialog()).click()
  await page.keyboard.press('Enter')
  await terminalShows(page, /two-42[\s\S]*three-43/)
  // The rejected paste did not reach the shell.
  const text = await page.locator('.terminal-pane:not([hidden]) .xterm-rows').textContent()
  assert.equal(text.match(/two-42/g).length, 1, text)
  assert.deepEqual(violations, [])
})

test('the terminal above the limit of a sandbox is rejected with a readable reason', async () => {
  await go(page, `/sandboxes/${id}/terminal`)
  await terminalShows(page, /[$#] *$/)
  const { terminals } = await page.evaluate(async (id) => {
    const headers = { 'jiffy-console': '1' }
    return (await fetch(`/guest/${id}/terminals`, { headers })).json()
  }, id)
  const open = terminals.filter(({ status }) => status.state === 'running').length
  await page.evaluate(
    async ([id, count]) => {
      const socket = new WebSocket(`ws://${location.host}/live`)
      await new Promise((resolve) => (socket.onopen = resolve))
      let opened = 0
      const all = new Promise((resolve, reject) => {
        socket.onmessage = ({ data }) => {
          const notice = typeof data === 'string' ? JSON.parse(data) : {}
          if (notice.type === 'failed') reject(new Error(notice.message))
          if (notice.type === 'opened' && ++opened === count) resolve()
        }
      })
      for (let stream = 1; stream <= count; stream++) {
        socket.send(JSON.stringify({ type: 'open', stream, sandbox: id, cols: 80, rows: 24, shell: 'sh' }))
      }
      await all
      globalThis.further = socket
    },
    [id, MAX_TERMINALS - open],
  )
  await button('New terminal').first().click()
  const ending = page.locator('.terminal-ending')
  await ending.getByText('too many terminals: a sandbox may have 32').waitFor()
  assert.deepEqual(await findings(page), [])
  // After the end of one, a new one opens.
  await page.evaluate(() => globalThis.further.send(JSON.stringify({ type: 'end', stream: 1 })))
  for (const end = Date.now() + 30_000; ;) {
    await ending.getByRole('button', { name: 'New terminal' }).click()
    const isOpen = await terminalShows(page, /[$#] *$/).then(
      () => true,
      () => false,
    )
    if (isOpen && (await ending.count()) === 0) break
    assert.ok(Date.now() < end)
  }
  assert.deepEqual(violations, [])
})
