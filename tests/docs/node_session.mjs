// Evaluates files one after the other in one REPL, which allows `await`. Arguments: the descriptor
// on which the names of the files arrive, and the one on which each is answered with an error in
// JSON, or null.
import { create } from 'node:domain'
import { readFileSync, writeSync } from 'node:fs'
import { Socket } from 'node:net'
import { createInterface } from 'node:readline'
import repl from 'node:repl'
import { PassThrough } from 'node:stream'

const [requests, replies] = process.argv.slice(2).map(Number)
// The REPL reports errors of a page to its domain instead of the callback.
const domain = create()
const server = repl.start({
  input: new PassThrough(), output: new PassThrough(), terminal: false, useGlobal: true, prompt: '',
  domain,
})
server.on('exit', () => process.exit(1))

const evaluate = (path) => new Promise((resolve) => {
  domain.once('error', resolve)
  server.eval(readFileSync(path, 'utf8'), server.context, 'page', (error) => {
    domain.off('error', resolve)
    resolve(error)
  })
})

for await (const path of createInterface({ input: new Socket({ fd: requests }) })) {
  const error = await evaluate(path)
  if (error) console.error(error)
  writeSync(replies, `${JSON.stringify(error ? String(error) : null)}\n`)
}
process.exit(0)
