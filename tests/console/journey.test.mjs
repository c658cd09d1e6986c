// The journey of a user who has only a browser: create a sandbox, break it, roll it back, fork it and
// promote a fork. On each engine.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { ENGINES, go, launch, open, owner, signInByCode, terminalShows, type, violations } from './browser.mjs'

let browser
let page
before(async () => {
  browser = await launch()
  page = await signInByCode(await open(browser))
})
after(() => browser?.close())

const button = (name) => page.getByRole('button', { name, exact: true })
const dialog = () => page.getByRole('dialog')

for (const engine of ENGINES) {
  test(`a sandbox is created, broken, rolled back, forked and promoted in the browser (${engine})`, async () => {
    const name = `journey-${engine}`
    await go(page, '/new')
    await dialog().getByLabel('Name', { exact: true }).fill(name)
    await dialog().getByLabel('Engine').selectOption(engine)
    await dialog().getByLabel('Metadata').fill('suite=journey')
    await dialog().getByLabel('Unit of the idle timeout').selectOption('min')
    await dialog().getByLabel('Idle timeout', { exact: true }).fill('30')
    await dialog().getByRole('button', { name: 'Create', exact: true }).click()
    await page.waitForURL(/\/terminal$/)
    await page.getByText('pauses after 30 min without use').waitFor()
    await terminalShows(page, /[$#] *$/)
    await type(page, 'echo $((6 * 7))-answer')
    await terminalShows(page, /42-answer/)

    // A reload shows the same shell with its output.
    await type(page, 'state=retained')
    await page.reload()
    await terminalShows(page, /42-answer/)
    await type(page, 'echo $state-value')
    await terminalShows(page, /retained-value/)

    // A second terminal is another shell. The first one remains when it ends.
    await button('New terminal').click()
    await terminalShows(page, /[$#] *$/)
    await type(page, 'echo ${state:-unset}-value')
    await terminalShows(page, /unset-value/)
    await button('End this terminal').click()
    await type(page, 'echo $state-again')
    await terminalShows(page, /retained-again/)

    await button('Snapshot').click()
    await dialog().getByLabel('Name').fill('before')
    await button('Take the snapshot').click()
    await dialog().waitFor({ state: 'detached' })

    // `rm` removes itself, and the following command fails.
    await type(page, 'sudo rm -rf /usr/bin; ls /usr/bin/env; echo broken-$?')
    await terminalShows(page, /broken-1(?:2)?[0-9]/)

    await button('Roll back').click()
    await page.locator('.point', { hasText: 'before' }).click()
    // The snapshot is compared with the broken sandbox.
    await button('Compare').click()
    const removed = page.getByRole('row').filter({ hasText: '/usr/bin' }).filter({ hasText: 'removed' })
    await removed.first().waitFor()
    await page.goBack()
    await button('Roll back to here').click()
    await dialog().getByRole('checkbox', { name: 'Take a snapshot before' }).uncheck()
    await dialog().getByRole('button', { name: 'Roll back', exact: true }).click()
    await dialog().waitFor({ state: 'detached' })

    await page.getByRole('link', { name: 'Terminal' }).click()
    const again = button('New terminal')
    await terminalShows(page, /[$#] *$/).catch(async () => {
      await again.last().click()
      await terminalShows(page, /[$#] *$/)
    })
    await type(page, 'ls /usr/bin/env && echo whole-$?')
    await terminalShows(page, /whole-0/)

    // After a change of a file, both contents are shown side by side.
    await type(page, 'echo changed-text > ~/compared; echo written-$?')
    await terminalShows(page, /written-0/)
    await page.getByRole('link', { name: 'Lineage' }).last().click()
    await page.locator('.edge.rollback').first().waitFor({ state: 'attached' })
    await page.locator('.point', { hasText: 'before' }).click()
    await button('Compare').click()
    await button('/home/user/compared').click()
    await page.locator('.cm-content[aria-label="After"]', { hasText: 'changed-text' }).waitFor()
    await page.goBack()
    await page.goBack()

    await button('Fork').click()
    await dialog().getByLabel('Number of copies').fill('5')
    await button('Fork 5').click()
    await dialog().waitFor({ state: 'detached' })
    const forks = async () => {
      const list = await owner('GET', '/v2/sandboxes?limit=100')
      const parent = list.find((s) => s.name === name)
      return list.filter((s) => s.forkedFrom === parent.sandboxID)
    }
    assert.equal((await forks()).length, 5)
    const [chosen] = await forks()
    await go(page, `/sandboxes/${chosen.sandboxID}/details`)
    await button('More actions').click()
    await page.getByRole('menuitem', { name: 'Promote' }).click()
    await dialog().getByRole('button', { name: 'Promote', exact: true }).click()
    await dialog().waitFor({ state: 'detached' })
    const remaining = await owner('GET', '/v2/sandboxes?limit=100')
    assert.ok(remaining.some((s) => s.sandboxID === chosen.sandboxID))
    assert.equal(
      remaining.filter((s) => s.forkedFrom === chosen.forkedFrom && s.sandboxID !== chosen.sandboxID).length,
      0,
    )
    assert.deepEqual(violations, [])
  })
}

test('the table is grouped by a metadata key', async () => {
  const list = await owner('GET', '/v2/sandboxes?limit=100')
  const count = list.filter((s) => s.metadata.suite === 'journey').length
  assert.ok(count > 0)
  await go(page, '/sandboxes?q=journey')
  await page.getByLabel('Group by').selectOption('suite')
  await page.waitForURL(/group=suite/)
  const heading = page.locator('tr.group', { hasText: `suite: journey (${count})` })
  await heading.waitFor()
  assert.equal(await page.locator('tr.group').count(), 1)
  assert.deepEqual(violations, [])
})

test('all sandboxes that match are restarted and forked together', async () => {
  const listed = async () => {
    const list = await owner('GET', '/v2/sandboxes?limit=100')
    return list.filter((s) => s.metadata.suite === 'journey')
  }
  const before = await listed()
  await go(page, '/sandboxes?q=journey')
  const all = page.getByRole('checkbox', { name: 'Select all that match' })
  for (const action of ['Restart', 'Fork']) {
    await all.check()
    await page.getByRole('toolbar').getByRole('button', { name: action }).click()
    if (action === 'Fork') await dialog().getByText(`Together ${before.length} new sandbox`).waitFor()
    await dialog().getByRole('button', { name: action, exact: true }).click()
    await dialog().getByText(`${before.length} of ${before.length} done`, { exact: true }).waitFor()
    await dialog().getByRole('button', { name: 'Close', exact: true }).last().click()
  }
  const forks = (await listed()).filter((s) => !before.some((b) => b.sandboxID === s.sandboxID))
  assert.deepEqual(forks.map((s) => s.forkedFrom).sort(), before.map((s) => s.sandboxID).sort())
  assert.deepEqual(violations, [])
})

test('all sandboxes that match are killed together, and the table shows it', async () => {
  await go(page, '/sandboxes?q=journey')
  await page.getByRole('checkbox', { name: 'Select all that match' }).check()
  await page.getByRole('toolbar').getByRole('button', { name: 'Kill' }).click()
  await dialog().getByRole('button', { name: 'Kill', exact: true }).click()
  await dialog().getByRole('button', { name: 'Close', exact: true }).last().click()
  await page.waitForFunction(() => !document.querySelector('tbody tr[aria-rowindex]'))
  const list = await owner('GET', '/v2/sandboxes?limit=100')
  assert.deepEqual(
    list.filter((s) => s.metadata.suite === 'journey').map((s) => s.sandboxID),
    [],
  )
})
