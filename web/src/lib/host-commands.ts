import type { Command } from './commands'

const path = (host: string) => `/fleet/nodes/${encodeURIComponent(host)}`

/** The commands of all actions on hosts of a fleet. */
export const hostCommands = {
  drain: (host: string, force: boolean): Command => ({
    jiffy: ['fleet', 'drain', ...(force ? ['--force'] : []), host],
    method: 'POST',
    path: `${path(host)}/drain`,
    body: { force },
  }),
  undrain: (host: string): Command => ({
    jiffy: ['fleet', 'undrain', host],
    method: 'POST',
    path: `${path(host)}/undrain`,
  }),
}

/** Filters of the audit log. */
export interface AuditFilters {
  call?: string
  key?: string
  address?: string
  result?: string
}

/** The command that shows the calls of the audit log that match the filters. */
export function auditCommand({ call, key, address, result }: AuditFilters): Command {
  const words = ['audit']
  const query = new URLSearchParams()
  const option = (name: string, parameter: string, value: string | undefined) => {
    if (!value) return
    words.push(`--${name}=${value}`)
    query.set(parameter, value)
  }
  option('key', 'keyID', key)
  option('address', 'address', address)
  option('call', 'call', call)
  if (result === 'rejected') {
    words.push('--rejected')
    query.set('rejected', 'true')
  }
  const parameters = query.toString()
  return { jiffy: words, method: 'GET', path: `/audit${parameters ? `?${parameters}` : ''}` }
}
