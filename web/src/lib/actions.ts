import { api } from '../api/client'
import type { IconName } from '../ui/icons'
import { type Command, commands } from './commands'

/** An action on one sandbox that needs no further input. */
export interface SandboxAction {
  id: 'pause' | 'resume' | 'snapshot' | 'restart' | 'kill' | 'extend'
  label: string
  /** Text while the action is in progress. */
  doing: string
  icon: IconName
  danger?: boolean
  /** States in which the action is possible. */
  states: string[]
  command: (id: string) => Command
  run: (id: string) => Promise<unknown>
}

const path = (sandboxID: string) => ({ params: { path: { sandboxID } } })

export const EXTENSION_S = 3600

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
    id: 'restart',
    label: 'Restart',
    doing: 'Restarting',
    icon: 'restart',
    states: ['running'],
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
    command: commands.kill,
    run: (id) => api.DELETE('/sandboxes/{sandboxID}', path(id)),
  },
]

export function actionOf(id: SandboxAction['id']): SandboxAction {
  const found = sandboxActions.find((action) => action.id === id)
  if (!found) throw new Error(`unknown action ${id}`)
  return found
}
