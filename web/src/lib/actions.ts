import { api, data } from '../api/client'
import type { IconName } from '../ui/icons'
import { type Command, commands } from './commands'

/** An action on one sandbox. */
export interface SandboxAction {
  id: 'pause' | 'resume' | 'snapshot' | 'fork' | 'restart' | 'kill' | 'extend'
  label: string
  /** Text while the action is in progress. */
  doing: string
  icon: IconName
  danger?: boolean
  /** States in which the action is possible. */
  states: string[]
  /** Effect of the action, for its confirmation. */
  effect?: string
  /** Whether the action makes a number of copies. */
  hasCount?: boolean
  /** `count` is the number of copies. */
  command: (id: string, count?: number) => Command
  run: (id: string, count?: number) => Promise<unknown>
}

const path = (sandboxID: string) => ({ params: { path: { sandboxID } } })

export const EXTENSION_S = 3600

/** Maximum number of copies of a fork. */
export const MAX_FORK = 100

/** Forks a sandbox. Returns the number of started copies, and a message if others failed. */
export async function fork(id: string, count: number): Promise<{ started: number; failure?: string }> {
  const children = data(await api.POST('/sandboxes/{sandboxID}/fork', { ...path(id), body: { count } }))!
  const failures = children.filter((child) => child.error)
  const first = failures[0]?.error
  return {
    started: children.length - failures.length,
    failure: first && `${failures.length} of ${children.length} forks failed: ${first.message}`,
  }
}

export const sandboxActions: SandboxAction[] = [
  {
    id: 'pause',
    label: 'Pause',
    doing: 'Pausing',
    icon: 'pause',
    states: ['running'],
    command: commands.pause,
    run: (id) => api.POST('/sandboxes/{sandboxID}/pause', path(id)),
  },
  {
    id: 'resume',
    label: 'Resume',
    doing: 'Resuming',
    icon: 'play',
    states: ['paused', 'broken'],
    command: commands.resume,
    run: (id) => api.POST('/sandboxes/{sandboxID}/resume', { ...path(id), body: {} }),
  },
  {
    id: 'snapshot',
    label: 'Snapshot',
    doing: 'Taking a snapshot of',
    icon: 'snapshots',
    states: ['running'],
    command: (id) => commands.snapshot(id),
    run: (id) => api.POST('/sandboxes/{sandboxID}/snapshots', { ...path(id), body: {} }),
  },
  {
    id: 'extend',
    label: 'Set the timeout to 1 h',
    doing: 'Setting the timeout of',
    icon: 'clock',
    states: ['running', 'paused'],
    command: (id) => commands.timeout(id, { timeout: EXTENSION_S }),
    run: (id) => api.POST('/sandboxes/{sandboxID}/timeout', { ...path(id), body: { timeout: EXTENSION_S } }),
  },
  {
    id: 'fork',
    label: 'Fork',
    doing: 'Forking',
    icon: 'fork',
    states: ['running'],
    effect: 'Each copy has the memory, processes and files of this moment. The sandboxes continue to run.',
    hasCount: true,
    command: (id, count = 1) => commands.fork(id, count),
    run: async (id, count = 1) => {
      const { failure } = await fork(id, count)
      if (failure) throw new Error(failure)
    },
  },
  {
    id: 'restart',
    label: 'Restart',
    doing: 'Restarting',
    icon: 'restart',
    states: ['running'],
    effect: 'All processes are stopped, and the start commands of the templates run. Files remain.',
    command: commands.restart,
    run: (id) => api.POST('/sandboxes/{sandboxID}/restart', path(id)),
  },
  {
    id: 'kill',
    label: 'Kill',
    doing: 'Killing',
    icon: 'kill',
    danger: true,
    states: ['running', 'paused', 'broken', 'creating'],
    effect: 'Memory and files of the sandboxes are lost. Their snapshots remain.',
    command: commands.kill,
    run: (id) => api.DELETE('/sandboxes/{sandboxID}', path(id)),
  },
]

export function actionOf(id: SandboxAction['id']): SandboxAction {
  const found = sandboxActions.find((action) => action.id === id)
  if (!found) throw new Error(`unknown action ${id}`)
  return found
}
