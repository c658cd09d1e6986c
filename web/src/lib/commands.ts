import type { Schemas } from '../api/client'
import { pythonString, pythonValue } from './command-text'

/** An action as the commands that users can run instead. */
export interface Command {
  /** Words of the `jiffy` command line. `undefined` if it has no equivalent. */
  jiffy?: string[]
  /** Standard input of the `jiffy` command line. */
  input?: string
  /** Python statements with the package `e2b`. If it has no equivalent, the call of the API is shown. */
  python?: string
  /** Lines for a shell, if the action needs several calls of the API. */
  curl?: string
  /** Call of the API, with one kind of body or none: JSON, text, or a form with a file. */
  method: string
  path: string
  body?: unknown
  text?: string
  form?: { settings: unknown; file: string }
}

const id = encodeURIComponent

/** The settings of a new sandbox that the page offers. */
export type CreateBody = Pick<
  Schemas['NewSandbox'],
  | 'templateID'
  | 'name'
  | 'cpuCount'
  | 'memoryMB'
  | 'timeout'
  | 'idleTimeout'
  | 'lifecycle'
  | 'allow_internet_access'
  | 'network'
  | 'engine'
  | 'metadata'
  | 'envVars'
>

/** Timeouts of a sandbox in seconds. Absent ones are retained. */
export interface Timeouts {
  /** -1: no timeout. */
  timeout?: number
  /** 0: the sandbox is never paused because it is idle. */
  idleTimeout?: number
}

/** Returns a time in seconds as a word of the command line. */
const secondsWord = (seconds: number) => (seconds === 0 ? '0' : `${seconds}s`)

/** The commands of all actions on sandboxes and snapshots. */
export const commands = {
  create(body: CreateBody, isSnapshot = false): Command {
    const words = ['create']
    const option = (name: string, value: unknown) => {
      if (value !== undefined && value !== null && value !== '') words.push(`${name}=${String(value)}`)
    }
    option(isSnapshot ? '--from' : '--template', body.templateID)
    option('--name', body.name)
    option('--cpus', body.cpuCount)
    option('--memory', body.memoryMB && `${body.memoryMB}MiB`)
    option('--timeout', body.timeout === -1 ? 'none' : body.timeout && `${body.timeout}s`)
    option('--on-timeout', body.lifecycle?.onTimeout)
    option('--idle-timeout', body.idleTimeout == null ? undefined : secondsWord(body.idleTimeout))
    option('--network', body.allow_internet_access === false ? 'off' : undefined)
    option('--engine', body.engine)
    for (const [key, value] of Object.entries(body.metadata ?? {})) option('--label', `${key}=${value}`)
    for (const [key, value] of Object.entries(body.envVars ?? {})) option('--env', `${key}=${value}`)
    const python = [`template=${pythonValue(body.templateID)}`]
    if (body.timeout !== undefined) python.push(`timeout=${pythonValue(body.timeout)}`)
    if (body.metadata) python.push(`metadata=${pythonValue(body.metadata)}`)
    if (body.envVars) python.push(`envs=${pythonValue(body.envVars)}`)
    if (body.allow_internet_access === false) python.push('allow_internet_access=False')
    // `e2b` has no arguments for these settings.
    const { name, cpuCount, memoryMB, engine, lifecycle, idleTimeout, network } = body
    const others = [name, cpuCount, memoryMB, engine, lifecycle, idleTimeout, network]
    const isOfE2b = others.every((v) => v == null)
    return {
      // The command line has no option for a list of hosts.
      jiffy: network ? undefined : words,
      python: isOfE2b ? `sandbox = Sandbox.create(${python.join(', ')})` : undefined,
      method: 'POST',
      path: '/v2/sandboxes',
      body,
    }
  },
  pause: (sandbox: string): Command => ({
    jiffy: ['pause', sandbox],
    python: `Sandbox.connect(${pythonString(sandbox)}).pause()`,
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/pause`,
  }),
  resume: (sandbox: string): Command => ({
    jiffy: ['resume', sandbox],
    python: `Sandbox.connect(${pythonString(sandbox)})`,
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/resume`,
    body: {},
  }),
  kill: (sandbox: string): Command => ({
    jiffy: ['kill', sandbox],
    python: `Sandbox.kill(${pythonString(sandbox)})`,
    method: 'DELETE',
    path: `/sandboxes/${id(sandbox)}`,
  }),
  /** Follows the console log. The call returns the last lines. */
  logs: (sandbox: string): Command => ({
    jiffy: ['logs', '-f', sandbox],
    method: 'GET',
    path: `/v2/sandboxes/${id(sandbox)}/logs?limit=1000`,
  }),
  connections: (sandbox: string): Command => ({
    jiffy: ['logs', '--network', sandbox],
    method: 'GET',
    path: `/sandboxes/${id(sandbox)}/connections?limit=1000`,
  }),
  processes: (sandbox: string): Command => ({
    jiffy: ['processes', sandbox],
    method: 'GET',
    path: `/sandboxes/${id(sandbox)}/processes`,
  }),
  signal: (sandbox: string, pid: number, signal: string): Command => ({
    jiffy: ['signal', sandbox, String(pid), signal],
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/processes/${pid}/signal`,
    body: { signal },
  }),
  restart: (sandbox: string): Command => ({
    jiffy: ['restart', sandbox],
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/restart`,
  }),
  snapshot: (sandbox: string, name?: string): Command => ({
    jiffy: ['snapshot', sandbox, ...(name ? [`--name=${name}`] : [])],
    python: `Sandbox.connect(${pythonString(sandbox)}).create_snapshot(${name ? `name=${pythonString(name)}` : ''})`,
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/snapshots`,
    body: name ? { name } : {},
  }),
  fork: (sandbox: string, count: number): Command => ({
    jiffy: ['fork', sandbox, '--count', String(count)],
    python: `Sandbox.connect(${pythonString(sandbox)}).fork(count=${count})`,
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/fork`,
    body: { count },
  }),
  promote: (sandbox: string): Command => ({
    jiffy: ['promote', sandbox],
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/promote`,
  }),
  rollback: (sandbox: string, snapshotID: string): Command => ({
    jiffy: ['rollback', sandbox, snapshotID],
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/rollback`,
    body: { snapshotID },
  }),
  compare: (a: string, b: string): Command => ({
    jiffy: ['diff', a, b],
    method: 'GET',
    path: `/compare?a=${id(a)}&b=${id(b)}`,
  }),
  timeout(sandbox: string, timeouts: Timeouts): Command {
    const { timeout, idleTimeout } = timeouts
    const words = ['timeout', sandbox]
    if (timeout !== undefined) words.push(timeout === -1 ? 'none' : secondsWord(timeout))
    if (idleTimeout !== undefined) words.push(`--idle=${secondsWord(idleTimeout)}`)
    const isOfE2b = idleTimeout === undefined && timeout !== undefined
    return {
      jiffy: words,
      python: isOfE2b ? `Sandbox.connect(${pythonString(sandbox)}).set_timeout(${timeout})` : undefined,
      method: 'POST',
      path: `/sandboxes/${id(sandbox)}/timeout`,
      body: timeouts,
    }
  },
  rename: (sandbox: string, name: string): Command => ({
    jiffy: ['rename', '--', sandbox, name],
    method: 'PATCH',
    path: `/sandboxes/${id(sandbox)}`,
    body: { name: name || null },
  }),
  removeSnapshot: (snapshot: string): Command => ({
    jiffy: ['rm', snapshot],
    python: `Sandbox.delete_snapshot(${pythonString(snapshot)})`,
    method: 'DELETE',
    path: `/templates/${id(snapshot)}`,
  }),
  /** Removes unused data. */
  prune: (): Command => ({
    jiffy: ['prune', '--yes'],
    method: 'POST',
    path: '/prune',
    body: { dryRun: false },
  }),
  network: (sandbox: string, body: unknown): Command => ({
    method: 'PATCH',
    path: `/sandboxes/${id(sandbox)}/network`,
    body,
  }),
}
