import type { SandboxState } from '../api/client'

const looks: Record<SandboxState, string> = {
  creating: 'busy',
  running: 'good',
  paused: '',
  broken: 'bad',
  killed: '',
}

export function StateBadge({ state, doing }: { state: SandboxState; doing?: string }) {
  return <span className={`badge ${doing ? 'busy' : looks[state]}`}>{doing ?? state}</span>
}
