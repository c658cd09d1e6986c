// Sandboxes, daemons and scripted servers of single scenarios.
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import {
  createWriteStream,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  readdirSync,
  realpathSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs'
import http from 'node:http'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { createInterface } from 'node:readline'
import { Sandbox } from '@jiffy/sandbox'

export const url = process.env.JIFFY_TEST_URL
export const key = process.env.JIFFY_TEST_KEY
export const isBun = 'Bun' in globalThis

/** Creates a sandbox and kills it after the scenario. */
export async function create(context, options = {}) {
  const sandbox = await Sandbox.create({ timeoutMs: 120_000, ...options })
  context.after(() => sandbox.kill())
  return sandbox
}

let common
/** Returns a sandbox for scenarios that do not disturb each other. */
export function shared() {
  common ??= Sandbox.create({ timeoutMs: 600_000 })
  return common
}

export async function removeShared() {
  await (await common)?.kill()
}

/** Returns the ids of the running forks of a sandbox. */
export async function children(sandbox) {
  const found = []
  const paginator = Sandbox.list()
  while (paginator.hasNext) {
    for (const { sandboxId } of await paginator.nextItems()) {
      // Other scenarios kill their sandboxes at the same time.
      const other = await Sandbox.connect(sandboxId).catch(() => undefined)
      if (other?.forkedFrom === sandbox.sandboxId) found.push(sandboxId)
    }
  }
  return found
}

/** Runs `block` without the variables that select a daemon, except the given ones. */
export async function withVariables(variables, block) {
  const before = { ...process.env }
  for (const name of Object.keys(process.env)) {
    if (/^(E2B_|JIFFY_URL|JIFFY_API_KEY|JIFFY_CA|JIFFY_HOME)/.test(name)) delete process.env[name]
  }
  Object.assign(process.env, variables)
  try {
    return await block()
  } finally {
    for (const name of Object.keys(process.env)) if (!(name in before)) delete process.env[name]
    Object.assign(process.env, before)
  }
}

export function directory(context) {
  const made = mkdtempSync(path.join(tmpdir(), 'jiffy-sdk-'))
  context.after(() => rmSync(made, { recursive: true, force: true }))
  return made
}

/**
 * Runs a server with scripted answers `[status, headers, body]`, or null to close the connection
 * without an answer. The last answer is repeated.
 */
export async function scripted(context, ...answers) {
  const requests = []
  const server = http.createServer((request, response) => {
    request.resume()
    request.on('end', () => {
      requests.push({ method: request.method, path: request.url, headers: request.headers })
      const answer = answers[Math.min(requests.length, answers.length) - 1]
      if (answer === null) return request.socket.destroy()
      const [status, headers, body] = answer
      response.writeHead(status, { 'Content-Type': 'application/json', Connection: 'close', ...headers })
      response.end(body)
    })
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  context.after(() => {
    server.closeAllConnections()
    server.close()
  })
  const apiUrl = `http://127.0.0.1:${server.address().port}`
  return { connection: { apiUrl, apiKey: `e2b_${'1'.repeat(40)}` }, requests }
}

const program = path.join(process.env.JIFFY_BIN_DIR, 'jiffy')

/** Prepares a data directory with the template base. */
export function prepare(home) {
  const real = process.env.JIFFY_SDK_HOME
  for (const name of ['templates', 'images']) mkdirSync(path.join(home, name), { recursive: true })
  const images = readdirSync(path.join(real, 'images')).map((name) => `images/${name}`)
  for (const name of ['kernel', 'disks', 'templates/base', ...images]) {
    if (!existsSync(path.join(home, name))) symlinkSync(realpathSync(path.join(real, name)), path.join(home, name))
  }
}

/** Writes a program `jiffy` that starts daemons at a free port instead of port 3000. */
export function installProgram(place) {
  mkdirSync(place)
  const text = `#!/bin/sh\nexec "${program}" "$@" --listen 127.0.0.1:0 --console off\n`
  writeFileSync(path.join(place, 'jiffy'), text, { mode: 0o755 })
}

/** Starts a daemon in its own data directory, and stops it after the scenario. */
export async function daemon(context, home, ...options) {
  prepare(home)
  const env = { ...process.env, JIFFY_HOME: home }
  const child = spawn(program, ['serve', ...options], { env, stdio: ['ignore', 'pipe', 'pipe'] })
  const log = createWriteStream(path.join(home, 'daemon.log'), { flags: 'a' })
  child.stderr.pipe(log)
  const ended = once(child, 'exit')
  const stop = async () => {
    if (child.exitCode === null && child.signalCode === null) child.kill('SIGTERM')
    await ended
  }
  context.after(stop)
  for await (const line of createInterface({ input: child.stdout })) {
    if (line.startsWith('listening on ')) {
      child.stdout.resume()
      const address = line.split(' ')[2]
      return { url: address, key: readFileSync(path.join(home, 'api-key'), 'utf8').trim(), stop, home }
    }
  }
  throw new Error(readFileSync(path.join(home, 'daemon.log'), 'utf8'))
}

/** Runs a program and returns its output. */
export async function output(command, args, env) {
  const child = spawn(command, args, { env, stdio: ['ignore', 'pipe', 'pipe'] })
  let stdout = ''
  let stderr = ''
  child.stdout.on('data', (piece) => (stdout += piece))
  child.stderr.on('data', (piece) => (stderr += piece))
  const [status] = await once(child, 'close')
  return { status, stdout, stderr }
}
