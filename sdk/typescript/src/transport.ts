// Sends calls to the control plane, and repeats them where that is safe.
import { setTimeout as sleep } from 'node:timers/promises'
import { AuthenticationError, ConnectionConfig, TimeoutError } from 'e2b'
import type { Connection } from './connection.js'
import { classes } from './errorCodes.js'
import { UnreachableError, errorOf, retryAfter } from './errors.js'

// Statuses of a rejected request, which the daemon has not executed.
const REJECTED = [429, 503]
// Statuses after which the request may have been executed.
const UNCERTAIN = [502, 504]
const FIRST_DELAY_MS = 100
const MAX_DELAY_MS = 10_000
const DEFAULT_TIMEOUT_MS = 60_000

/** Response of a call. */
export interface Reply {
  status: number
  headers: Headers
  body: Uint8Array
  json(): any
}

/** Call of the control plane. */
export interface Call<T> {
  method: string
  path: string
  parse: (reply: Reply) => T
  query?: Record<string, string | number | boolean | undefined>
  body?: unknown
  content?: Uint8Array | FormData
  headers?: Record<string, string>
  /** False if the call must not be repeated when the daemon may have executed it. */
  repeatable?: boolean
  /** Time in milliseconds for which the daemon may delay the response. */
  waitsMs?: number
  /** Returns whether an error status is a result. */
  accepts?: (status: number) => boolean
}

function request(config: ConnectionConfig, call: Call<unknown>): [string, RequestInit] {
  if (!config.apiKey) throw new AuthenticationError('API key is required: set JIFFY_API_KEY, or pass apiKey')
  const url = new URL(config.apiUrl.replace(/\/+$/, '') + call.path)
  for (const [name, value] of Object.entries(call.query ?? {})) {
    if (value !== undefined) url.searchParams.set(name, String(value))
  }
  const headers: Record<string, string> = { ...config.headers, 'X-API-KEY': config.apiKey, ...call.headers }
  let body: BodyInit | undefined = call.content as BodyInit | undefined
  if (call.body !== undefined) {
    headers['Content-Type'] = 'application/json'
    body = JSON.stringify(call.body)
  }
  return [url.href, { method: call.method, headers, body, redirect: 'manual' }]
}

function backoff(attempt: number): number {
  return Math.min(FIRST_DELAY_MS * 2 ** attempt, MAX_DELAY_MS) * (0.5 + Math.random() / 2)
}

/** Returns the time to wait before a retry. `undefined` if the call must not be repeated. */
function delayAfter(call: Call<unknown>, response: Response, attempt: number): number | undefined {
  const { status } = response
  if (status < 400 || call.accepts?.(status)) return undefined
  const marked = response.headers.get('should-retry')?.trim().toLowerCase()
  if (marked === 'false') return undefined
  const repeatable = call.repeatable ?? true
  const allowed = UNCERTAIN.includes(status)
    ? repeatable
    : REJECTED.includes(status) || (marked === 'true' && repeatable)
  if (!allowed) return undefined
  const seconds = retryAfter(response.headers)
  return seconds === undefined ? backoff(attempt) : seconds * 1000
}

/** Sends a call and returns its result. */
export async function send<T>(options: Connection, call: Call<T>): Promise<T> {
  const config = new ConnectionConfig(options)
  const [url, init] = request(config, call)
  const limit = (config.requestTimeoutMs || DEFAULT_TIMEOUT_MS) + (call.waitsMs ?? 0)
  const deadline = Date.now() + limit
  const { signal } = options
  for (let attempt = 0; ; attempt += 1) {
    const outcome = await exchange(url, init, deadline, signal)
    let delay: number | undefined
    if (outcome instanceof Error) delay = call.repeatable === false ? undefined : backoff(attempt)
    else delay = delayAfter(call, outcome.response, attempt)
    if (attempt >= config.retries || delay === undefined || Date.now() + delay >= deadline) {
      if (!(outcome instanceof Error)) return result(call, outcome)
      throw new UnreachableError(`no response of the daemon at ${config.apiUrl}: ${reason(outcome)}`)
    }
    await sleep(delay, undefined, { signal })
  }
}

interface Exchange {
  response: Response
  body: Uint8Array
}

/** Sends one request. Returns the response, or the error of a lost connection. */
async function exchange(
  url: string,
  init: RequestInit,
  deadline: number,
  signal: AbortSignal | undefined
): Promise<Exchange | Error> {
  try {
    const timeout = AbortSignal.timeout(Math.max(1, deadline - Date.now()))
    const response = await fetch(url, { ...init, signal: signal ? AbortSignal.any([signal, timeout]) : timeout })
    return { response, body: new Uint8Array(await response.arrayBuffer()) }
  } catch (error) {
    signal?.throwIfAborted()
    if (error instanceof DOMException && error.name === 'TimeoutError') {
      throw new TimeoutError('request timed out: the option requestTimeoutMs increases the limit')
    }
    // `fetch` reports lost connections as `TypeError`, in Bun as an error with a code.
    if (error instanceof TypeError || (error instanceof Error && 'code' in error)) return error
    throw error
  }
}

function reason(error: Error): string {
  const cause: unknown = error.cause
  return cause instanceof Error ? cause.message || error.message : error.message
}

function result<T>(call: Call<T>, { response, body }: Exchange): T {
  const { status, headers } = response
  const text = () => new TextDecoder().decode(body)
  if (status >= 400 && !call.accepts?.(status)) throw errorOf(status, text(), headers, classes)
  return call.parse({ status, headers, body, json: () => JSON.parse(text()) as unknown })
}
