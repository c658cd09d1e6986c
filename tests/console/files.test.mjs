// Files are edited, compared, uploaded and downloaded as directories, and charts are shown.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, test } from 'node:test'
import { createSandbox, findings, go, launch, open, owner, signInByCode, violations } from './browser.mjs'

let browser
let page
let sandbox
before(async () => {
  browser = await launch()
  page = await signInByCode(await open(browser, { acceptDownloads: true }))
  sandbox = (await createSandbox({ name: 'files' })).sandboxID
})
after(async () => {
  if (sandbox) await owner('DELETE', `/sandboxes/${sandbox}`)
  await browser?.close()
})

const dialog = () => page.getByRole('dialog')
const editor = () => page.getByRole('textbox', { name: /Content of/ })
/** Reads or writes a file of the sandbox, as another client. */
const file = (path, content) =>
  page.evaluate(
    async ([id, at, body]) => {
      const url = `/guest/${id}/file?path=${encodeURIComponent(at)}`
      const init = { headers: { 'jiffy-console': '1' } }
      if (body !== undefined) Object.assign(init, { method: 'PUT', body })
      const response = await fetch(url, init)
      if (!response.ok) throw new Error(`${response.status} ${await response.text()}`)
      return response.text()
    },
    [sandbox, path, content],
  )

test('a file that changed meanwhile is not overwritten, and its differences can be edited', async () => {
  await file('/home/user/a.py', 'def one():\n    return 1\n')
  await go(page, `/sandboxes/${sandbox}/files?path=/home/user&file=a.py`)
  await editor().click()
  await page.keyboard.press('Control+Home')
  await page.keyboard.type('# mine\n')
  await file('/home/user/a.py', 'def two():\n    return 2\n')
  await page.keyboard.press('Control+s')
  await dialog().getByRole('textbox', { name: 'In the sandbox' }).getByText('two').waitFor()
  assert.equal(await file('/home/user/a.py'), 'def two():\n    return 2\n')
  assert.deepEqual(await findings(page), [])
  await dialog().getByRole('textbox', { name: 'Your version' }).click()
  await page.keyboard.press('Control+Home')
  await page.keyboard.type('# merged\n')
  await dialog().getByRole('button', { name: 'Continue editing' }).click()
  assert.match(await editor().innerText(), /# merged\n# mine\ndef one/)
  await page.getByRole('button', { name: 'Save', exact: true }).click()
  await dialog().getByRole('button', { name: 'Overwrite' }).click()
  await dialog().waitFor({ state: 'detached' })
  assert.equal(await file('/home/user/a.py'), '# merged\n# mine\ndef one():\n    return 1\n')
  // The saved version is the base of the next change.
  await editor().click()
  await page.keyboard.press('Control+End')
  await page.keyboard.type('# last')
  await page.keyboard.press('Control+s')
  await page.getByText('Saved a.py').last().waitFor()
  assert.match(await file('/home/user/a.py'), /# last$/)
  assert.deepEqual(violations, [])
})

test('a directory is uploaded by drop and downloaded as a tar archive that tar can read', async () => {
  await go(page, `/sandboxes/${sandbox}/files?path=/home/user`)
  await page.getByRole('button', { name: 'Actions on a.py' }).waitFor()
  const long = `${'long name '.repeat(12)}<b>é.txt`
  await page.evaluate(
    async ([id, name]) => {
      const headers = { 'jiffy-console': '1', 'content-type': 'application/json' }
      for (const path of ['/home/user/d', '/home/user/d/empty', '/home/user/d/deep']) {
        const body = JSON.stringify({ path })
        await fetch(`/guest/${id}/directories`, { method: 'POST', headers, body })
      }
      const transfer = new DataTransfer()
      transfer.items.add(new File(['x'.repeat(700)], name))
      const list = document.querySelector('.file-list')
      list.dispatchEvent(new DragEvent('drop', { dataTransfer: transfer, bubbles: true, cancelable: true }))
    },
    [sandbox, long],
  )
  await page.getByRole('list', { name: 'Transfers' }).getByText('long name').waitFor()
  await page
    .getByRole('region', { name: /^Files/ })
    .getByText('long name')
    .waitFor()
  await page.evaluate(
    async ([id, name]) => {
      const headers = { 'jiffy-console': '1', 'content-type': 'application/json' }
      const body = JSON.stringify({ from: `/home/user/${name}`, to: `/home/user/d/deep/${name}` })
      await fetch(`/guest/${id}/moves`, { method: 'POST', headers, body })
    },
    [sandbox, long],
  )
  const download = page.waitForEvent('download')
  await page.getByRole('button', { name: 'Actions on d', exact: true }).click()
  await page.getByRole('menuitem', { name: 'Download as tar' }).click()
  const directory = mkdtempSync(join(tmpdir(), 'jiffy-tar.'))
  try {
    const archive = join(directory, 'd.tar')
    await (await download).saveAs(archive)
    execFileSync('tar', ['-xf', archive, '-C', directory])
    assert.equal(readFileSync(join(directory, 'd', 'deep', long), 'utf8'), 'x'.repeat(700))
    const names = execFileSync('tar', ['-tf', archive, '--quoting-style=literal'], { encoding: 'utf8' })
    assert.deepEqual(names.trim().split('\n').sort(), ['d/', 'd/deep/', `d/deep/${long}`, 'd/empty/'])
  } finally {
    rmSync(directory, { recursive: true })
  }
  assert.deepEqual(violations, [])
})

test('charts show the samples of a sandbox with a mark for each snapshot', async () => {
  await owner('POST', `/sandboxes/${sandbox}/snapshots`, { name: 'marked' })
  await go(page, `/sandboxes/${sandbox}/charts?range=1h`)
  await page.getByRole('img', { name: /^Memory over time. Now: used/ }).waitFor()
  await page.getByRole('list', { name: 'Marks in the charts' }).getByText('snapshot marked').waitFor()
  await page.getByRole('button', { name: '5 min', exact: true }).click()
  assert.equal(new URL(page.url()).searchParams.get('range'), '5m')
  assert.deepEqual(await findings(page), [])
  assert.deepEqual(violations, [])
})
