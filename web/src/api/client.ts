import createClient from 'openapi-fetch'
import type { components, paths } from './schema'

export type Schemas = components['schemas']
export type Sandbox = Schemas['ListedSandbox']
export type SandboxDetail = Schemas['SandboxDetail']
export type Snapshot = Schemas['Snapshot']
export type Template = Schemas['Template']
export type NewSandbox = Schemas['NewSandbox']
export type SandboxState = Schemas['SandboxState']

/** Headers of all calls. Pages of other origins cannot set the header. */
export const consoleHeaders = { 'jiffy-console': '1' }

/** An error response of the API or the console. */
export class CallError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message)
  }
}

/** Returns whether an error means that the object does not exist. */
export const isNotFound = (error: unknown) => error instanceof CallError && error.status === 404

/** Returns the error of a response with the body `text`, which may have another form. */
export function callError(status: number, text: string): CallError {
  let body: { error_code?: unknown; message?: unknown } | null = null
  try {
    body = JSON.parse(text)
  } catch {
    // Not a response of the API or the console.
  }
  const code = typeof body?.error_code === 'string' ? body.error_code : 'unknown'
  const message = typeof body?.message === 'string' ? body.message : `status ${status}`
  return new CallError(status, code, message)
}

/** Returns the message of an error for the user. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error)
}

let onSignedOut = () => {}

/** Sets the function that is called when the session has ended. */
export function setSignedOut(listener: () => void) {
  onSignedOut = listener
}

async function send(input: RequestInfo | URL, init?: RequestInit): Promise<Response> {
  let response: Response
  try {
    response = await fetch(input, init)
  } catch (error) {
    if (error instanceof DOMException && error.name === 'AbortError') throw error
    throw new CallError(0, 'unreachable', 'The daemon cannot be reached.')
  }
  if (response.ok) return response
  const error = callError(response.status, await response.text().catch(() => ''))
  if (error.status === 401 && error.code === 'signed_out') onSignedOut()
  throw error
}

/** Client of the API. Errors are thrown as [CallError]. */
export const api = createClient<paths>({
  baseUrl: '/api',
  headers: consoleHeaders,
  fetch: (request) => send(request),
})

/** Calls the console itself: sessions and files of guests. */
export async function call(path: string, init: RequestInit = {}): Promise<Response> {
  return send(path, { ...init, headers: { ...consoleHeaders, ...init.headers } })
}

/** Calls the console with a JSON body and returns the parsed response. */
export async function callJson<T>(method: string, path: string, body?: unknown): Promise<T> {
  const init: RequestInit = { method }
  if (body !== undefined) {
    init.body = JSON.stringify(body)
    init.headers = { 'content-type': 'application/json' }
  }
  const response = await call(path, init)
  return response.status === 204 || response.headers.get('content-length') === '0'
    ? (undefined as T)
    : ((await response.json().catch(() => undefined)) as T)
}

/** Returns the path of the console's calls on a guest. */
export const guestPath = (id: string) => `/guest/${encodeURIComponent(id)}`

/** Returns the data of a successful response. Errors were thrown before. */
export function data<T>(result: { data?: T }): T {
  return result.data as T
}
