// The stock template `browser` with Playwright, as users control a remote browser.
import assert from 'node:assert/strict'
import { existsSync } from 'node:fs'
import { test } from 'node:test'
import { chromium } from 'playwright-core'
import { create, limit, url } from './support.js'

const built = existsSync(`${process.env.JIFFY_SDK_HOME}/templates/browser`)
const options = { ...limit, skip: built ? false : 'template browser is not built' }

// Uses the gateway's address and headers, because the sandbox's host name does not resolve here.
async function connect(context, sandbox, address = url) {
  const headers = { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '9222' }
  const browser = await chromium.connectOverCDP(address, address === url ? { headers } : {})
  context.after(() => browser.close())
  return browser
}
const html = (text) => `data:text/html;charset=utf-8,${encodeURIComponent(text)}`

test('playwright loads a page, reads it, clicks in it and takes its picture', options, async (t) => {
  const browser = await connect(t, await create(t, 'browser'))
  const page = await browser.contexts()[0].newPage()
  await page.goto(html('<title>a page</title><button onclick="this.textContent = \'pressed\'">press</button>'))
  assert.equal(await page.title(), 'a page')
  await page.getByRole('button').click()
  assert.equal(await page.getByRole('button').textContent(), 'pressed')
  const picture = await page.screenshot()
  assert.equal(picture.subarray(1, 4).toString(), 'PNG')
  assert.equal(picture.readUInt32BE(16), 1280) // its width
})

test('the browser is also reachable by path', options, async (t) => {
  const sandbox = await create(t, 'browser')
  const browser = await connect(t, sandbox, `${url}/sandboxes/${sandbox.sandboxId}/proxy/9222`)
  assert.match(browser.version(), /^\d+\./)
})

test('fonts contain the characters of many scripts', options, async (t) => {
  const browser = await connect(t, await create(t, 'browser'))
  const page = await browser.contexts()[0].newPage()
  await page.goto(html('<body style="font: 40px sans-serif">'))
  // Characters that no font contains are all drawn as the same box.
  const drawn = await page.evaluate(() => ['A', 'Ж', 'ß', '你', 'あ', '한', '😀', '\u{10FFFE}'].map((letter) => {
    const canvas = new OffscreenCanvas(60, 60).getContext('2d')
    canvas.font = '40px sans-serif'
    canvas.fillText(letter, 5, 45)
    return canvas.getImageData(0, 0, 60, 60).data.join()
  }))
  assert.equal(new Set(drawn).size, drawn.length)
})
