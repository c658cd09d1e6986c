// Attempts in forks: parts of `tryEach`.
import { AllFailedError } from './errors.js'
import type * as m from './models.js'

/** Selects an outcome, or its index. */
export type Keep<S, T> = (outcomes: m.Outcome<S, T>[]) => m.Outcome<S, T> | number | undefined

/** Runs a function in a fork. */
export async function outcome<S, T>(
  attempt: (fork: S) => Promise<T> | T,
  sandbox: S,
  index: number
): Promise<m.Outcome<S, T>> {
  try {
    return { index, sandbox, result: await attempt(sandbox) }
  } catch (error) {
    return { index, sandbox, error: error instanceof Error ? error : new Error(String(error)) }
  }
}

/** Selects the first function that returned. */
export function firstSuccess<S, T>(outcomes: m.Outcome<S, T>[]): m.Outcome<S, T> | undefined {
  return outcomes.find(({ error }) => error === undefined)
}

/** Returns the outcome that `keep` selects. */
export function select<S, T>(outcomes: m.Outcome<S, T>[], keep: Keep<S, T>): m.Outcome<S, T> {
  const answer = keep(outcomes)
  const chosen = typeof answer === 'number' ? outcomes[answer] : answer
  if (chosen) return chosen
  const errors = outcomes.flatMap(({ error }) => error ?? [])
  const text = `${errors.length} of ${outcomes.length} functions failed, and no fork was selected`
  const failure = new AllFailedError(text, outcomes)
  failure.cause = errors[0]
  throw failure
}

/** Returns the result of `promise`, or rejects when `signal` is aborted. */
export async function orAborted<T>(promise: Promise<T>, signal?: AbortSignal): Promise<T> {
  if (!signal) return promise
  let abort = () => {}
  const aborted = new Promise<never>((_, reject) => {
    abort = () => reject(signal.reason as Error)
    signal.addEventListener('abort', abort, { once: true })
    if (signal.aborted) abort()
  })
  try {
    return await Promise.race([promise, aborted])
  } finally {
    signal.removeEventListener('abort', abort)
  }
}
