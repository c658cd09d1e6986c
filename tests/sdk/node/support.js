// Shared parts of the tests. `tests/sdk/run` starts the daemon and sets the environment variables that users set.
import { randomUUID } from 'node:crypto'
import http from 'node:http'
import { Sandbox } from 'e2b'

export const url = process.env.E2B_API_URL
export const apiKey = process.env.E2B_API_KEY
export const limit = { timeout: 60_000 }
export const unique = () => randomUUID().replaceAll('-', '').slice(0, 12)

// Creates a sandbox and kills it after the test.
export async function create(context, template = 'base', options = {}, Kind = Sandbox) {
  const sandbox = await Kind.create(template, { timeoutMs: 120_000, ...options })
  context?.after(() => sandbox.kill())
  return sandbox
}

// A collection that grows and that tests can wait for.
export class Collected {
  items = []
  #waiting = new Set()

  push = (item) => {
    this.items.push(item)
    for (const check of [...this.#waiting]) check()
  }

  get text() {
    return this.items.map((item) => (typeof item === 'string' ? item : Buffer.from(item).toString())).join('')
  }

  until(holds, milliseconds = 20_000) {
    return new Promise((resolve, reject) => {
      const check = () => {
        const answer = holds(this)
        if (!answer) return
        clearTimeout(timer)
        this.#waiting.delete(check)
        resolve(answer)
      }
      const timer = setTimeout(() => {
        this.#waiting.delete(check)
        reject(new Error(`not within ${milliseconds} ms; so far: ${JSON.stringify(this.items).slice(-800)}`))
      }, milliseconds)
      this.#waiting.add(check)
      check()
    })
  }

  waitForText(text) {
    return this.until(() => this.text.includes(text))
  }
}

// Polls the API until a condition holds or a time limit is reached.
export async function eventually(question, milliseconds = 20_000) {
  const end = Date.now() + milliseconds
  for (;;) {
    const answer = await question()
    if (answer) return answer
    if (Date.now() > end) throw new Error(`not within ${milliseconds} ms; the last answer was ${answer}`)
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

// Sends a request without an SDK, with any `Host`.
export function request(target, { method = 'GET', headers = {}, body } = {}) {
  return new Promise((resolve, reject) => {
    const sent = http.request(target, { method, headers }, (answer) => {
      const pieces = []
      answer.on('data', (piece) => pieces.push(piece))
      answer.on('end', () => resolve({ status: answer.statusCode, headers: answer.headers, body: Buffer.concat(pieces).toString() }))
      answer.on('error', reject)
    })
    sent.on('error', reject)
    sent.end(body)
  })
}

// Returns all pages of a listing.
export async function pages(paginator) {
  const all = []
  while (paginator.hasNext) all.push(await paginator.nextItems())
  return all
}
