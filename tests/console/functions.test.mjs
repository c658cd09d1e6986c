// Functions are deployed, tested, rolled back and removed, and templates are built and tagged.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import {
  createSandbox,
  findings,
  go,
  launch,
  open,
  owner,
  READ_KEY,
  signInByCode,
  signInByKey,
  violations,
} from './browser.mjs'
import { moduleOf } from './wasm.mjs'

let browser
let page
before(async () => {
  browser = await launch()
  page = await signInByCode(await open(browser))
})
after(() => browser?.close())

const dialog = () => page.getByRole('dialog')
const button = (name) => page.getByRole('button', { name, exact: true })

/** Drops a file on an element. */
async function drop(target, name, content) {
  const transfer = await page.evaluateHandle(
    ([file, data]) => {
      const result = new DataTransfer()
      result.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], file))
      return result
    },
    [name, content.toString('base64')],
  )
  await target.dispatchEvent('drop', { dataTransfer: transfer })
}

test('a function is deployed by drop, tested, rolled back and removed', async () => {
  await go(page, '/functions')
  await page.getByText('No functions yet').waitFor()
  await drop(page.locator('.drop-target'), 'Hello World.wasm', moduleOf('<script>alert(1)</script>one'))
  assert.equal(await dialog().getByLabel('Name').inputValue(), 'hello-world')
  await dialog().getByLabel('Environment').fill('TOKEN=a=b')
  await dialog().getByRole('button', { name: 'Deploy' }).click()
  await page.waitForURL(/\/functions\/hello-world/)

  await page.getByRole('link', { name: 'Test request' }).click()
  await page.getByLabel('Method').selectOption('POST')
  await page.getByLabel('Body', { exact: true }).fill('x')
  await button('Send').click()
  const response = page.getByRole('region', { name: 'Response' })
  await response.getByText('<script>alert(1)</script>one').waitFor()

  await button('Deploy').click()
  await drop(dialog().locator('.drop-zone'), 'two.wasm', moduleOf('two'))
  await dialog().getByRole('button', { name: 'Deploy' }).click()
  await dialog().waitFor({ state: 'detached' })
  await page.getByText('version 2', { exact: true }).waitFor()
  await button('Send').click()
  await response.getByText('two', { exact: true }).waitFor()
  const deployed = await owner('GET', '/functions/hello-world')
  assert.deepEqual([deployed.version, deployed.envNames], [2, ['TOKEN']])

  await page.getByRole('link', { name: 'Versions' }).click()
  await button('Roll back').click()
  await dialog().getByRole('button', { name: 'Roll back' }).click()
  await dialog().waitFor({ state: 'detached' })
  const rolledBack = await owner('GET', '/functions/hello-world')
  assert.notEqual(rolledBack.digest, deployed.digest)

  await button('Disable').click()
  await button('Enable').waitFor()
  assert.equal((await owner('GET', '/functions/hello-world')).state, 'disabled')
  for (const tab of ['Log', 'Versions', 'Details']) {
    await page.getByRole('link', { name: tab, exact: true }).click()
    await page.waitForFunction(() => !document.querySelector('.skeleton'))
    if (tab === 'Log') await page.getByText('jiffy function logs -f hello-world', { exact: true }).waitFor()
    assert.deepEqual(await findings(page), [], tab)
  }
  await button('More actions').click()
  await page.getByRole('menuitem', { name: 'Remove' }).click()
  await dialog().getByRole('button', { name: 'Remove' }).click()
  await page.waitForURL(/\/functions$/)
  assert.deepEqual(await owner('GET', '/functions'), [])
  await go(page, '/functions/hello-world')
  await page.getByText('This function does not exist').waitFor()
  assert.deepEqual(violations, [])
})

test('a template is built from the text of a Dockerfile with a live log, tagged and deleted', async () => {
  await go(page, '/templates')
  await button('Build a template').click()
  await dialog().getByLabel('Name').fill('built')
  const text = dialog().getByLabel('Dockerfile', { exact: true })
  await text.fill('FROM base\nCOPY . /')
  await dialog().getByText('line 2: COPY').waitFor()
  assert.ok(await dialog().getByRole('button', { name: 'Build' }).isDisabled())
  await text.fill(`# comment\nFROM base\nENV A="b c" D=e\nRUN echo "$A" \\\n  > /built\nRUN ["echo", "it's"]\n`)
  await dialog().getByRole('button', { name: 'Build' }).click()
  await page.waitForURL(/build=/)
  // The first build boots a guest, which takes long on a busy host.
  await dialog().getByRole('log').getByText("it's").first().waitFor({ timeout: 150_000 })
  await dialog().locator('.badge', { hasText: 'ready' }).waitFor()
  await dialog().getByRole('button', { name: 'Close', exact: true }).last().click()

  const row = page.getByRole('row', { name: /built/ })
  const act = async (action) => {
    await row.getByRole('button', { name: 'Actions on built' }).click()
    await page.getByRole('menuitem', { name: action }).click()
  }
  const tags = async () => (await owner('GET', '/templates/built/tags')).map((t) => t.tag).sort()
  await act('Tags')
  await dialog().getByLabel('New tag').fill('stable')
  await dialog().getByRole('button', { name: 'Add the tag' }).click()
  await dialog().getByText('stable', { exact: true }).first().waitFor()
  assert.ok((await tags()).includes('stable'))
  assert.deepEqual(await findings(page), [])
  await dialog().getByRole('button', { name: 'Remove stable' }).click()
  await dialog().getByRole('button', { name: 'Remove', exact: true }).click()
  await dialog().getByRole('button', { name: 'Remove stable' }).waitFor({ state: 'detached' })
  assert.ok(!(await tags()).includes('stable'))
  await dialog().getByRole('button', { name: 'Close', exact: true }).last().click()
  await act('Delete')
  await dialog().getByRole('button', { name: 'Delete' }).click()
  await row.waitFor({ state: 'detached' })
  assert.deepEqual(violations, [])
})

test('the page of the fleet explains its state, and its absence', async () => {
  await go(page, '/hosts')
  await page.getByText('jiffy fleet init').waitFor()
  assert.equal(await page.getByRole('link', { name: 'Hosts' }).count(), 0)
  const node = (id, state, running) => {
    const fields = { paused: running, unstored: 0, warm: 0, freeMemoryMib: 100, heartbeatAgeMs: 10, epoch: 1 }
    return { id, state, running, address: `10.0.0.${id[1]}:7000`, version: '0.1.0', ...fields }
  }
  const fleet = {
    id: 'f1',
    host: 'h1',
    coordinator: 'h2',
    term: 3,
    shards: 64,
    hasAuthority: true,
    isReady: true,
    isDirectoryComplete: true,
    massSilence: null,
    warnings: ['<b>a warning</b>'],
    nodes: [node('h1', 'up', 4), node('h2', 'up', null), node('h3', 'draining', 0)],
  }
  await page.route('**/api/fleet', (route) => route.fulfill({ json: fleet }))
  await go(page, '/hosts')
  await page.getByText('h2 did not answer').waitFor()
  await page.getByText('<b>a warning</b>').waitFor()
  await page.getByRole('link', { name: 'Hosts' }).waitFor()
  assert.deepEqual(await findings(page), [])
  await page.getByLabel('State').selectOption('draining')
  assert.equal(new URL(page.url()).searchParams.get('state'), 'draining')
  assert.equal(await page.locator('tbody tr').count(), 1)
  await page.getByLabel('State').selectOption('')

  // Hosts are drained, with their running sandboxes if this is chosen, and receive sandboxes again.
  const sent = []
  await page.route('**/api/fleet/nodes/*/*', (route) => {
    const request = route.request()
    sent.push([new URL(request.url()).pathname.replace(/.*\/nodes/, ''), request.postDataJSON()])
    return route.fulfill({ json: { host: 'h1', state: 'draining' } })
  })
  await page.getByRole('row', { name: /^h1/ }).getByRole('button', { name: 'Drain' }).click()
  await dialog().getByRole('checkbox').check()
  await dialog().getByRole('button', { name: 'As a command' }).click()
  await dialog().getByText('jiffy fleet drain --force h1').waitFor()
  assert.deepEqual(await findings(page), [])
  await dialog().getByRole('button', { name: 'Drain', exact: true }).click()
  await dialog().waitFor({ state: 'detached' })
  await page.getByRole('row', { name: /^h3/ }).getByRole('button', { name: 'Undrain' }).click()
  await dialog().getByRole('button', { name: 'Undrain', exact: true }).click()
  await dialog().waitFor({ state: 'detached' })
  assert.deepEqual(sent, [
    ['/h1/drain', { wait: false, force: true }],
    ['/h3/undrain', null],
  ])
  await page.unroute('**/api/fleet/nodes/*/*')
  await page.unroute('**/api/fleet')

  // In a fleet, sandboxes have a host, by which they are filtered.
  await page.route('**/api/v2/sandboxes*', async (route) => {
    const response = await route.fetch()
    const [sandbox] = await response.json()
    const on = (host) => ({
      ...sandbox,
      sandboxID: `${sandbox.sandboxID.slice(0, 18)}${host}`,
      name: `on-${host}`,
      host,
    })
    await route.fulfill({ json: [on('h1'), on('h2')] })
  })
  const own = await createSandbox({})
  await go(page, '/sandboxes')
  await page.getByRole('row', { name: /on-h1/ }).getByRole('cell', { name: 'h1', exact: true }).waitFor()
  await page.getByLabel('Host', { exact: true }).selectOption('h2')
  await page.getByRole('row', { name: /on-h1/ }).waitFor({ state: 'detached' })
  await page.getByRole('row', { name: /on-h2/ }).waitFor()
  assert.equal(new URL(page.url()).searchParams.get('host'), 'h2')
  await page.unroute('**/api/v2/sandboxes*')
  await owner('DELETE', `/sandboxes/${own.sandboxID}`)

  const reader = await signInByKey(await open(browser), READ_KEY, '/hosts')
  await reader.getByText('Not permitted with this key').waitFor()
  await reader.context().close()
  assert.deepEqual(violations, [])
})
