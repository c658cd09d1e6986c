// Imports of registry images, from which sandboxes are created.
import { createHash } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import { BuildError } from 'e2b'
import * as calls from './calls.js'
import type { Connection } from './connection.js'
import { send } from './transport.js'

/** Interval between requests for the state of an import, in milliseconds. */
const POLL_MS = 200

/** Returns the name of the template of an image. `jiffy create --image` uses the same name. */
function templateOf(image: string): string {
  const last = image.slice(image.lastIndexOf('/') + 1).replace(/[^a-z0-9._-]/gu, '-')
  const digest = createHash('sha256').update(image).digest('hex')
  return `img-${last.slice(0, 40)}-${digest.slice(0, 8)}`
}

/** Imports an image unless it is unchanged since its last import, and returns its template. */
export async function importImage(
  connection: Connection,
  image: string,
  onLog?: (line: string) => void
): Promise<string> {
  const name = templateOf(image)
  const { template, build } = await send(connection, calls.requestBuild(name))
  await send(connection, calls.startImport(template, build, image))
  for (let lines = 0; ; await sleep(POLL_MS)) {
    const { logs, status, reason } = await send(connection, calls.buildStatus(template, build, lines))
    lines += logs.length
    if (onLog) for (const line of logs) onLog(line.replace(/\n$/, ''))
    if (status === 'ready') return name
    if (status !== 'error') continue
    // An earlier import remains usable, for example without a connection to the registry.
    if (await send(connection, calls.hasTemplate(name))) return name
    throw new BuildError(`cannot import image ${image}: ${reason?.message ?? 'the import failed without a reason'}`)
  }
}
