import { useEffect, useMemo, useState } from 'react'
import { Link, useMatchRoute, useNavigate, useSearch } from '@tanstack/react-router'
import type { Sandbox } from '../api/client'
import { useSandboxes } from '../api/queries'
import { useSession } from '../session'
import { type SandboxAction, sandboxActions } from '../lib/actions'
import { isTyping } from '../lib/keyboard'
import { filterValues, type Filters, isGroup, linesOf, matches, sortValues } from '../lib/sandbox-filters'
import { useSelection } from '../lib/selection'
import { useSorted, useStable } from '../lib/sorted'
import { visible } from '../lib/visible'
import { Button, Empty, Problem, Skeleton } from '../ui/controls'
import { Icon } from '../ui/icons'
import { FilterSelect, SearchField } from '../ui/filters'
import { BulkDialog } from './bulk'
import { CreateDialog } from './create'
import { ROW, SandboxTable } from './sandbox-table'

export function SandboxesPage() {
  const filters = useSearch({ strict: false }) as Filters & { template?: string; snapshot?: string }
  const isNew = !!useMatchRoute()({ to: '/new' })
  const navigate = useNavigate()
  const session = useSession()
  const list = useSandboxes()
  const all = list.data
  const [bulk, setBulk] = useState<{ action: SandboxAction; sandboxes: Sandbox[] }>()
  const [cursor, setCursor] = useState(0)

  const applied: Filters = isNew ? {} : filters
  const filtered = useMemo(
    () => (all ?? []).filter((s) => matches(s, applied)),
    // The filters are listed one by one, because each navigation creates a new object.
    [all, applied.q, applied.state, applied.template, applied.engine, applied.key, applied.host, applied.meta],
  )
  const sort = applied.sort ?? 'age'
  const column = sortValues[sort.replace(/^-/, '')] ?? sortValues.age!
  const sorted = useSorted(filtered, column, sort.startsWith('-'))
  const lines = useMemo(() => linesOf(sorted, applied.group), [sorted, applied.group])
  const order = useStable(
    useMemo(() => lines.flatMap((line) => (isGroup(line) ? [] : [line.sandboxID])), [lines]),
  )
  const selection = useSelection(order)

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
  const chosen = useMemo(() => {
    if (selection.ids.length === 0) return []
    const ids = new Set(selection.ids)
    return (all ?? []).filter((s) => ids.has(s.sandboxID))
  }, [all, selection.ids])
  const isFiltered = filtered.length !== (all?.length ?? 0)
  const { templates, engines, hosts, owners } = useMemo(() => filterValues(all ?? []), [all])
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
            sandboxActions.map((action) => (
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
        <SandboxTable
          lines={lines}
          order={order}
          selection={selection}
          cursor={cursor}
          group={applied.group}
          sort={sort}
          onSort={(next) => update({ sort: next })}
          metadata={shownColumns}
          hasEngine={engines.length > 1}
          hasKey={session.isAdmin && owners.length > 1}
          hasHost={hosts.length > 0}
          onAction={(action, sandbox) => setBulk({ action, sandboxes: [sandbox] })}>
          {filtered.length === 0 && (
            <Empty title="No sandbox matches the filters">
              <Button onClick={() => void navigate({ to: '/sandboxes', search: {} })}>Remove the filters</Button>
            </Empty>
          )}
        </SandboxTable>
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
