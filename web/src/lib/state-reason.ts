import type { Sandbox } from '../api/client'

const pauses: Record<string, string> = {
  timeout: 'its timeout was over',
  idle: 'it was idle',
}

/** Returns why a sandbox has its state. `undefined` if a user has requested the state. */
export function stateReason({ state, diskFailure, jiffy }: Sandbox): string | undefined {
  if (jiffy.cause) return jiffy.cause
  if (diskFailure) return `the host could not serve the disk: ${diskFailure}`
  return state === 'paused' && jiffy.pause_cause ? pauses[jiffy.pause_cause] : undefined
}
