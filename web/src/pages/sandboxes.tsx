import { useCallback, useEffect, useMemo, useRef, useState } from 'react'
import { Link, useMatchRoute, useNavigate, useSearch } from '@tanstack/react-router'
import { useVirtualizer } from '@tanstack/react-virtual'
import type { Sandbox } from '../api/client'
import { useFigures, useSandboxes } from '../api/queries'
import { useSession } from '../session'
import { type SandboxAction, sandboxActions } from '../lib/actions'
import { isTyping } from '../lib/keyboard'
import { useSelection } from '../lib/selection'
import { useSorted } from '../lib/sorted'
import { visible } from '../lib/visible'
import { Button, Empty, Problem, Skeleton } from '../ui/controls'
import { Icon } from '../ui/icons'
import { FilterSelect, SearchField } from '../ui/filters'
import { BulkDialog } from './bulk'
import { CreateDialog } from './create'
import { SandboxRow } from './sandbox-row'

const ROW = 38

const measureElement = (element: Element) => element.getBoundingClientRect().height

interface Filters {
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

/** A row of the table: a sandbox, or the heading of a group. */
type Line = { sandbox: Sandbox } | { group: string; count: number }

function matches(sandbox: Sandbox, filters: Filters): boolean {
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
const columns: Record<string, (sandbox: Sandbox) => string | number> = {
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

/** Returns the different values of all sandboxes, sorted. */
function valuesOf(all: Sandbox[], of: (sandbox: Sandbox) => string | null | undefined): string[] {
  const values = new Set<string>()
  for (const sandbox of all) {
    const value = of(sandbox)
    if (value) values.add(value)
  }
  return [...values].sort()
}

export function SandboxesPage() {
  const filters = useSearch({ strict: false }) as Filters & { template?: string; snapshot?: string }
  const isNew = !!useMatchRoute()({ to: '/new' })
  const navigate = useNavigate()
  const session = useSession()
  const list = useSandboxes()
  const all = list.data
  const [bulk, setBulk] = useState<{ action: SandboxAction; sandboxes: Sandbox[] }>()
  const [cursor, setCursor] = useState(0)
  const scroller = useRef<HTMLDivElement>(null)

  const applied: Filters = isNew ? {} : filters
  const filtered = useMemo(
    () => (all ?? []).filter((s) => matches(s, applied)),
    // The filters are listed one by one, because each navigation creates a new object.
    [all, applied.q, applied.state, applied.template, applied.engine, applied.key, applied.host, applied.meta],
  )
  const sort = applied.sort ?? 'age'
  const sortedBy = sort.replace(/^-/, '')
  const isDescending = sort.startsWith('-')
  const sorted = useSorted(filtered, columns[sortedBy] ?? columns.age!, isDescending)
  const lines: Line[] = useMemo(() => {
    if (!applied.group) return sorted.map((sandbox) => ({ sandbox }))
    const groups = new Map<string, Sandbox[]>()
    for (const s of sorted) {
      const value = s.metadata[applied.group] ?? ''
      const members = groups.get(value)
      if (members) members.push(s)
      else groups.set(value, [s])
    }
    return [...groups.entries()]
      .sort(([a], [b]) => a.localeCompare(b))
      .flatMap(([group, members]): Line[] => [
        { group, count: members.length },
        ...members.map((sandbox) => ({ sandbox })),
      ])
  }, [sorted, applied.group])
  const order = useMemo(() => lines.flatMap((line) => ('sandbox' in line ? [line.sandbox.sandboxID] : [])), [lines])
  const selection = useSelection(order)

  // The virtualizer measures all rows again if this function changes.
  const getItemKey = useCallback(
    (index: number) => {
      const line = lines[index]
      return !line ? index : 'sandbox' in line ? line.sandbox.sandboxID : `group ${line.group}`
    },
    [lines],
  )
  const virtual = useVirtualizer({
    count: lines.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW,
    overscan: 8,
    measureElement,
    getItemKey,
  })
  const items = virtual.getVirtualItems()
  const shownIds = items.flatMap((item) => {
    const line = lines[item.index]
    return line && 'sandbox' in line && line.sandbox.state === 'running' ? [line.sandbox.sandboxID] : []
  })
  const figures = useFigures(shownIds)

  const update = (change: Partial<Filters>) =>
    void navigate({ to: '/sandboxes', search: (old: Filters) => ({ ...old, ...change }), replace: true } as never)

  const metadataKeys = useMemo(() => {
    const keys = new Set<string>()
    for (const s of (all ?? []).slice(0, 1000)) for (const key of Object.keys(s.metadata)) keys.add(key)
    return [...keys].sort()
  }, [all])
  const shownColumns = (applied.columns ?? '').split(',').filter(Boolean)

  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (isTyping(event)) return
      const id = order[cursor]
      if (event.key === 'j') setCursor((c) => Math.min(order.length - 1, c + 1))
      else if (event.key === 'k') setCursor((c) => Math.max(0, c - 1))
      else if (event.key === 'x' && id) selection.toggle(id)
      else if (event.key === 'Escape') selection.clear()
      else if (event.key === 'Enter' && id && event.target === document.body)
        void navigate({ to: '/sandboxes/$id', params: { id } })
    }
    addEventListener('keydown', onKey)
    return () => removeEventListener('keydown', onKey)
  })
  const cursorId = order[cursor]
  useEffect(() => {
    const index = lines.findIndex((line) => 'sandbox' in line && line.sandbox.sandboxID === cursorId)
    if (cursor > 0 && index >= 0) virtual.scrollToIndex(index)
  }, [cursor])

  const chosen = useMemo(() => {
    const ids = new Set(selection.ids)
    return (all ?? []).filter((s) => ids.has(s.sandboxID))
  }, [all, selection.ids.join(',')])
  const isFiltered = filtered.length !== (all?.length ?? 0)
  const { templates, engines, hosts, owners } = useMemo(() => {
    const of = (value: (sandbox: Sandbox) => string | null | undefined) => valuesOf(all ?? [], value)
    return {
      templates: of((s) => s.alias),
      engines: of((s) => s.engine),
      // Only sandboxes of a fleet have a host.
      hosts: of((s) => s.host),
      owners: of((s) => s.jiffy.terms.owner),
    }
  }, [all])
  const before = items[0]?.start ?? 0
  const after = virtual.getTotalSize() - (items.at(-1)?.end ?? 0)

  const heading = (id: string, label: string, isNumber = false, isWide = false) => {
    const active = sortedBy === id
    const descending = active && isDescending
    return (
      <th
        key={id}
        className={`${isNumber ? 'num' : ''}${isWide ? ' wide-only' : ''}`}
        aria-sort={active ? (descending ? 'descending' : 'ascending') : undefined}>
        <button type="button" onClick={() => update({ sort: active && !descending ? `-${id}` : id })}>
          {label}
          {active && <span aria-hidden="true">{descending ? '↓' : '↑'}</span>}
        </button>
      </th>
    )
  }
  return (
    <div className="page fill">
      <header className="page-head">
        <h1>Sandboxes</h1>
        {all && (
          <span className="muted">
            {isFiltered ? `${filtered.length.toLocaleString()} of ` : ''}
            {all.length.toLocaleString()}
          </span>
        )}
        <div className="actions">
          {session.mayChange && (
            <Link className="button primary" to="/new">
              <Icon name="plus" />
              New sandbox
            </Link>
          )}
        </div>
      </header>
      {(all?.length ?? 0) > 0 && (
        <div className="filters" role="search">
          <SearchField
            label="Filter by text"
            placeholder="Name, id, template or metadata"
            value={applied.q}
            onChange={(q) => update({ q })}
          />
          <FilterSelect
            label="State"
            value={applied.state}
            options={['running', 'paused', 'broken', 'creating']}
            onChange={(state) => update({ state })}
          />
          {templates.length > 1 && (
            <FilterSelect
              label="Template"
              value={applied.template}
              options={templates}
              onChange={(template) => update({ template })}
            />
          )}
          {engines.length > 1 && (
            <FilterSelect
              label="Engine"
              value={applied.engine}
              options={engines}
              onChange={(engine) => update({ engine })}
            />
          )}
          {session.isAdmin && owners.length > 1 && (
            <FilterSelect label="Key" value={applied.key} options={owners} onChange={(key) => update({ key })} />
          )}
          {hosts.length > 1 && (
            <FilterSelect label="Host" value={applied.host} options={hosts} onChange={(host) => update({ host })} />
          )}
          {metadataKeys.length > 0 && (
            <>
              <input
                className="input"
                style={{ width: 170 }}
                placeholder="key=value"
                aria-label="Filter by metadata"
                list="metadata-keys"
                value={applied.meta ?? ''}
                onChange={(e) => update({ meta: e.target.value || undefined })}
              />
              <datalist id="metadata-keys">
                {metadataKeys.map((key) => (
                  <option key={key} value={`${key}=`} />
                ))}
              </datalist>
              <select
                className="select"
                aria-label="Group by"
                value={applied.group ?? ''}
                onChange={(e) => update({ group: e.target.value || undefined })}>
                <option value="">Group by: nothing</option>
                {metadataKeys.map((key) => (
                  <option key={key} value={key}>
                    {visible(key)}
                  </option>
                ))}
              </select>
              <select
                className="select"
                aria-label="Add or remove a column"
                value=""
                onChange={(e) => {
                  const next = shownColumns.includes(e.target.value)
                    ? shownColumns.filter((c) => c !== e.target.value)
                    : [...shownColumns, e.target.value]
                  update({ columns: next.join(',') || undefined })
                }}>
                <option value="">Columns</option>
                {metadataKeys.map((key) => (
                  <option key={key} value={key}>
                    {shownColumns.includes(key) ? '✓ ' : ''}
                    {visible(key)}
                  </option>
                ))}
              </select>
            </>
          )}
        </div>
      )}
      {selection.ids.length > 0 && (
        <div className="bulk" role="toolbar" aria-label="Actions on selected sandboxes">
          <strong>{selection.ids.length.toLocaleString()} selected</strong>
          {selection.ids.length < order.length && (
            <button type="button" className="link" onClick={selection.all}>
              Select all {order.length.toLocaleString()} that match
            </button>
          )}
          <span className="grow" />
          {session.mayChange &&
            sandboxActions
              .filter((a) => a.id !== 'restart')
              .map((action) => (
                <Button
                  key={action.id}
                  small
                  icon={action.icon}
                  look={action.danger ? 'danger' : undefined}
                  onClick={() => setBulk({ action, sandboxes: chosen })}>
                  {action.label}
                </Button>
              ))}
          <Button small look="ghost" onClick={selection.clear}>
            Clear
          </Button>
        </div>
      )}
      {list.error && !all && <Problem error={list.error} onRetry={() => void list.refetch()} />}
      {!all && !list.error && <Skeleton rows={10} height={ROW - 8} />}
      {all?.length === 0 && (
        <Empty title="No sandboxes yet" command="jiffy create --name first">
          <p>A sandbox is a microVM with its own kernel. It starts in milliseconds.</p>
          {session.mayChange && (
            <Link className="button primary" to="/new">
              Create a sandbox
            </Link>
          )}
          <p className="muted">or on the command line</p>
        </Empty>
      )}
      {all && all.length > 0 && (
        <div className="table-wrap cards-narrow" ref={scroller} tabIndex={0} role="region" aria-label="Sandboxes">
          <table className="table" aria-rowcount={lines.length}>
            <thead>
              <tr>
                <th className="check">
                  <input
                    type="checkbox"
                    aria-label="Select all that match"
                    checked={order.length > 0 && selection.ids.length === order.length}
                    ref={(box) => {
                      if (box) box.indeterminate = selection.ids.length > 0 && selection.ids.length < order.length
                    }}
                    onChange={(e) => (e.target.checked ? selection.all() : selection.clear())}
                  />
                </th>
                {heading('name', 'Name')}
                {heading('state', 'State')}
                {heading('template', 'Template')}
                {shownColumns.map((key) => (
                  <th key={`meta ${key}`} className="wide-only">
                    {visible(key)}
                  </th>
                ))}
                {heading('age', 'Age', true)}
                {heading('remaining', 'Remaining', true)}
                {heading('cpu', 'Processors', true, true)}
                {heading('memory', 'Memory', true, true)}
                {heading('disk', 'Disk', true, true)}
                <th className="num wide-only">Network</th>
                {engines.length > 1 && heading('engine', 'Engine', false, true)}
                {session.isAdmin && owners.length > 1 && heading('key', 'Key', false, true)}
                {hosts.length > 0 && heading('host', 'Host', false, true)}
                <th className="actions-cell">
                  <span className="sr-only">Actions</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {before > 0 && (
                <tr className="spacer" aria-hidden="true">
                  <td style={{ height: before, padding: 0, border: 0 }} />
                </tr>
              )}
              {items.map((item) => {
                const line = lines[item.index]
                if (!line) return null
                if (!('sandbox' in line)) {
                  return (
                    <tr key={item.key} data-index={item.index} ref={virtual.measureElement} className="group">
                      <td colSpan={20}>
                        {applied.group}: {line.group ? visible(line.group) : 'none'}{' '}
                        <span className="muted">({line.count})</span>
                      </td>
                    </tr>
                  )
                }
                const { sandbox } = line
                return (
                  <SandboxRow
                    key={item.key}
                    index={item.index}
                    measure={virtual.measureElement}
                    sandbox={sandbox}
                    figures={figures?.[sandbox.sandboxID]}
                    selected={selection.has(sandbox.sandboxID)}
                    hasCursor={cursorId === sandbox.sandboxID}
                    metadata={shownColumns}
                    hasEngine={engines.length > 1}
                    hasKey={session.isAdmin && owners.length > 1}
                    hasHost={hosts.length > 0}
                    mayChange={session.mayChange}
                    onSelect={selection.toggle}
                    onAction={(action) => setBulk({ action, sandboxes: [sandbox] })}
                  />
                )
              })}
              {after > 0 && (
                <tr className="spacer" aria-hidden="true">
                  <td style={{ height: after, padding: 0, border: 0 }} />
                </tr>
              )}
            </tbody>
          </table>
          {filtered.length === 0 && (
            <Empty title="No sandbox matches the filters">
              <Button onClick={() => void navigate({ to: '/sandboxes', search: {} })}>Remove the filters</Button>
            </Empty>
          )}
        </div>
      )}
      {bulk && (
        <BulkDialog
          {...bulk}
          onClose={(done) => {
            setBulk(undefined)
            if (done) selection.clear()
          }}
        />
      )}
      {isNew && (
        <CreateDialog
          template={filters.template}
          snapshot={filters.snapshot}
          onClose={() => void navigate({ to: '/sandboxes' })}
        />
      )}
    </div>
  )
}
