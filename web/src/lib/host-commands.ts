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
