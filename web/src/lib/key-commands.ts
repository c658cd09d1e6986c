import type { Schemas } from '../api/client'
import type { Command } from './commands'

type Body<T> = { [K in keyof T]?: T[K] }

/** Options of `jiffy key create` for the limits of the API. */
const limitOptions: [keyof Schemas['KeyLimits'], string, string][] = [
  ['sandboxes', '--max-sandboxes', ''],
  ['vcpus', '--max-cpus', ''],
  ['memoryMB', '--max-memory', 'MiB'],
  ['createsPerMinute', '--creates-per-minute', ''],
  ['paused', '--max-paused', ''],
  ['snapshots', '--max-snapshots', ''],
  ['templates', '--max-templates', ''],
  ['builds', '--max-builds', ''],
  ['diskMB', '--max-disk', 'MiB'],
  ['exchanges', '--max-exchanges', ''],
]

const path = (key: string) => `/keys/${encodeURIComponent(key)}`

/** The commands of all actions on keys. */
export const keyCommands = {
  create(body: Body<Schemas['CreateKey']>): Command {
    const words = ['key', 'create']
    if (body.name) words.push(`--name=${body.name}`)
    if (body.scope) words.push(`--scope=${body.scope}`)
    for (const [limit, option, unit] of limitOptions) {
      const value = body.limits?.[limit]
      if (value !== undefined) words.push(`${option}=${value}${unit}`)
    }
    if (body.expiresAt) words.push(`--expires=${body.expiresAt}`)
    for (const address of body.addresses ?? []) words.push(`--allow-from=${address}`)
    return { jiffy: words, method: 'POST', path: '/keys', body }
  },
  rotate(key: string, body: Body<Schemas['RotateKey']>): Command {
    const words = ['key', 'rotate']
    if (body.overlapMs) words.push(`--overlap=${body.overlapMs / 1000}s`)
    if (body.expiresAt) words.push(`--expires=${body.expiresAt}`)
    return { jiffy: [...words, '--', key], method: 'POST', path: `${path(key)}/rotate`, body }
  },
  revoke: (key: string, end: boolean): Command => ({
    jiffy: ['key', 'revoke', ...(end ? ['--end'] : []), '--', key],
    method: 'POST',
    path: `${path(key)}/revoke`,
    body: { end },
  }),
}

/** Reads the usage since a day, of one key or of all. */
export function usageCommand(from: string, key: string | undefined): Command {
  const query = new URLSearchParams(key === undefined ? { from } : { from, key })
  return {
    jiffy: ['usage', `--from=${from}`, ...(key === undefined ? [] : [`--key=${key}`])],
    method: 'GET',
    path: `/usage?${query}`,
  }
}
