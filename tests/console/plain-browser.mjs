// Chromium without Playwright, for measurements. Playwright observes the network of its pages: its
// debugger receives a copy of each message of a WebSocket, which slows down a terminal with much
// output.
import { spawn } from 'node:child_process'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

const LIMIT = 60_000

/** Launches Chromium with one page. The protocol is the DevTools protocol over pipes. */
export async function launchPlain() {
  const profile = mkdtempSync(join(tmpdir(), 'jiffy-chromium.'))
  const browser = spawn(
    process.env.CHROMIUM ?? '/usr/bin/chromium',
    [
      '--headless',
      '--no-sandbox',
      '--disable-gpu',
      '--no-first-run',
      '--remote-debugging-pipe',
      '--window-size=1360,820',
      `--user-data-dir=${profile}`,
    ],
    { stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'] },
  )
  const calls = new Map()
  let [next, text] = [1, '']
  browser.stdio[4].setEncoding('utf8').on('data', (data) => {
    const messages = (text + data).split('\0')
    text = messages.pop()
    for (const message of messages) {
      const { id, result, error } = JSON.parse(message)
      const call = calls.get(id)
      calls.delete(id)
      if (error) call?.reject(new Error(error.message))
      else call?.resolve(result)
    }
  })
  const send = (method, params = {}, sessionId = undefined) =>
    new Promise((resolve, reject) => {
      const id = next++
      calls.set(id, { resolve, reject })
      browser.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId })}\0`)
    })
  const { targetId } = await send('Target.createTarget', { url: 'about:blank' })
  const { sessionId } = await send('Target.attachToTarget', { targetId, flatten: true })
  const call = (method, params) => send(method, params, sessionId)
  // Without this, scripts of `init` do not run.
  await call('Page.enable')
  return {
    /** Runs a script before each document. */
    init: (script) => call('Page.addScriptToEvaluateOnNewDocument', { source: script }),
    open: (url) => call('Page.navigate', { url }),
    /** Returns the value of an expression, after its promise. */
    async evaluate(expression) {
      const params = { expression, awaitPromise: true, returnByValue: true }
      const { result, exceptionDetails } = await call('Runtime.evaluate', params)
      if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text)
      return result.value
    },
    /** Waits until an expression is true. */
    async until(expression) {
      for (const end = Date.now() + LIMIT; ;) {
        if (await this.evaluate(expression).catch(() => false)) return
        if (Date.now() > end) throw new Error(`not within ${LIMIT} ms: ${expression}`)
        await new Promise((resolve) => setTimeout(resolve, 50))
      }
    },
    async press(key, text, modifiers = 0) {
      const code = key === 'Enter' ? 'Enter' : `Key${key.toUpperCase()}`
      const windowsVirtualKeyCode = key === 'Enter' ? 13 : key.toUpperCase().charCodeAt(0)
      const event = { key, code, modifiers, windowsVirtualKeyCode }
      await call('Input.dispatchKeyEvent', { type: text ? 'keyDown' : 'rawKeyDown', text, ...event })
      await call('Input.dispatchKeyEvent', { type: 'keyUp', ...event })
    },
    async close() {
      const exited = new Promise((resolve) => browser.once('exit', resolve))
      await send('Browser.close').catch(() => {})
      await exited
      rmSync(profile, { recursive: true, force: true, maxRetries: 10 })
    },
  }
}
