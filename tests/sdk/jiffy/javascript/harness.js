// Runs scenarios in Node.js and Bun, and writes a JUnit report.
import { randomUUID } from 'node:crypto'
import { readFileSync, writeFileSync } from 'node:fs'

const LIMIT_MS = 60_000
const CONCURRENT = 4
const scenarios = []

export const unique = () => randomUUID().replaceAll('-', '').slice(0, 12)

/** Registers a scenario. `alone` runs it after all others, because it changes variables. */
export function scenario(name, run, { alone = false } = {}) {
  scenarios.push({ name, run, alone })
}

/** Polls until a condition holds or a time limit is reached. */
export async function eventually(question, milliseconds = 20_000) {
  const end = Date.now() + milliseconds
  for (;;) {
    const answer = await question()
    if (answer) return answer
    if (Date.now() > end) throw new Error(`not within ${milliseconds} ms; the last answer was ${answer}`)
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

class Context {
  #cleanups = []
  after(cleanup) {
    this.#cleanups.push(cleanup)
  }
  async end() {
    for (const cleanup of this.#cleanups.reverse()) await cleanup()
  }
}

async function attempt({ name, run }) {
  const started = Date.now()
  const context = new Context()
  let error
  let timer
  const limit = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`still running after ${LIMIT_MS} ms`)), LIMIT_MS)
  })
  try {
    await Promise.race([run(context), limit])
  } catch (failure) {
    error = failure
  }
  clearTimeout(timer)
  try {
    await context.end()
  } catch (failure) {
    error ??= failure
  }
  return { name, error, seconds: (Date.now() - started) / 1000 }
}

const escaped = (text) =>
  text
    .replace(/[^\t\n\r\x20-\uD7FF\uE000-\uFFFD]/g, '?')
    .replaceAll('&', '&amp;')
    .replaceAll('<', '&lt;')
    .replaceAll('"', '&quot;')

/** Runs all scenarios, or those in `names`, and writes `report`. Returns the number of failures. */
export async function runAll(report, names, after) {
  const listed = readFileSync(new URL('../scenarios.txt', import.meta.url), 'utf8').trim().split('\n')
  const registered = scenarios.map(({ name }) => name)
  const missing = listed.filter((name) => !registered.includes(name))
  const different = [...missing, ...registered.filter((name) => !listed.includes(name))]
  if (different.length > 0) throw new Error(`missing or not listed: ${different.join('; ')}`)
  const chosen = scenarios.filter(({ name }) => names.length === 0 || names.includes(name))
  const queue = chosen.filter(({ alone }) => !alone)
  const results = []
  const work = async () => {
    for (let next = queue.shift(); next; next = queue.shift()) results.push(await attempt(next))
  }
  await Promise.all(Array.from({ length: CONCURRENT }, work))
  for (const one of chosen.filter(({ alone }) => alone)) results.push(await attempt(one))
  await after()
  const failures = results.filter(({ error }) => error)
  const cases = results.map(({ name, error, seconds }) => {
    const text = error ? `<failure>${escaped(String(error.stack ?? error))}</failure>` : ''
    return `<testcase classname="jiffy" name="${escaped(name)}" time="${seconds}">${text}</testcase>`
  })
  writeFileSync(report, `<testsuites><testsuite>${cases.join('')}</testsuite></testsuites>\n`)
  for (const { name, error } of failures) console.log(`FAILED: ${name}\n${error.stack ?? error}\n`)
  for (const { name, seconds } of results.sort((a, b) => b.seconds - a.seconds).slice(0, 3)) {
    console.log(`slow: ${name}: ${seconds} s`)
  }
  console.log(`${results.length - failures.length} passed, ${failures.length} failed`)
  return failures.length
}
