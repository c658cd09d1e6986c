// Calls of the control plane: requests, and parsers of their results.
import { randomUUID } from 'node:crypto'
import {
  InvalidArgumentError,
  type SandboxConnectOpts,
  type SandboxInfo,
  type SandboxMetrics,
  SandboxNotFoundError,
} from 'e2b'
import { classes } from './errorCodes.js'
import { type ApiError, errorOf } from './errors.js'
import * as m from './models.js'
import type { Call, Reply } from './transport.js'

/** Maximum time in seconds of one call of `wait`. */
export const WAIT_SECONDS = 10

const MAX_FORKS = 100
/** Time for which the files of a volume are copied to or from the store. */
const VOLUME_MS = 600_000
/** Maximum number of differences on a page. */
const MAX_DIFFERENCES = 10_000
/** Maximum duration of a comparison. */
const MAX_COMPARE_MS = 60_000

/** States from which a sandbox can still reach an awaited state. */
export const CHANGING: Record<m.AwaitedState, string[]> = {
  ended: ['creating', 'running', 'paused'],
  running: ['creating', 'paused'],
  paused: ['creating', 'running'],
}

const route = (...parts: string[]) => parts.map((part) => `/${encodeURIComponent(part)}`).join('')
const sandbox = (id: string, ...parts: string[]) => route('sandboxes', id, ...parts)
const nothing = () => undefined
const isMissing = (status: number) => status === 404
const exists = (reply: Reply) => reply.status !== 404
const createdOf = (reply: Reply) => m.created(reply.json())

/** Converts a timeout of `e2b` to seconds. -1 means no limit. */
export function seconds(milliseconds: number | undefined): number | undefined {
  if (milliseconds === undefined) return undefined
  return milliseconds < 0 ? -1 : Math.ceil(milliseconds / 1000)
}

/** A repeated request has the same key, and creates nothing again. */
export function create(body: m.Json, idempotencyKey?: string): Call<m.Created> {
  const headers = { 'Idempotency-Key': idempotencyKey ?? randomUUID() }
  return { method: 'POST', path: '/v2/sandboxes', parse: createdOf, body, headers }
}

export function connect(id: string, options?: SandboxConnectOpts): Call<m.Created> {
  const body = { timeout: seconds(options?.timeoutMs), memory: options?.onResume === 'reboot' ? false : undefined }
  return { method: 'POST', path: `/v2${sandbox(id, 'connect')}`, parse: createdOf, body }
}

export function fork(id: string, timeoutMs?: number, count?: number): Call<(m.Created | ApiError)[]> {
  if (count !== undefined && !(Number.isInteger(count) && count >= 1 && count <= MAX_FORKS)) {
    throw new InvalidArgumentError(`count must be an integer from 1 to ${MAX_FORKS}`)
  }
  const parse = (reply: Reply) =>
    (reply.json() as m.Json[]).map((entry) => {
      if (entry.sandbox) return m.created(entry.sandbox)
      const error: m.Json = entry.error ?? { code: 500, message: 'the child was not created' }
      return errorOf(error.code, JSON.stringify(error), reply.headers, classes)
    })
  const body = { timeout: seconds(timeoutMs), count }
  return { method: 'POST', path: sandbox(id, 'fork'), parse, body, repeatable: false }
}

export function kill(id: string): Call<boolean> {
  return { method: 'DELETE', path: sandbox(id), parse: exists, accepts: isMissing }
}

export function info(id: string): Call<SandboxInfo> {
  const parse = (reply: Reply): SandboxInfo => {
    const data: m.Json = reply.json()
    return {
      sandboxId: data.sandboxID,
      templateId: data.templateID,
      ...(data.alias && { name: data.alias }),
      metadata: data.metadata ?? {},
      allowInternetAccess: data.allowInternetAccess ?? undefined,
      envdVersion: data.envdVersion,
      startedAt: new Date(data.startedAt),
      endAt: new Date(data.endAt),
      state: data.state,
      cpuCount: data.cpuCount,
      memoryMB: data.memoryMB,
      network: data.network,
      lifecycle: data.lifecycle,
      sandboxDomain: data.domain || undefined,
      volumeMounts: data.volumeMounts ?? [],
    }
  }
  return { method: 'GET', path: sandbox(id), parse }
}

export function setTimeout(id: string, timeoutMs: number): Call<void> {
  return { method: 'POST', path: sandbox(id, 'timeout'), parse: nothing, body: { timeout: seconds(timeoutMs) } }
}

export function setNetwork(id: string, body: m.Json): Call<void> {
  return { method: 'PUT', path: sandbox(id, 'network'), parse: nothing, body }
}

export function metrics(id: string, start?: Date, end?: Date): Call<SandboxMetrics[]> {
  const unix = (time?: Date) => (time ? Math.round(time.getTime() / 1000) : undefined)
  const parse = (reply: Reply) => (reply.json() as m.Json[]).map(m.stats)
  return { method: 'GET', path: sandbox(id, 'metrics'), parse, query: { start: unix(start), end: unix(end) } }
}

export function stats(id: string): Call<m.Stats> {
  const parse = (reply: Reply) => {
    const usage: m.Json | undefined = reply.json().sandboxes[id]
    if (!usage) throw new SandboxNotFoundError(`sandbox ${id} is not running`)
    return m.stats(usage)
  }
  return { method: 'GET', path: '/sandboxes/metrics', parse, query: { sandbox_ids: id, now: true } }
}

export function pause(id: string, memory?: boolean): Call<boolean> {
  const parse = (reply: Reply) => {
    if (reply.status !== 409) return true
    const error = errorOf(reply.status, new TextDecoder().decode(reply.body), reply.headers, classes)
    if (error.errorCode !== 'already_paused') throw error
    return false
  }
  const accepts = (status: number) => status === 409
  return { method: 'POST', path: sandbox(id, 'pause'), parse, body: { memory }, repeatable: false, accepts }
}

export interface SnapshotOptions {
  name?: string
  ack?: m.Ack
  durable?: boolean
}

const snapshotOf = (reply: Reply) => m.snapshotInfo(reply.json())

export function snapshot(id: string, { name, ack, durable }: SnapshotOptions): Call<m.SnapshotDetails> {
  const body = { name, ack, durable }
  return { method: 'POST', path: sandbox(id, 'snapshots'), parse: snapshotOf, body, repeatable: false }
}

export function getSnapshot(id: string): Call<m.SnapshotDetails> {
  return { method: 'GET', path: route('snapshots', id), parse: snapshotOf }
}

type SnapshotPage = [snapshots: m.SnapshotDetails[], nextToken?: string]

export function listSnapshots(sandboxID?: string, name?: string, nextToken?: string): Call<SnapshotPage> {
  const parse = (reply: Reply): SnapshotPage => [
    (reply.json() as m.Json[]).map(m.snapshotInfo),
    reply.headers.get('x-next-token') || undefined,
  ]
  return { method: 'GET', path: '/snapshots', parse, query: { sandboxID, name, nextToken } }
}

export function deleteSnapshot(id: string): Call<boolean> {
  return { method: 'DELETE', path: route('templates', id), parse: exists, accepts: isMissing }
}

export function snapshotVolume(volumeId: string): Call<m.VolumeSnapshot> {
  const parse = (reply: Reply) => m.volumeSnapshot(reply.json())
  const path = route('volumes', volumeId, 'snapshots')
  return { method: 'POST', path, parse, repeatable: false, waitsMs: VOLUME_MS }
}

export function listVolumeSnapshots(nextToken?: string): Call<[m.VolumeSnapshot[], string | undefined]> {
  const parse = (reply: Reply): [m.VolumeSnapshot[], string | undefined] => [
    (reply.json() as m.Json[]).map(m.volumeSnapshot),
    reply.headers.get('x-next-token') || undefined,
  ]
  return { method: 'GET', path: '/volumesnapshots', parse, query: { nextToken } }
}

export function restoreVolume(snapshot: string | m.VolumeSnapshot, name: string): Call<string> {
  const parse = (reply: Reply): string => reply.json().volumeID
  const body = { name, volumeSnapshotID: volumeSnapshotId(snapshot) }
  return { method: 'POST', path: '/volumes', parse, body, repeatable: false, waitsMs: VOLUME_MS }
}

export function deleteVolumeSnapshot(snapshot: string | m.VolumeSnapshot): Call<boolean> {
  const path = route('volumesnapshots', volumeSnapshotId(snapshot))
  return { method: 'DELETE', path, parse: exists, accepts: isMissing }
}

const volumeSnapshotId = (snapshot: string | m.VolumeSnapshot) =>
  typeof snapshot === 'string' ? snapshot : snapshot.snapshotId

export function verifySnapshot(id: string): Call<m.Json[]> {
  return { method: 'POST', path: route('snapshots', id, 'verify'), parse: (reply) => reply.json() }
}

export function rollback(id: string, snapshotID: string): Call<void> {
  return { method: 'POST', path: sandbox(id, 'rollback'), parse: nothing, body: { snapshotID }, repeatable: false }
}

export function lineage(id: string): Call<m.Lineage> {
  return { method: 'GET', path: '/lineage', parse: (reply) => m.lineage(reply.json()), query: { sandboxID: id } }
}

/** Returns a page of differences, and the token of the next page. */
export function compare(
  a: string,
  b: string,
  limit: number,
  nextToken?: string
): Call<[m.Difference[], string | undefined]> {
  const parse = (reply: Reply): [m.Difference[], string | undefined] => [
    reply.json().changes.map(m.difference),
    reply.headers.get('x-next-token') ?? undefined,
  ]
  const query = { a, b, limit: Math.max(1, Math.min(limit, MAX_DIFFERENCES)), nextToken }
  return { method: 'GET', path: '/compare', parse, query, waitsMs: MAX_COMPARE_MS }
}

export function promote(id: string): Call<string[]> {
  return { method: 'POST', path: sandbox(id, 'promote'), parse: (reply) => reply.json().removed }
}

export function restart(id: string, graceMs?: number): Call<void> {
  const waitsMs = graceMs ?? 10_000
  return { method: 'POST', path: sandbox(id, 'restart'), parse: nothing, body: { graceMs }, repeatable: false, waitsMs }
}

export function setIdleTimeout(id: string, idleTimeoutMs: number): Call<void> {
  const body = { idleTimeout: Math.ceil(idleTimeoutMs / 1000) }
  return { method: 'POST', path: sandbox(id, 'timeout'), parse: nothing, body }
}

export function rename(id: string, name: string | null): Call<void> {
  return { method: 'PATCH', path: sandbox(id), parse: nothing, body: { name } }
}

export function wait(id: string, state: m.AwaitedState, limit: number): Call<string> {
  const parse = (reply: Reply): string => reply.json().state
  const query = { for: state, seconds: limit }
  return { method: 'GET', path: sandbox(id, 'wait'), parse, query, waitsMs: limit * 1000 }
}

export function preview(id: string, port: number, ttl?: number): Call<m.Preview> {
  const parse = (reply: Reply) => {
    const data: m.Json = reply.json()
    return { url: data.url as string, expiresAt: new Date(data.expiresAt) }
  }
  return { method: 'GET', path: sandbox(id, 'preview'), parse, query: { port, ttl } }
}

export function connections(id: string, limit?: number): Call<m.NetworkConnections> {
  const parse = (reply: Reply): m.NetworkConnections => {
    const data: m.Json = reply.json()
    return {
      connections: data.connections.map((item: m.Json) => ({ ...item, timestamp: new Date(item.timestamp) })),
      since: data.since ? new Date(data.since) : undefined,
      missing: data.missing,
      untold: data.untold,
    }
  }
  return { method: 'GET', path: sandbox(id, 'connections'), parse, query: { limit } }
}

const json = <T>(reply: Reply) => reply.json() as T

export const host = (): Call<m.HostStatus> => ({ method: 'GET', path: '/host', parse: json })
export const engines = (): Call<m.Engine[]> => ({ method: 'GET', path: '/engines', parse: json })
export const pools = (): Call<m.Pool[]> => ({ method: 'GET', path: '/pools', parse: json })

export function setPool(template: string, size: number): Call<m.Pool> {
  return { method: 'PUT', path: route('pools', template), parse: json, body: { size } }
}

export function limits(key?: string): Call<m.Limits> {
  return { method: 'GET', path: '/limits', parse: json, query: { key } }
}

/** Maximum time in seconds for which a call waits for events. */
const EVENT_WAIT_S = 20

/** A page of events after the position `after`. Waits for the first event if the iterator follows. */
export function events(selection: m.EventOptions, after: string | undefined): Call<m.EventPage> {
  const event = (data: m.Json): m.SandboxEvent => {
    const { id, type, time, sandboxID, cause } = data
    return { id, type, time: new Date(time), sandboxId: sandboxID, cause, data }
  }
  const parse = (reply: Reply): m.EventPage => {
    const { events: items, dropped, next, more }: m.Json = reply.json()
    // Later pages report a gap only if events were removed meanwhile.
    const isGap = after !== undefined && dropped
    const gap = isGap ? [{ type: 'gap', time: new Date(dropped.until), data: dropped }] : []
    return { events: [...gap, ...items.map(event)], next, more }
  }
  const wait = selection.follow === false ? 0 : EVENT_WAIT_S
  const types = selection.types?.join(',')
  const since = selection.since?.toISOString()
  const query = { sandboxID: selection.sandboxId, types, since, after, wait, limit: 1000 }
  return { method: 'GET', path: '/events', parse, query, waitsMs: wait * 1000 }
}

/** A repeated deployment of the same module could create a second version. */
export function deploy(name: string, module: Uint8Array, settings: m.Json): Call<m.Json> {
  const form = new FormData()
  form.set('settings', new Blob([JSON.stringify(settings)], { type: 'application/json' }))
  form.set('module', new Blob([new Uint8Array(module)], { type: 'application/wasm' }), 'module.wasm')
  return { method: 'POST', path: route('functions', name), parse: json, content: form, repeatable: false }
}

export function getFunction(name: string): Call<m.Json> {
  return { method: 'GET', path: route('functions', name), parse: json }
}

export const listFunctions = (): Call<m.Json[]> => ({ method: 'GET', path: '/functions', parse: json })

export function removeFunction(name: string): Call<boolean> {
  return { method: 'DELETE', path: route('functions', name), parse: exists, accepts: isMissing }
}

export function switchFunction(name: string, action: string, version?: number): Call<m.Json> {
  const body = version === undefined ? undefined : { version }
  const repeatable = action !== 'rollback' || version !== undefined
  return { method: 'POST', path: route('functions', name, action), parse: json, body, repeatable }
}

export function functionLog(name: string, after?: string, limit?: number): Call<m.FunctionLog> {
  const parse = (reply: Reply): m.FunctionLog => {
    const data: m.Json = reply.json()
    const entries = data.entries.map((entry: m.Json) => ({ ...entry, timestamp: new Date(entry.timestamp) }))
    return { entries, next: data.next }
  }
  const query = { after, wait: limit }
  return { method: 'GET', path: route('functions', name, 'logs'), parse, query, waitsMs: (limit ?? 0) * 1000 }
}

export interface InvokeOptions {
  /** Defaults to `POST` with a body, and to `GET` without. */
  method?: string
  body?: Uint8Array | string
  headers?: Record<string, string>
}

/** The response of the function is the result, also if its status is an error. */
export function invoke(name: string, path: string, options: InvokeOptions): Call<m.FunctionResponse> {
  const content = typeof options.body === 'string' ? new TextEncoder().encode(options.body) : options.body
  const method = (options.method ?? (content ? 'POST' : 'GET')).toUpperCase()
  const parse = ({ status, headers, body }: Reply): m.FunctionResponse => {
    const text = () => new TextDecoder().decode(body)
    if (status >= 400) {
      const error = errorOf(status, text(), headers, classes)
      if (error.errorCode !== undefined && Object.hasOwn(classes, error.errorCode)) throw error
    }
    return { status, headers, body, text }
  }
  return {
    method,
    path: `${route('functions', name, 'invoke')}/${path.replace(/^\/+/, '')}`,
    parse,
    content,
    headers: options.headers,
    repeatable: ['GET', 'HEAD', 'OPTIONS'].includes(method),
    accepts: () => true,
  }
}

const build = (template: string, id: string, ...parts: string[]) => route('templates', template, 'builds', id, ...parts)

/** The result has the ids of template and build. */
export function requestBuild(name: string): Call<{ template: string; build: string }> {
  const parse = (reply: Reply) => {
    const { templateID, buildID }: m.Json = reply.json()
    return { template: templateID, build: buildID }
  }
  return { method: 'POST', path: '/v3/templates', parse, body: { name } }
}

export function startImport(template: string, id: string, image: string): Call<void> {
  const body = { fromImage: image, steps: [] }
  return { method: 'POST', path: `/v2${build(template, id)}`, parse: nothing, body, repeatable: false }
}

/** State of a build, with the log after the first lines. */
export interface BuildStatus {
  status: string
  logs: string[]
  reason?: { message?: string }
}

export function buildStatus(template: string, id: string, lines: number): Call<BuildStatus> {
  const parse = (reply: Reply) => reply.json() as BuildStatus
  return { method: 'GET', path: build(template, id, 'status'), parse, query: { logsOffset: lines } }
}

export function hasTemplate(name: string): Call<boolean> {
  return { method: 'GET', path: route('templates', 'aliases', name), parse: exists, accepts: isMissing }
}
