// The output queue of a terminal drops only lines that the terminal would not retain.
import assert from 'node:assert/strict'
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, test } from 'node:test'
import { pathToFileURL } from 'node:url'

const web = new URL('../../web/', import.meta.url)
const typescript = createRequire(new URL('package.json', web))('typescript')
const ROWS = 24
const SCROLLBACK = 500

let directory
let OutputQueue
before(async () => {
  directory = mkdtempSync(join(tmpdir(), 'jiffy-queue.'))
  const source = readFileSync(new URL('src/live/output-queue.ts', web), 'utf8')
  const options = { compilerOptions: { module: 'esnext', target: 'es2023' } }
  const file = join(directory, 'output-queue.mjs')
  writeFileSync(file, typescript.transpileModule(source, options).outputText)
  ;({ OutputQueue } = await import(pathToFileURL(file)))
})
after(() => rmSync(directory, { recursive: true }))

/** A terminal without colours. The text between ESC and BEL is not shown. */
class Model {
  rows = ROWS
  options = { scrollback: SCROLLBACK }
  lines = ['']
  column = 0
  isString = false
  parsed = 0
  onLineFeed(listener) {
    this.listener = listener
  }
  get buffer() {
    const length = Math.max(ROWS, this.lines.length)
    return { active: { type: 'normal', length, cursorY: Math.min(this.lines.length, ROWS) - 1 } }
  }
  parse(bytes) {
    for (const byte of bytes) {
      if (byte === 27) this.isString = true
      else if (byte === 7) this.isString = false
      else if (this.isString) continue
      else if (byte === 13) this.column = 0
      else if (byte === 10) {
        this.lines.push('')
        if (this.lines.length > SCROLLBACK + ROWS) this.lines.shift()
        this.listener?.()
      } else {
        const line = this.lines.at(-1).padEnd(this.column)
        this.lines[this.lines.length - 1] =
          line.slice(0, this.column) + String.fromCharCode(byte) + line.slice(this.column + 1)
        this.column++
      }
    }
    this.parsed += bytes.length
  }
  write(bytes, done) {
    this.parse(bytes)
    setImmediate(done)
  }
}

/** Passes pieces to a queue, and returns the terminal when all of them were processed. */
async function show(pieces) {
  const model = new Model()
  let processed = 0
  const queue = new OutputQueue(model, (bytes) => {
    processed += bytes
  })
  for (const piece of pieces) queue.push(piece)
  const total = pieces.reduce((sum, piece) => sum + piece.length, 0)
  while (processed < total) await new Promise((resolve) => setImmediate(resolve))
  assert.equal(processed, total)
  queue.close()
  return model
}

const encode = (text) => new TextEncoder().encode(text)

test('the retained text is the same as without the queue', async () => {
  // A fixed sequence of pseudo-random numbers.
  let state = 20261130
  const next = (limit) => {
    state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff
    return (state >> 8) % limit
  }
  let dropped = 0
  for (let round = 0; round < 60; round++) {
    let text = ''
    for (let parts = 1 + next(5); parts > 0; parts--) {
      const end = next(6) === 0 ? '\n' : '\r\n'
      for (let line = next(30_000); line > 0; line--) text += `${'y'.repeat(next(3))}${line % 97}${end}`
      // Also a sequence without an end.
      if (next(3) === 0) text += next(4) === 0 ? '\u001b]0;' : '\u001b]0;title\u0007'
    }
    const bytes = encode(text)
    const pieces = []
    for (let at = 0; at < bytes.length; ) {
      const length = 1 + next(next(2) === 0 ? 100_000 : 3000)
      pieces.push(bytes.subarray(at, at + length))
      at += length
    }
    const direct = new Model()
    direct.parse(bytes)
    const shown = await show(pieces)
    assert.deepEqual(shown.lines.slice(-SCROLLBACK), direct.lines.slice(-SCROLLBACK), `round ${round}`)
    assert.equal(shown.column, direct.column)
    dropped += bytes.length - shown.parsed
  }
  assert.ok(dropped > 1_000_000, `${dropped} bytes were dropped`)
})

test('a flood of short lines is dropped, and text of a control sequence is not', async () => {
  const flood = Array.from({ length: 40 }, () => encode('y\r\n'.repeat(20_000)))
  const { parsed } = await show(flood)
  assert.ok(parsed < 500_000, `${parsed} of 2,400,000 bytes were parsed`)
  const inString = await show([encode('\u001b]0;'), ...flood])
  assert.equal(inString.parsed, 4 + 2_400_000)
  assert.deepEqual(inString.lines, [''])
})
