// Finds the daemon: options, `JIFFY_*`, `E2B_*`, the daemon of this host.
import { execFileSync } from 'node:child_process'
import { existsSync, readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { homedir } from 'node:os'
import path from 'node:path'
import tls from 'node:tls'
import { type ConnectionOpts, InvalidArgumentError } from 'e2b'
import { NoDaemonError } from './errors.js'

/** Connection options of `e2b`. */
export type Connection = ConnectionOpts

// Maximum times in milliseconds to start the daemon, and to request its address.
const START_MS = 60_000
const SOCKET_MS = 10_000
const INSTALL = 'set JIFFY_URL and JIFFY_API_KEY, or install the host programs: npm install @jiffy/host-linux-x64'
// Program that prints the response of `GET /host`. The program runs in a separate process, because
// the options of a call are resolved synchronously.
const REQUEST = `require('node:http')
  .get({ socketPath: process.argv[1], path: '/host' }, (response) => response.pipe(process.stdout))
  .on('error', () => process.exit(1))`

const variable = (name: string) => process.env[name] || undefined

/** Adds the address and the API key of the daemon to `options`, unless they have an address. */
export function withAddress<T extends Connection>(options: T | undefined): T {
  const merged = { ...options } as T
  if (merged.proxy) throw new InvalidArgumentError('the option proxy is not supported')
  const jiffyUrl = variable('JIFFY_URL')?.replace(/\/+$/, '')
  const e2bUrl = variable('E2B_API_URL')
  if (merged.apiUrl) {
    merged.sandboxUrl ??= merged.apiUrl
  } else if (merged.domain || merged.debug) {
    // The caller selected another address.
  } else if (jiffyUrl) {
    merged.apiUrl = jiffyUrl
    merged.sandboxUrl ??= jiffyUrl
    merged.apiKey ??= variable('JIFFY_API_KEY') ?? variable('E2B_API_KEY')
  } else if (e2bUrl) {
    merged.apiUrl = e2bUrl
    merged.sandboxUrl ??= variable('E2B_SANDBOX_URL') ?? e2bUrl
  } else if (!variable('E2B_DOMAIN') && !variable('E2B_DEBUG')) {
    const local = localDaemon()
    merged.apiUrl = local.url
    merged.sandboxUrl = local.url
    merged.apiKey ??= local.key
  }
  trustAuthority()
  return merged
}

/** Returns the data directory of the daemon of this host, as the program `jiffy` selects it. */
function dataDirectory(): string {
  const home = variable('JIFFY_HOME')
  if (home) return home
  if (process.geteuid?.() === 0) return '/var/lib/jiffy'
  return path.join(variable('XDG_DATA_HOME') ?? path.join(homedir(), '.local/share'), 'jiffy')
}

/** Returns the address of the daemon. `undefined` if no daemon runs, null if it has no address. */
function listenAddress(home: string): string | null | undefined {
  let response: string
  try {
    const socket = path.join(home, 'run/jiffy.sock')
    if (!existsSync(socket)) return undefined
    response = execFileSync(process.execPath, ['-e', REQUEST, socket], {
      timeout: SOCKET_MS,
      stdio: ['ignore', 'pipe', 'ignore'],
    }).toString()
  } catch {
    return undefined
  }
  const status = JSON.parse(response) as { jiffy?: { listen?: string | null } }
  // A client cannot connect to a wildcard address.
  return status.jiffy?.listen?.replace('://0.0.0.0', '://127.0.0.1').replace('://[::]', '://[::1]') ?? null
}

function hostProgram(): string | undefined {
  try {
    const host = createRequire(import.meta.url).resolve('@jiffy/host-linux-x64/package.json')
    return path.join(path.dirname(host), 'bin', 'jiffy')
  } catch {
    const directories = (variable('PATH') ?? '').split(path.delimiter)
    return directories.map((directory) => path.join(directory, 'jiffy')).find((file) => existsSync(file))
  }
}

/** Address and key of the daemon of this host, by data directory. */
const localDaemons = new Map<string, { url: string; key: string }>()

/** Returns address and key of the daemon of this host. Starts the daemon if none runs. */
function localDaemon(): { url: string; key: string } {
  const home = dataDirectory()
  const known = localDaemons.get(home)
  if (known) return known
  let url = listenAddress(home)
  if (url === undefined) {
    const program = hostProgram()
    if (!program) throw new NoDaemonError(`no Jiffy daemon runs on this host: ${INSTALL}`)
    try {
      execFileSync(program, ['daemon', 'start'], { timeout: START_MS, stdio: ['ignore', 'ignore', 'pipe'] })
    } catch (error) {
      throw new NoDaemonError(`cannot start the daemon with \`${program} daemon start\`: ${String(error)}`)
    }
    url = listenAddress(home)
  }
  if (!url) throw new NoDaemonError(`the daemon of ${home} has no address: start it with \`jiffy daemon start\``)
  let key: string
  try {
    key = readFileSync(path.join(home, 'api-key'), 'utf8').trim()
  } catch (error) {
    throw new NoDaemonError(`cannot read the API key of the daemon: ${String(error)}; set JIFFY_API_KEY`)
  }
  localDaemons.set(home, { url, key })
  return { url, key }
}

let trusted: string | undefined

/** Makes this process trust the certificate authorities in `JIFFY_CA` too. */
function trustAuthority(): void {
  const file = variable('JIFFY_CA')
  if (!file || file === trusted) return
  // Node.js 22.19 and later. The types of older versions lack these functions.
  const functions = tls as unknown as {
    getCACertificates?: (kind: 'default') => string[]
    setDefaultCACertificates?: (authorities: string[]) => void
  }
  if (!functions.getCACertificates || !functions.setDefaultCACertificates) {
    if (process.env.NODE_EXTRA_CA_CERTS === file) return
    throw new NoDaemonError('JIFFY_CA requires Node.js 22.19 or later: set NODE_EXTRA_CA_CERTS to the file instead')
  }
  functions.setDefaultCACertificates([...functions.getCACertificates('default'), readFileSync(file, 'utf8')])
  trusted = file
}
