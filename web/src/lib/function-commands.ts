import type { Schemas } from '../api/client'
import type { Command } from './commands'

export type DeploySettings = Partial<Schemas['DeploySettings']>

const path = (name: string, rest = '') => `/functions/${encodeURIComponent(name)}${rest}`

/** The commands of all actions on functions. */
export const functionCommands = {
  /** Deploys the module in the file `file`. */
  deploy(name: string, settings: DeploySettings, file: string): Command {
    const words = ['function', 'deploy']
    const { limits } = settings
    for (const [key, value] of Object.entries(settings.env ?? {})) words.push(`--env=${key}=${value}`)
    if (limits?.memoryMB) words.push(`--memory=${limits.memoryMB}MiB`)
    if (limits?.cpuMs) words.push(`--cpu-ms=${limits.cpuMs}`)
    if (limits?.timeoutMs) words.push(`--timeout=${limits.timeoutMs / 1000}s`)
    if (limits?.concurrency) words.push(`--concurrency=${limits.concurrency}`)
    for (const host of settings.allow ?? []) words.push(`--allow=${host}`)
    if (settings.public != null) words.push(settings.public ? '--public' : '--private')
    if (settings.schedule != null) words.push(`--schedule=${settings.schedule}`)
    return {
      jiffy: [...words, '--', name, file],
      method: 'POST',
      path: path(name),
      form: { settings, file },
    }
  },
  rollBack: (name: string, version: number): Command => ({
    jiffy: ['function', 'rollback', name, String(version)],
    method: 'POST',
    path: path(name, '/rollback'),
    body: { version },
  }),
  disable: (name: string): Command => ({
    jiffy: ['function', 'disable', name],
    method: 'POST',
    path: path(name, '/disable'),
  }),
  enable: (name: string): Command => ({
    jiffy: ['function', 'enable', name],
    method: 'POST',
    path: path(name, '/enable'),
  }),
  remove: (name: string): Command => ({
    jiffy: ['function', 'rm', name],
    method: 'DELETE',
    path: path(name),
  }),
  /** Follows the log. The call returns the retained lines. */
  logs: (name: string): Command => ({
    jiffy: ['function', 'logs', '-f', name],
    method: 'GET',
    path: path(name, '/logs'),
  }),
  invoke(name: string, method: string, request: string, text?: string): Command {
    const words = ['function', 'invoke', `--method=${method}`]
    if (text !== undefined) words.push('--header=content-type: text/plain', '--data=@-')
    return {
      jiffy: [...words, '--', name, request],
      input: text,
      method,
      path: path(name, `/invoke${request}`),
      text,
    }
  },
}
