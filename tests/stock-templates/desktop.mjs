// The desktop with the SDK for JavaScript.
import assert from 'node:assert/strict'
import { Sandbox } from '@e2b/desktop'

const desktop = await Sandbox.create({ timeoutMs: 300_000, resolution: [1024, 768] })
try {
  await desktop.moveMouse(321, 123)
  assert.deepEqual(await desktop.getCursorPosition(), { x: 321, y: 123 })
  assert.deepEqual(await desktop.getScreenSize(), { width: 1024, height: 768 })
  const picture = Buffer.from(await desktop.screenshot())
  assert.equal(picture.subarray(1, 4).toString(), 'PNG')
  await desktop.stream.start({ requireAuth: true })
  const url = desktop.stream.getUrl({ authKey: desktop.stream.getAuthKey() })
  const page = await fetch(url)
  assert.equal(page.status, 200)
  assert((await page.text()).includes('noVNC'))
  console.log('desktop works')
} finally {
  await desktop.kill()
}
