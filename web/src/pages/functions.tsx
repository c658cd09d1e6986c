import { useState } from 'react'
import { Link, useNavigate } from '@tanstack/react-router'
import { useQuery } from '@tanstack/react-query'
import { api, data, type Schemas } from '../api/client'
import { useSession } from '../session'
import { sorted, useFilters } from '../lib/filters'
import { functionCommands } from '../lib/function-commands'
import { count } from '../lib/format'
import { visible } from '../lib/visible'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Button, Empty, Menu, Problem, Skeleton, Time } from '../ui/controls'
import { SortHeading } from '../ui/sort-heading'
import { FilterSelect, SearchField } from '../ui/filters'
import { DeployDialog } from './deploy'

type Fn = Schemas['Function']

interface Filters {
  q?: string
  state?: string
  sort?: string
}

const columns: Record<string, (fn: Fn) => string | number> = {
  name: (f) => f.name,
  state: (f) => f.state,
  version: (f) => -f.version,
  updated: (f) => -Date.parse(f.updatedAt),
}

export function FunctionsPage() {
  const session = useSession()
  const navigate = useNavigate()
  const [filters, update] = useFilters<Filters>()
  const [dropped, setDropped] = useState<File>()
  const [isOver, setOver] = useState(false)
  const [dialog, setDialog] = useState<{ kind: 'deploy' } | { kind: 'remove'; fn: Fn }>()
  const list = useQuery({
    queryKey: ['functions'],
    queryFn: async ({ signal }) =>
      data(await api.GET('/functions', { params: { query: { all: session.isAdmin } }, signal }))!,
    refetchInterval: 5000,
  })
  const all = list.data ?? []
  const wanted = (filters.q ?? '').toLowerCase()
  const sort = filters.sort ?? 'name'
  const shown = sorted(
    all.filter((f) => (!filters.state || f.state === filters.state) && f.name.includes(wanted)),
    sort,
    columns,
  )
  // The calls of a function find only functions of their caller.
  const isOwn = (fn: Fn) => fn.owner === session.keyID || (session.isAdmin && fn.owner === null)
  const heading = { sort, onSort: (next: string) => update({ sort: next }) }
  return (
    <div
      className="page fill drop-target"
      data-over={isOver}
      onDragOver={(e) => {
        if (!session.mayChange || ![...e.dataTransfer.items].some((item) => item.kind === 'file')) return
        e.preventDefault()
        setOver(true)
      }}
      onDragLeave={(e) => {
        if (e.currentTarget === e.target) setOver(false)
      }}
      onDrop={(e) => {
        if (!session.mayChange) return
        e.preventDefault()
        setOver(false)
        setDropped(e.dataTransfer.files[0])
        setDialog({ kind: 'deploy' })
      }}>
      <header className="page-head">
        <h1>Functions</h1>
        {list.data && <span className="muted">{count(all.length, 'function')}</span>}
        <div className="actions">
          {session.mayChange && (
            <Button
              look="primary"
              icon="upload"
              onClick={() => {
                setDropped(undefined)
                setDialog({ kind: 'deploy' })
              }}>
              Deploy
            </Button>
          )}
        </div>
      </header>
      {list.error && !list.data && <Problem error={list.error} onRetry={() => void list.refetch()} />}
      {!list.data && !list.error && <Skeleton rows={5} height={30} />}
      {list.data && all.length === 0 && (
        <Empty
          title="No functions yet"
          command="jiffy function new --lang rust hello && jiffy function deploy hello hello">
          <p>A function is a WebAssembly module that answers HTTP requests.</p>
          {session.mayChange && <p>Drop a module on this page to deploy it, or use the command line:</p>}
        </Empty>
      )}
      {all.length > 0 && (
        <>
          <div className="filters" role="search">
            <SearchField
              label="Filter functions"
              placeholder="Name"
              value={filters.q}
              onChange={(q) => update({ q })}
            />
            <FilterSelect
              label="State"
              value={filters.state}
              options={['enabled', 'disabled']}
              onChange={(state) => update({ state })}
            />
          </div>
          <div className="table-wrap cards-narrow" tabIndex={0} role="region" aria-label="Functions">
            <table className="table">
              <thead>
                <tr>
                  <SortHeading id="name" label="Name" {...heading} />
                  <SortHeading id="state" label="State" {...heading} />
                  <SortHeading id="version" label="Version" isNumber {...heading} />
                  <th>Access</th>
                  <th>Schedule</th>
                  {session.isAdmin && <th className="wide-only">Key</th>}
                  <th className="wide-only">World</th>
                  <SortHeading id="updated" label="Updated" {...heading} />
                  <th>
                    <span className="sr-only">Actions</span>
                  </th>
                </tr>
              </thead>
              <tbody>
                {shown.map((f) => (
                  <tr key={f.label}>
                    <td className="name">
                      {isOwn(f) ? (
                        <Link to="/functions/$name" params={{ name: f.name }}>
                          {visible(f.name)}
                        </Link>
                      ) : (
                        visible(f.name)
                      )}
                    </td>
                    <td>
                      <span className={`badge ${f.state === 'enabled' ? 'good' : ''}`}>{f.state}</span>
                    </td>
                    <td className="num card-line" data-label="Version">
                      {f.version}
                    </td>
                    <td className="card-line" data-label="Access">
                      {f.public ? 'public' : 'with a key'}
                    </td>
                    <td className="card-line" data-label="Schedule">
                      {f.schedule ? <code>{visible(f.schedule.cron)}</code> : '–'}
                    </td>
                    {session.isAdmin && (
                      <td className="wide-only">
                        <code>{f.owner?.slice(0, 8) ?? 'owner'}</code>
                      </td>
                    )}
                    <td className="wide-only">{visible(f.world ?? '–')}</td>
                    <td className="card-line" data-label="Updated">
                      <Time at={f.updatedAt} />
                    </td>
                    <td className="actions-cell">
                      {isOwn(f) && (
                        <Menu
                          label={`Actions on ${visible(f.name)}`}
                          entries={[
                            {
                              label: 'Open',
                              icon: 'open',
                              onSelect: () => void navigate({ to: '/functions/$name', params: { name: f.name } }),
                            },
                            ...(session.mayChange
                              ? [
                                  'line' as const,
                                  {
                                    label: 'Remove',
                                    icon: 'trash' as const,
                                    danger: true,
                                    onSelect: () => setDialog({ kind: 'remove', fn: f }),
                                  },
                                ]
                              : []),
                          ]}
                        />
                      )}
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
            {shown.length === 0 && <Empty title="No function matches" />}
          </div>
        </>
      )}
      {dialog?.kind === 'deploy' && (
        <DeployDialog
          file={dropped}
          onClose={() => setDialog(undefined)}
          onDone={(name) => void navigate({ to: '/functions/$name', params: { name } })}
        />
      )}
      {dialog?.kind === 'remove' && (
        <RemoveFunction name={dialog.fn.name} onClose={() => setDialog(undefined)} onDone={() => void list.refetch()} />
      )}
    </div>
  )
}

export function RemoveFunction({ name, onClose, onDone }: { name: string; onClose: () => void; onDone: () => void }) {
  return (
    <ConfirmDialog
      title={`Remove ${visible(name)}?`}
      label="Remove"
      danger
      command={functionCommands.remove(name)}
      onClose={onClose}
      onDone={onDone}
      run={() => api.DELETE('/functions/{name}', { params: { path: { name } } })}>
      The function, all its versions and its log are removed. Requests to it fail with status 404.
    </ConfirmDialog>
  )
}
