// Errors of the API. `errorCodes.ts` has one class per `error_code`.
import * as e2b from 'e2b'

/** Details of an error response. */
export interface ApiErrorDetails {
  /** HTTP status. */
  status: number
  /** `error_code` of the response. */
  errorCode?: string
  /** Id of the request, which the daemon's log also has. */
  requestId?: string
  /** Time in seconds before a retry, if the response has one. */
  retryAfter?: number
}

/** Properties of each error of the API. */
export interface ApiError extends Error, ApiErrorDetails {}

export type ApiErrorClass = new (message: string, details: ApiErrorDetails) => ApiError

const marker = Symbol.for('jiffy.ApiError')

/** Returns whether `error` is an error response of the daemon. */
export function isApiError(error: unknown): error is ApiError {
  return typeof error === 'object' && error !== null && marker in error
}

type ErrorBase = new (message: string) => Error

/** Returns a class of errors that derives from a class of `e2b`. */
export function apiError<B extends ErrorBase>(base: B, code?: string) {
  // A mixin requires this type of its base class.
  type Base = new (...args: any[]) => Error
  class JiffyError extends (base as Base) implements ApiError {
    readonly [marker] = true
    readonly status: number
    readonly errorCode?: string
    readonly requestId?: string
    readonly retryAfter?: number

    constructor(message: string, details: ApiErrorDetails) {
      super(`${details.status}: ${message}`)
      this.name = new.target.name
      this.status = details.status
      this.errorCode = details.errorCode ?? code
      this.requestId = details.requestId
      this.retryAfter = details.retryAfter
    }
  }
  return JiffyError as unknown as new (
    message: string,
    details: ApiErrorDetails
  ) => InstanceType<B> & ApiError
}

/** Response 401 with an unknown `error_code`. */
export class UnauthorizedError extends apiError(e2b.AuthenticationError) {}
/** Response 400 or 422 with an unknown `error_code`. */
export class InvalidError extends apiError(e2b.InvalidArgumentError) {}
/** Response 404 with an unknown `error_code`. */
export class MissingError extends apiError(e2b.NotFoundError) {}
/** Response 429 with an unknown `error_code`. */
export class TooManyRequestsError extends apiError(e2b.RateLimitError) {}
/** Response 503 with an unknown `error_code`. */
export class BusyError extends apiError(e2b.ServiceBusyError) {}
/** Response 507 with an unknown `error_code`. */
export class NoSpaceError extends apiError(e2b.NotEnoughSpaceError) {}
/** Response with another status and an unknown `error_code`. */
export class OtherError extends apiError(e2b.SandboxError) {}

const byStatus: Record<number, ApiErrorClass> = {
  400: InvalidError,
  401: UnauthorizedError,
  404: MissingError,
  422: InvalidError,
  429: TooManyRequestsError,
  503: BusyError,
  507: NoSpaceError,
}

/** No address is configured, and no daemon runs on this host. */
export class NoDaemonError extends e2b.SandboxError {
  override name = 'NoDaemonError'
}

/**
 * The daemon cannot be reached, or the connection ended before the response. A call that changes
 * state may have been executed, unless it is repeatable.
 */
export class UnreachableError extends e2b.SandboxError {
  override name = 'UnreachableError'
}

/** No function of `tryEach` succeeded, or `keep` selected none. */
export class AllFailedError extends e2b.SandboxError {
  override name = 'AllFailedError'
  constructor(
    message: string,
    /** Results of all functions. */
    readonly outcomes: unknown[]
  ) {
    super(message)
  }
}

/** Returns the value of `Retry-After` in seconds. `undefined` if it is absent or not a number. */
export function retryAfter(headers: Headers): number | undefined {
  const text = headers.get('retry-after')?.trim() ?? ''
  return /^\d{1,9}$/.test(text) ? Number(text) : undefined
}

/** Returns the error of a response. */
export function errorOf(
  status: number,
  content: string,
  headers: Headers,
  classes: Record<string, ApiErrorClass>
): ApiError {
  let body: { message?: unknown; error_code?: unknown } = {}
  try {
    const parsed: unknown = JSON.parse(content)
    if (typeof parsed === 'object' && parsed !== null) body = parsed
  } catch {
    // Proxies send bodies that are not JSON.
  }
  const code = typeof body.error_code === 'string' ? body.error_code : undefined
  const message = typeof body.message === 'string' ? body.message : content.slice(0, 500) || 'no message'
  const ofCode = code !== undefined && Object.hasOwn(classes, code) ? classes[code] : undefined
  const kind = ofCode ?? byStatus[status] ?? OtherError
  return new kind(message, {
    status,
    errorCode: code,
    requestId: headers.get('x-request-id') ?? undefined,
    retryAfter: retryAfter(headers),
  })
}
