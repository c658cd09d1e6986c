// Shared by the tests of the console: Chromium, sign-in, and calls of the API.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import http from 'node:http'
import { createRequire } from 'node:module'

const require = createRequire(new URL('../../web/package.json', import.meta.url))
const { chromium } = require('playwright-core')
const axeSource = readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8')

export const { API, CONSOLE, ADMIN_KEY, CREATE_KEY, READ_KEY, SOCKETS } = process.env
export const ENGINES = process.env.ENGINES.split(',')
/** Time limit of one step. The host may be busy. */
const LIMIT = 60_000

/** Launches Chromium. */
export function launch() {
  return chromium.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    timeout: 120_000,
    // The tests run as root in a namespace without other networks.
    args: ['--no-sandbox', '--disable-gpu'],
  })
}

/** Calls the daemon as the owner of the host. */
export function owner(method, path, body) {
  const text = body === undefined ? '' : JSON.stringify(body)
  const headers = { host: 'localhost', 'content-type': 'application/json', 'content-length': Buffer.byteLength(text) }
  return new Promise((resolve, reject) => {
    const request = http.request(
      {
        socketPath: `${SOCKETS}/owner`,
        method,
        path,
        headers,
      },
      (response) => {
        let answer = ''
        response.on('data', (data) => {
          answer += data
        })
        response.on('end', () => {
          if (response.statusCode >= 300) reject(new Error(`${method} ${path}: ${response.statusCode} ${answer}`))
          else resolve(answer ? JSON.parse(answer) : undefined)
        })
      },
    )
    request.on('error', reject)
    request.end(text)
  })
}

/** Creates a sandbox as the owner of the host. */
export function createSandbox(body) {
  return owner('POST', '/v2/sandboxes', { templateID: 'base', timeout: 1800, ...body })
}

/** Messages of the browser about violated policies and uncaught errors. */
export const violations = []

/** Opens a context whose pages record violations. */
export async function open(browser, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1360, height: 820 }, ...options })
  context.setDefaultTimeout(LIMIT)
  context.on('console', (message) => {
    const text = message.text()
    // Rejections are expected in some tests. Policies must never be violated.
    if (/content security policy|trusted ?types|refused to|violates/i.test(text)) violations.push(text)
  })
  context.on('weberror', (error) => violations.push(String(error.error())))
  return context
}

/** Signs in with a code of `jiffy console`. */
export async function signInByCode(context) {
  const page = await context.newPage()
  const { url } = await owner('POST', '/console/codes')
  await page.goto(`${CONSOLE}/${new URL(url).hash}`)
  await page.locator('.app').waitFor()
  assert.equal(new URL(page.url()).hash, '', 'the code stays in the address')
  return page
}

/** Signs in with a key, through the form. */
export async function signInByKey(context, key, path = '/') {
  const page = await context.newPage()
  await page.goto(CONSOLE + path)
  await page.getByLabel('API key').fill(key)
  await page.getByRole('button', { name: 'Sign in' }).click()
  await page.locator('.app').waitFor()
  return page
}

/** Navigates without loading the page again. */
export async function go(page, path) {
  await page.goto(CONSOLE + path)
  await page.locator('.app').waitFor()
}

/** Returns the findings of axe about a page. */
export async function findings(page) {
  // The policy of the page permits no other script, but `evaluate` is not subject to it.
  await page.evaluate(axeSource)
  const result = await page.evaluate(async () => {
    const found = await globalThis.axe.run(document, { resultTypes: ['violations'] })
    return found.violations.map(
      (v) =>
        `${v.id}: ${v.nodes
          .slice(0, 3)
          .map((n) => `${n.html} ${n.failureSummary}`)
          .join(' | ')}`,
    )
  })
  return result
}

/** Waits until the terminal shows a text. */
export async function terminalShows(page, pattern) {
  await page.waitForFunction(
    (source) => {
      const rows = document.querySelector('.terminal-pane:not([hidden]) .xterm-rows')
      return new RegExp(source).test(rows?.textContent ?? '')
    },
    pattern.source,
    { timeout: LIMIT },
  )
}

/** Types a line into the terminal. */
export async function type(page, line) {
  await page.locator('.terminal-pane:not([hidden]) .xterm-helper-textarea').focus()
  await page.keyboard.type(line)
  await page.keyboard.press('Enter')
}
