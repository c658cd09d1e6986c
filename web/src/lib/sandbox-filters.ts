import type { Sandbox } from '../api/client'

/** Filters, order and columns of the table of sandboxes, as in the address of the page. */
export interface Filters {
  q?: string
  state?: string
  template?: string
  engine?: string
  key?: string
  host?: string
  meta?: string
  group?: string
  sort?: string
  columns?: string
}

/** Returns whether the table shows a sandbox. */
export function matches(sandbox: Sandbox, filters: Filters): boolean {
  const { q, state, template, engine, key, host, meta } = filters
  if (state && sandbox.state !== state) return false
  if (template && sandbox.alias !== template) return false
  if (engine && sandbox.engine !== engine) return false
  if (key && sandbox.jiffy.terms.owner !== key) return false
  if (host && sandbox.host !== host) return false
  if (meta) {
    const at = meta.indexOf('=')
    const name = at < 0 ? meta : meta.slice(0, at)
    const value = sandbox.metadata[name]
    if (value === undefined || (at >= 0 && value !== meta.slice(at + 1))) return false
  }
  if (!q) return true
  const text = q.toLowerCase()
  return (
    sandbox.sandboxID.startsWith(text) ||
    (sandbox.name?.toLowerCase().includes(text) ?? false) ||
    sandbox.alias.toLowerCase().includes(text) ||
    Object.entries(sandbox.metadata).some(([k, v]) => `${k}=${v}`.toLowerCase().includes(text))
  )
}

/** Values of the columns by which the table can be sorted. */
export const sortValues: Record<string, (sandbox: Sandbox) => string | number> = {
  name: (s) => s.name ?? `\uffff${s.sandboxID}`,
  state: (s) => s.state,
  template: (s) => s.alias,
  age: (s) => -s.jiffy.created_ms,
  remaining: (s) => s.jiffy.deadline_ms ?? Number.MAX_SAFE_INTEGER,
  cpu: (s) => s.cpuCount,
  memory: (s) => s.memoryMB,
  disk: (s) => s.diskSizeMB,
  engine: (s) => s.engine ?? '',
  key: (s) => s.jiffy.terms.owner ?? '',
  host: (s) => s.host ?? '',
}

/** Values of a list of sandboxes by which it can be filtered, sorted. */
export function filterValues(all: Sandbox[]) {
  const [templates, engines, hosts, owners] = [new Set<string>(), new Set<string>(), new Set<string>(), new Set<string>()]
  for (const { alias, engine, host, jiffy } of all) {
    templates.add(alias)
    if (engine) engines.add(engine)
    // Only sandboxes of a fleet have a host.
    if (host) hosts.add(host)
    if (jiffy.terms.owner) owners.add(jiffy.terms.owner)
  }
  const sorted = (values: Set<string>) => [...values].sort()
  return {
    templates: sorted(templates),
    engines: sorted(engines),
    hosts: sorted(hosts),
    owners: sorted(owners),
  }
}

/** Heading of a group of sandboxes with the same value of a metadata key. */
export interface Group {
  group: string
  count: number
}

/** A row of the table. */
export type Line = Sandbox | Group

export const isGroup = (line: Line): line is Group => 'group' in line

/** Returns the rows of the table: sandboxes in order, grouped by a metadata key if there is one. */
export function linesOf(sorted: Sandbox[], key: string | undefined): Line[] {
  if (!key) return sorted
  const groups = new Map<string, Sandbox[]>()
  for (const sandbox of sorted) {
    const value = sandbox.metadata[key] ?? ''
    const members = groups.get(value)
    if (members) members.push(sandbox)
    else groups.set(value, [sandbox])
  }
  return [...groups.entries()]
    .sort(([a], [b]) => a.localeCompare(b))
    .flatMap(([group, members]): Line[] => [{ group, count: members.length }, ...members])
}
