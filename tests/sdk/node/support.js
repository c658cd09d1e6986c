// What the tests share. The daemon and its address come from `tests/sdk/run`, through the very variables that users set.
import { randomUUID } from 'node:crypto'
import http from 'node:http'
import { Sandbox } from 'e2b'

export const url = process.env.E2B_API_URL
export const apiKey = process.env.E2B_API_KEY
export const limit = { timeout: 60_000 }
export const unique = () => randomUUID().replaceAll('-', '').slice(0, 12)

// Makes a sandbox that is gone when the test has ended.
export async function create(context, template = 'base', options = {}, Kind = Sandbox) {
  const sandbox = await Kind.create(template, { timeoutMs: 120_000, ...options })
  context?.after(() => sandbox.kill())
  return sandbox
}

// Something that grows and can be waited for.
export class Heard {
  items = []
  #waiting = new Set()

  push = (item) => {
    this.items.push(item)
    for (const look of [...this.#waiting]) look()
  }

  get text() {
    return this.items.map((item) => (typeof item === 'string' ? item : Buffer.from(item).toString())).join('')
  }

  until(holds, milliseconds = 20_000) {
    return new Promise((resolve, reject) => {
      const look = () => {
        const answer = holds(this)
        if (!answer) return
        clearTimeout(timer)
        this.#waiting.delete(look)
        resolve(answer)
      }
      const timer = setTimeout(() => {
        this.#waiting.delete(look)
        reject(new Error(`not within ${milliseconds} ms; so far: ${JSON.stringify(this.items).slice(-800)}`))
      }, milliseconds)
      this.#waiting.add(look)
      look()
    })
  }

  says(text) {
    return this.until(() => this.text.includes(text))
  }
}

// For what the API can only be asked about: asks until it holds, within a limit.
export async function eventually(question, milliseconds = 20_000) {
  const end = Date.now() + milliseconds
  for (;;) {
    const answer = await question()
    if (answer) return answer
    if (Date.now() > end) throw new Error(`not within ${milliseconds} ms; the last answer was ${answer}`)
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

// A request by an HTTP client that is no SDK and may say any `Host`.
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

// All pages of a listing.
export async function pages(paginator) {
  const all = []
  while (paginator.hasNext) all.push(await paginator.nextItems())
  return all
}
